"""The data fixtures skip visibly, and fail instead where LAZYSCHED_REQUIRE_DATA=1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
USES_GSM8K = "def test_uses(gsm8k):\n    assert gsm8k.name == 'rows'\n"


def _outcome(folder: Path, **environment: str) -> str:
    """Output of pytest over one test that takes ``gsm8k``, in a checkout of its own."""
    tests = folder / "checkout" / "tests"
    tests.mkdir(parents=True)
    (tests / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    (tests / "test_uses.py").write_text(USES_GSM8K, encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LAZYSCHED_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "-rsf", "-p", "no:cacheprovider", str(tests)]
    result = subprocess.run(command, cwd=folder, env=clean | environment, capture_output=True, text=True)
    return result.stdout


def test_missing_data_skips_with_the_remedy(tmp_path: Path) -> None:
    output = _outcome(tmp_path)
    assert "1 skipped" in output
    assert "name its folder in LAZYSCHED_GSM8K" in output


def test_missing_data_fails_where_it_is_required(tmp_path: Path) -> None:
    assert "1 error" in _outcome(tmp_path, LAZYSCHED_REQUIRE_DATA="1")


@pytest.mark.parametrize("by_variable", [True, False])
def test_data_are_found(tmp_path: Path, by_variable: bool) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    if by_variable:
        assert "1 passed" in _outcome(tmp_path, LAZYSCHED_GSM8K=str(rows), LAZYSCHED_REQUIRE_DATA="1")
        return
    beside = tmp_path / "shared" / "data"
    beside.mkdir(parents=True)
    (beside / "gsm8k").symlink_to(rows)
    # The fixture hands out the folder beside the checkout under its own name.
    assert "'gsm8k' == 'rows'" in _outcome(tmp_path)
