"""The references in ``docs`` are what the schemas say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lazysched.train_config import TrainConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_references_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    texts: dict[str, str] = module.references()
    for name, text in texts.items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, f"run python docs/reference.py: {name} is old"
    # All that a user can set is said in words, but for what its name says.
    assert set(TrainConfig.model_fields) - set(module.attribute_texts(TrainConfig)) == {
        "adam_beta1", "adam_beta2", "adam_epsilon",
    }  # fmt: skip
