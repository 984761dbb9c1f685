"""Notebooks run from top to bottom, with less time for each solve, and are committed without output."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
TIME_LIMIT_S = 1


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_is_committed(path: Path) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code_cells(path))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    namespace: dict[str, object] = {}
    for cell in code_cells(path):
        source = re.sub(r"^TIME_LIMIT_S = \d+", f"TIME_LIMIT_S = {TIME_LIMIT_S}", "".join(cell["source"]), flags=re.M)
        exec(compile(source, str(path), "exec"), namespace)
    assert namespace.get("TIME_LIMIT_S", TIME_LIMIT_S) == TIME_LIMIT_S


def test_without_its_data_a_notebook_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = next(path for path in NOTEBOOKS if path.stem == "predicted_measured")
    with pytest.raises(FileNotFoundError, match=r"benchmarks/results/step\.json is neither in .*inside a checkout"):
        exec(compile("".join(code_cells(path)[0]["source"]), str(path), "exec"), {})
