"""Full fine-tuning of language models larger than GPU memory, as a scheduling problem."""
