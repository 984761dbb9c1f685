"""Training data: files and datasets become rows of tokens with labels, and those the batches that steps name."""

from lazysched.runtime.data.batches import Batches, evaluation_batches, pack
from lazysched.runtime.data.dataset import DataReport, Dataset, check_vocabulary, split
from lazysched.runtime.data.store import Example

__all__ = ["Batches", "DataReport", "Dataset", "Example", "check_vocabulary", "evaluation_batches", "pack", "split"]
