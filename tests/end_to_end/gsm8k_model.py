"""What tests on real input share: SmolLM2 cut to its first layers, and some rows of GSM8K."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from lazysched.runtime.sources import resolve_model


def cut_model(smollm2_gguf: Path, folder: Path, num_layers: int) -> Path:
    """Write SmolLM2 with its first layers only to ``folder``."""
    source = resolve_model(str(smollm2_gguf)).config_dir
    model = AutoModelForCausalLM.from_pretrained(source)
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def first_rows(gsm8k: Path, num_train: int, num_held_out: int) -> tuple[list[str], list[str]]:
    """The first lines of the training file and of the test file."""
    train, held_out = ((gsm8k / name).read_text().splitlines() for name in ("train.jsonl", "test.jsonl"))
    return train[:num_train], held_out[:num_held_out]
