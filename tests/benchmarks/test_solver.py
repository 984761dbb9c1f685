"""The solver benchmark's smoke run shows every part and saves nothing; wrong arguments end in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOLVER = Path(__file__).resolve().parents[2] / "benchmarks" / "solver.py"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SOLVER), *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_smoke(tmp_path: Path) -> None:
    results = SOLVER.parent / "results" / "solver.json"
    before = results.read_bytes()
    done = run(tmp_path, "--smoke")
    assert done.returncode == 0, done.stderr
    for expected in (
        "one solve to 1%", "gain over each recipe", "everything streamed", "0 broken promises",
        "dynamic program", "square-root rule", "segments and files too", "segments of four blocks",
    ):  # fmt: skip
        assert expected in done.stdout
    assert results.read_bytes() == before


def test_machine_must_be_named(tmp_path: Path) -> None:
    done = run(tmp_path, "--case", "L28")
    assert done.returncode == 2
    assert "--machine: missing" in done.stderr
