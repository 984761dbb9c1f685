"""The benchmark on GSM8K trains a tiny model a part at a time, and judges from the rows alone."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lazysched import Plan
from tests.end_to_end.tiny_folder import make_data, make_model

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
NUM_STEPS = 2
CASES = ("streamed", "resident", "resident_float32")


def module(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """A module of the benchmarks' folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> None:
    """The benchmark's main function, in this process: what it imports is loaded once."""
    gsm8k = module(monkeypatch, "gsm8k")

    given = [
        "--device", "cpu", "--max-steps", str(NUM_STEPS), "--max-length", "24", "--rows", "8", "--exact-rows", "2",
        "--max-new-tokens", "2", "--model", str(folder / "model"), "--data", str(folder / "gsm8k"),
        "--work", str(folder / "work"), *options,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["gsm8k.py", *given])
    gsm8k.main()


def figures_in(results: Path) -> dict[tuple[str, str], float | None]:
    rows = json.loads((results / "gsm8k.json").read_text())
    return {(row["case"], row["metric"]): row["value"] for row in rows}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    (tmp_path / "gsm8k").mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        rows = [json.loads(line) for line in make_data(tmp_path / "gsm8k" / name).read_text().splitlines()]
        numbered = ({**row, "answer": f"{row['answer']} #### 3"} for row in rows)
        (tmp_path / "gsm8k" / name).write_text("".join(json.dumps(row) + "\n" for row in numbered))
    return tmp_path


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_parts_come_together_and_nothing_is_run_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = folder / "results"
    with monkeypatch.context() as patch:
        patch.setattr(module(monkeypatch, "gsm8k"), "exact_match", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(monkeypatch, folder, "--results", str(results), "--seeds", "0")
    trained = figures_in(results)
    assert {case for case, _ in trained} == {"streamed_seed_0"}
    run(monkeypatch, folder, "--results", str(results), "--seeds", "0")
    assert "streamed, seed 0: trained before" in capsys.readouterr().out
    first = figures_in(results)
    assert trained.items() <= first.items()
    assert first["streamed_seed_0", "exact_match_rows"] == 2
    run(monkeypatch, folder, "--results", str(results), "--seeds", "0", "7", "--cases", "streamed")
    assert "streamed, seed 0: trained before" in capsys.readouterr().out
    figures = figures_in(results)
    assert first.items() <= figures.items()
    streamed, resident, in_float32 = (figures[f"{case}_seed_0", "held_out_loss"] for case in CASES)
    assert streamed is not None
    assert resident is not None
    assert in_float32 is not None
    assert in_float32 != resident
    assert figures["all_seeds", "relative_difference_seed_0"] == streamed / resident - 1
    assert figures["all_seeds", "relative_difference_seed_0_float32"] == streamed / in_float32 - 1
    assert figures["all_seeds", "within_half_a_percent"] is None  # one seed of three
    assert figures["streamed_seed_7", "exact_match_rows"] == 2
    with (results / "gsm8k.csv").open(newline="") as file:
        steps = [(row["case"], row["seed"], row["step"]) for row in csv.DictReader(file)]
    runs = [("streamed", "0"), ("resident", "0"), ("resident_float32", "0"), ("streamed", "7")]
    assert steps == [(*part, str(step)) for part in runs for step in range(NUM_STEPS)]
    assert (results / "gsm8k.png").read_bytes().startswith(PNG_SIGNATURE)
    assert str(folder) not in (results / "gsm8k.json").read_text()
    check_plans(folder / "work")
    with pytest.raises(SystemExit):
        run(monkeypatch, folder, "--results", str(results), "--answers-at-once", "3")
    assert "not to be mixed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(monkeypatch, folder)
    assert "--results: a try needs a folder of its own" in capsys.readouterr().err


def test_on_a_gpu_each_run_is_a_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a machine with one: what would be started, and that nothing runs here."""
    gsm8k = module(monkeypatch, "gsm8k")
    started = list[list[str]]()
    monkeypatch.setenv("LAZYSCHED_COMMIT", "made up")  # or git would be asked
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gsm8k, "machine_of", lambda arguments: "made up")
    monkeypatch.setattr(gsm8k.subprocess, "run", lambda command, check: started.append(command))
    results = folder / "results"
    run(monkeypatch, folder, "--device", "cuda", "--results", str(results), "--seeds", "0", "5")
    parts = [(case, seed) for seed in "05" for case in CASES]
    assert [command[-4:] for command in started] == [["--cases", case, "--seeds", seed] for case, seed in parts]
    figures = figures_in(results)
    assert {case for case, _ in figures} == {"all_seeds"}
    assert figures["all_seeds", "largest_relative_difference"] is None


def check_plans(folder: Path) -> None:
    """They are what they are called."""
    streamed, resident = (Plan.load(next(folder.glob(f"*/{name}-plan.json"))) for name in ("streamed", "resident"))
    assert streamed.budget_bytes["gpu"] == 2 * 10**9
    assert {choice.state for choice in streamed.stages.values()} == {"host"}
    assert {choice.weights for stage, choice in streamed.stages.items() if stage.startswith("block")} == {"host"}
    assert {(choice.weights, choice.state) for choice in resident.stages.values()} == {("gpu", "gpu")}
    assert {choice.state_format for choice in resident.stages.values()} == {"fp32"}
    assert {choice.state_format for choice in streamed.stages.values()} == {"hybrid8"}


@pytest.mark.parametrize(
    ("worst", "num_seeds", "within"),
    [(0.0049, 3, 1.0), (-0.0049, 3, 1.0), (0.0051, 3, 0.0), (-0.0051, 3, 0.0), (float("nan"), 3, 0.0), (0.0, 2, None)],
)
def test_half_a_percent_is_judged_by_the_worst_of_three_seeds(
    monkeypatch: pytest.MonkeyPatch, worst: float, num_seeds: int, within: float | None
) -> None:
    figures = {f"resident_seed_{seed}": {"held_out_loss": (0.5, "nats/token")} for seed in range(num_seeds)}
    for seed in range(num_seeds):
        loss = 0.5 * (1 + (worst if seed == 1 else 0.0))
        figures[f"streamed_seed_{seed}"] = {"held_out_loss": (loss, "nats/token")}
    found = module(monkeypatch, "gsm8k_picture").summary(figures)
    assert found["within_half_a_percent"] == (within, "1")
    assert found["within_half_a_percent_float32"] == (None, "1")
