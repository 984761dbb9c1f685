"""``train`` without a plan: it profiles once, solves, and keeps both."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lazysched import solver
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
    assert "is more than" not in said
    assert f"the plan is in {tmp_path / 'out-plan.json'}" in said
    plan = Plan.load(tmp_path / "out-plan.json")
    assert (plan.batch_size, plan.seq_len, plan.budget_bytes["gpu"]) == (4, 16, 10**9)
    assert (tmp_path / "out" / "config.json").is_file()

    monkeypatch.setattr(measure, "profile", None)
    assert main([*settings, "--output-dir", str(tmp_path / "again"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "steps: 2 of 4 rows, 0.333 epochs" in said
    (kept,) = (tmp_path / "profiles").iterdir()
    assert f"profile: measured before, {kept}; remove that file to measure anew" in said
    assert not (tmp_path / "again").exists()
    assert Plan.load(tmp_path / "again-plan.json").stages == plan.stages


def test_another_plan_that_is_there_is_kept(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*settings, "--output-dir", str(tmp_path / "out"), "--dry-run"]
    (tmp_path / "out-plan.json").write_text("mine", encoding="utf-8")
    assert main(command) == 0
    kept = tmp_path / "out-plan.1.json"
    assert f"the plan that was there is now {kept}; --plan {kept} trains" in capsys.readouterr().out
    assert kept.read_text(encoding="utf-8") == "mine"
    assert main([*command, "--max-grad-norm", "2"]) == 0
    assert main([*command, "--max-grad-norm", "2"]) == 0
    plans = [tmp_path / f"out-plan{number}.json" for number in ("", ".2")]
    assert [Plan.load(path).update.clip_norm for path in plans] == [2.0, 1.0]
    assert not (tmp_path / "out-plan.3.json").exists()


def test_ctrl_c_while_it_solves_ends_the_run(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lazysched solve` takes it for "that is enough"."""
    whole = solver.solve
    monkeypatch.setattr(
        solver, "solve", lambda *args, **kwargs: dataclasses.replace(whole(*args, **kwargs), interrupted=True)
    )
    before = {path.name for path in tmp_path.iterdir()}
    assert main([*settings, "--output-dir", str(tmp_path / "out")]) == 130
    assert {path.name for path in tmp_path.iterdir()} == before | {"profiles"}


def test_another_number_of_threads_is_measured_apart(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*settings, "--output-dir", str(tmp_path / "out"), "--dry-run"]
    counts = []
    for threads in (1, 2, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert main(command) == 0
        counts.append(len(list((tmp_path / "profiles").iterdir())))
    assert counts == [1, 2, 2]


def test_a_budget_that_the_machine_does_not_have_is_told(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = ["--host-memory", "900TB", "--output-dir", str(tmp_path / "out"), "--dry-run"]
    assert main([*settings, *large]) == 0
    assert "note: --gpu-memory and --host-memory 900 TB is more than the machine's" in capsys.readouterr().err


def stranger(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "thesis.tex").touch()


def plan_folder(folder: Path) -> None:
    (folder / "out-plan.json").mkdir()


def no_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()


def nothing(folder: Path) -> None:
    """The folder as it is."""


@pytest.mark.parametrize(
    ("spoil", "extra", "message"),
    [
        (nothing, ["--data", "absent.jsonl"], "absent.jsonl: no such file"),
        (nothing, ["--eval-data", "absent.jsonl"], "absent.jsonl: no such file"),
        (no_weights, [], "has no weights; use --init random"),
        (nothing, ["--gpu-memory", "much"], "gpu_memory: 'much'"),
        (nothing, ["--output-dir", "no/out"], "the folder {folder}/no does not exist"),
        (stranger, [], "out: holds 'thesis.tex', which lazysched did not write"),
        (plan_folder, [], "out-plan.json, which is no file; move it away"),
        (nothing, ["--resume"], "resume: out holds no valid checkpoint; leave --resume out"),
        (nothing, ["--resume-from-checkpoint", "absent"], "absent: no such checkpoint"),
        (nothing, ["--adam-beta2", "1"], "adam_beta2: 1.0 is out of range"),
        (nothing, ["--eval-steps", "1"], "eval_steps: 1: give held-out data"),
        (nothing, ["--packing", "--group-by-length"], "group_by_length: packed rows all have one length"),
        (nothing, ["--trace", "no/t.json"], "trace: no/t.json: the folder no does not exist"),
        (nothing, ["--trace", "t.json", "--trace-steps", "5:7"], "trace_steps: 5:7 holds none of the run's 2 steps"),
        (nothing, ["--trainable", "["], "trainable: '[' is no regular expression"),
    ],
)
def test_what_is_wrong_does_not_wait_for_the_profile_and_leaves_nothing(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None], extra: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "profile", None)
    spoil(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main([*settings, "--output-dir", "out", *extra]) == 2
    assert message.format(folder=tmp_path) in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_that_is_in_the_way_or_of_another_run_does_not_wait_either(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does a run that is finished, which changes nothing."""
    monkeypatch.chdir(tmp_path)
    settings += ["--output-dir", "out", "--save-steps", "2"]
    assert main(settings) == 0
    Path("out-plan.json").unlink()
    monkeypatch.setattr(measure, "profile", None)
    shutil.rmtree("profiles")
    for extra, message in (
        ([], "output_dir: out holds checkpoint-2 of an earlier run"),
        (["--resume", "--seed", "7"], "seed: 7, and out/checkpoint-2 was made with 42; give --seed 42"),
        (["--resume", "--max-length", "15"], "seq_len: 15, and out/checkpoint-2 was made with 16"),
        (["--resume", "--trainable", "norm"], "trainable: norm, and out/checkpoint-2 was made with None"),
        (["--resume", "--max-steps", "1"], "max_steps: 1 is less than the 2 steps"),
    ):
        capsys.readouterr()
        assert main([*settings, *extra]) == 2
        assert message in capsys.readouterr().err
    assert main([*settings, "--resume"]) == 0
    assert "out: this run is finished, all 2 steps are done, and stays as it is" in capsys.readouterr().out
    assert not Path("out-plan.json").exists()
