"""``train`` without a plan: it profiles once, solves, and keeps both."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazysched.cli import main
from lazysched.own_plan import sizes_of
from lazysched.profiles import measure
from lazysched.schemas import Plan
from tests.end_to_end.tiny_folder import make_data, make_model


@pytest.mark.parametrize(
    ("rows", "sizes"), [(1, [1]), (8, [1, 2, 4, 8]), (64, [4, 8, 16, 32]), (12, [1, 2, 4]), (7, [1])]
)
def test_micro_batches_divide_the_step(rows: int, sizes: list[int]) -> None:
    assert sizes_of(rows) == sizes


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("LAZYSCHED_PROFILES", str(tmp_path / "profiles"))
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "rows.jsonl")
    flags = ["--model", str(model), "--data", str(data), "--device", "cpu", "--max-length", "16", "--max-steps", "2"]
    batch = ["--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "2"]
    return ["train", *flags, *batch, "--gpu-memory", "1GB", "--host-memory", "1GB"]


def test_it_profiles_solves_trains_and_profiles_no_second_time(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*settings, "--output-dir", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "profile: kept in" in said
    assert f"the plan is in {tmp_path / 'out-plan.json'}" in said
    plan = Plan.load(tmp_path / "out-plan.json")
    assert (plan.batch_size, plan.seq_len, plan.budget_bytes["gpu"]) == (4, 16, 10**9)
    assert (tmp_path / "out" / "config.json").is_file()

    monkeypatch.setattr(measure, "profile", None)
    assert main([*settings, "--output-dir", str(tmp_path / "again"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "profile: measured before" in said
    assert not (tmp_path / "again").exists()
    assert Plan.load(tmp_path / "again-plan.json").stages == plan.stages


def test_wrong_data_do_not_wait_for_the_profile(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "profile", None)
    for extra, message in (
        (["--data", str(tmp_path / "absent.jsonl")], "absent.jsonl: no such file"),
        (["--gpu-memory", "much"], "gpu_memory: 'much'"),
        (["--output-dir", str(tmp_path / "no" / "out")], "output_dir: "),
    ):
        assert main([*settings, "--output-dir", str(tmp_path / "out"), *extra]) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*plan.json"))
