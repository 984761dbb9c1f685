"""Packed rows through the command line: profile, solve, train, refine; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lazysched.cli import main
from lazysched.schemas import Plan, Profile
from tests.end_to_end.test_bad_input import edit, one_line
from tests.end_to_end.tiny_folder import make_data, make_model

SEQ_LEN, ROWS, NUM_SAMPLES = 48, 4, 48
"""A sample has 15 tokens: three share a row."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data, and profile and plan with packing and without."""
    folder = tmp_path_factory.mktemp("packing")
    model = make_model(folder / "model")
    make_data(folder / "data.jsonl", NUM_SAMPLES)
    for name, extra in (("packed", ["--packing"]), ("flat", [])):
        profile = ["profile", str(model), "--device", "cpu", "--seq-len", str(SEQ_LEN), "--micro-batch", "2", *extra]
        assert main([*profile, "-o", str(folder / f"{name}.json")]) == 0
        solve = ["solve", str(folder / f"{name}.json"), "--batch-size", str(ROWS)]
        assert main([*solve, "-o", str(folder / f"{name}_plan.json")]) == 0
    return folder


def train(folder: Path, plan: Path, output: Path, *extra: str) -> int:
    return main(
        ["train", "--plan", str(plan), "--model", str(folder / "model"), "--data", str(folder / "data.jsonl"),
         "--output-dir", str(output), "--device", "cpu", "--learning-rate", "1e-2", *extra]
    )  # fmt: skip


def log(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def test_an_epoch_takes_fewer_steps_for_the_same_tokens(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.load(folder / "packed_plan.json")
    assert plan.packing
    assert plan.argument_bytes == Profile.load(folder / "packed.json").argument_bytes[2]
    assert not Plan.load(folder / "flat_plan.json").packing
    capsys.readouterr()
    extra = ["--eval-data", str(folder / "data.jsonl"), "--num-train-epochs", "1"]
    assert train(folder, folder / "packed_plan.json", tmp_path / "packed", *extra) == 0
    shown = capsys.readouterr().out
    assert f"packed into {NUM_SAMPLES // 3} rows of {SEQ_LEN} tokens" in shown
    assert train(folder, folder / "flat_plan.json", tmp_path / "flat", *extra) == 0
    packed, flat = log(tmp_path / "packed"), log(tmp_path / "flat")
    assert (len(packed), len(flat)) == (4, NUM_SAMPLES // ROWS)
    assert sum(row["trained_tokens"] for row in packed) == sum(row["trained_tokens"] for row in flat)
    assert packed[-1]["loss"] < packed[0]["loss"]
    held_out = [line for text in (shown, capsys.readouterr().out) for line in text.splitlines() if "held-out" in line]
    before = [line.split("│")[2] for line in held_out]
    assert len(before) == 2
    assert before[0] == before[1]


def test_a_packed_run_refines_a_packed_profile_only(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folder, folder / "packed_plan.json", tmp_path / "out", "--max-steps", "6") == 0
    refine = ["profile", "--from-run", str(tmp_path / "out"), "-o", str(tmp_path / "refined.json")]
    assert main([*refine, "--profile", str(folder / "packed.json")]) == 0
    assert Profile.load(tmp_path / "refined.json").packing
    capsys.readouterr()
    assert main([*refine, "--profile", str(folder / "flat.json")]) == 2
    assert "from_run: packing: the run had True, the profile has False" in one_line(capsys)


def test_plans_and_profiles_that_contradict_themselves(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = tmp_path / "spoilt.json"

    def copy_of(name: str, **changes: object) -> Path:
        spoilt.write_text((folder / name).read_text())
        edit(spoilt, lambda document: document.update(changes))
        return spoilt

    assert train(folder, copy_of("flat_plan.json", packing=True), tmp_path / "out") == 2
    assert "packing is true and argument_bytes 0; profile with --packing and solve again" in one_line(capsys)
    assert train(folder, copy_of("flat_plan.json", packing=True, argument_bytes=9), tmp_path / "out") == 2
    assert "plan: argument_bytes: 9, packed rows take" in capsys.readouterr().err
    arguments = ["--batch-size", "4", "-o", str(tmp_path / "plan.json")]
    assert main(["solve", str(copy_of("flat.json", packing=True)), *arguments]) == 2
    assert "argument_bytes of micro-batch 2: missing; profile again" in one_line(capsys)
    assert main(["solve", str(copy_of("packed.json", packing=False)), *arguments]) == 2
    assert "argument_bytes of micro-batch 2: given without packing; profile again" in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_data_format_and_grouping(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat, packed = folder / "flat_plan.json", folder / "packed_plan.json"
    chosen = ["--max-steps", "2", "--data-format", "question/answer", "--group-by-length"]
    assert train(folder, flat, tmp_path / "grouped", *chosen) == 0
    capsys.readouterr()
    assert train(folder, packed, tmp_path / "out", "--group-by-length") == 2
    assert "group_by_length: packed rows all have one length; leave it or packing out" in capsys.readouterr().err
    assert train(folder, flat, tmp_path / "out", "--data-format", "text") == 2
    assert "row 1: no key 'text', which the format text needs" in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_rows_of_one_token(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = ["profile", str(folder / "model"), "--device", "cpu", "--seq-len", "1", "--packing"]
    assert main([*profile, "-o", str(tmp_path / "profile.json")]) == 2
    assert "a row of 1 token holds one sample at most; use a larger --seq-len" in one_line(capsys)
