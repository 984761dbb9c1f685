"""The convergence benchmark's smoke run trains a tiny model on a CPU with both formats and saves all it promises."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.end_to_end.tiny_folder import make_data, make_model

CONVERGENCE = Path(__file__).resolve().parents[2] / "benchmarks" / "convergence.py"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
NUM_STEPS = 3
START_TOLERANCE = 2**-8
"""One step of a bf16 number: weights rounded to 24 bits first can lie that far from those rounded once."""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    data = str(make_data(folder / "data.jsonl"))
    model = str(make_model(folder / "model", hidden_size=64, intermediate_size=128))
    command = [
        sys.executable, str(CONVERGENCE), "--smoke", "--model", model, "--data", data, "--eval-data", data, *options,
    ]  # fmt: skip
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_smoke(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    done = run(tmp_path, "--steps", str(NUM_STEPS), "--seeds", "0", "7", "--results", str(results))
    assert done.returncode == 0, done.stderr
    with (results / "convergence.csv").open(newline="") as file:
        steps = list(csv.DictReader(file))
    expected = product(("0", "7"), ("fp32", "hybrid8"), map(str, range(NUM_STEPS)))
    assert [(row["seed"], row["state_format"], row["step"]) for row in steps] == list(expected)
    losses = {(row["seed"], row["state_format"], row["step"]): float(row["loss"]) for row in steps}
    for seed in ("0", "7"):
        first_losses = losses[seed, "fp32", "0"], losses[seed, "hybrid8", "0"]
        assert first_losses[0] == pytest.approx(first_losses[1], rel=START_TOLERANCE)
    assert losses["0", "fp32", "0"] != losses["7", "fp32", "0"]
    assert (results / "convergence.png").read_bytes().startswith(PNG_SIGNATURE)
    rows = json.loads((results / "convergence.json").read_text())
    figures = {(row["case"], row["metric"]): row["value"] for row in rows}
    fp32, hybrid8 = (figures["seed_7", f"held_out_loss_{name}"] for name in ("fp32", "hybrid8"))
    assert figures["seed_7", "relative_difference"] == hybrid8 / fp32 - 1
    assert figures["all_seeds", "largest_relative_difference"] >= abs(hybrid8 / fp32 - 1)
    assert str(tmp_path) not in rows[0]["command"]


def test_smoke_does_not_overwrite_what_was_measured(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 2
    assert "--results" in done.stderr
