"""Good input, made once for a session, and a copy of it for each test; no network, and caches beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bad_input.files import Files, prepare
from tests.one_thread import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return prepare(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def files(prepared: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    """Copies in the working folder, so that a file with a relative name would be seen too."""
    home = tmp_path / "home"
    for name in ("XDG_CACHE_HOME", "LAZYSCHED_PROFILES", "LAZYSCHED_TOKENS"):
        monkeypatch.setenv(name, str(home / name))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    copies = prepared.copied_to(tmp_path / "work")
    monkeypatch.chdir(copies.root)
    yield copies
    assert [path for path in home.rglob("*") if path.name.startswith(".")] == []  # begun and left
