"""Resuming: the same bits as a run that was never interrupted, from a checkpoint that is whole, or not at all."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from lazysched.cli import main
from lazysched.errors import UsageError
from lazysched.runtime import checkpoint_folders, saving
from lazysched.runtime.checkpoint_folders import check_checkpoint, checkpoint_steps
from lazysched.runtime.resuming import choose_checkpoint
from lazysched.runtime.training_state import TrainingState, plan_sha256
from lazysched.schemas import Dtype, Plan, Prediction, StateFormat, Tier
from tests.end_to_end.small_runs import SmallRun, at_step, log_of, weights_of
from tests.end_to_end.tiny_folder import make_data, make_model
from tests.one_thread import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def whole(run: SmallRun, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without an interruption, a checkpoint after each."""
    output = tmp_path_factory.mktemp("whole") / "out"
    run.train(plan, output, 6, save_steps=1, save_state_limit=6)
    return output


@pytest.fixture
def cut(whole: Path, tmp_path: Path) -> Path:
    """The folder as it was after four of the six steps."""
    for step in (1, 2, 3, 4):
        shutil.copytree(whole / f"checkpoint-{step}", tmp_path / "out" / f"checkpoint-{step}")
    return tmp_path / "out"


def test_a_plan_that_was_found_again_is_no_other_plan(plan: Plan) -> None:
    prediction = Prediction(step_s=9.0, exposed_s={}, moved_bytes={}, peak_bytes={"gpu": 1, "host": 1, "nvme": 0})
    again = plan.model_copy(update={"predicted": prediction})
    other = plan.model_copy(update={"prefetch_depth": plan.prefetch_depth + 1})
    assert plan_sha256(again) == plan_sha256(plan) != plan_sha256(other)


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
"""There 8-bit state only: torch's fp32 update rounds otherwise on a GPU."""


@pytest.mark.parametrize(
    ("state_format", "dtype", "accumulation", "device"),
    [
        ("hybrid8", "bfloat16", 2, "cpu"),
        ("fp32", "bfloat16", 1, "cpu"),
        ("hybrid8", "float32", 1, "cpu"),
        ("fp32", "float32", 2, "cpu"),
        pytest.param("hybrid8", "bfloat16", 2, "cuda", marks=ON_GPU),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_never_interrupted(
    run: SmallRun, tmp_path: Path, state_format: StateFormat, dtype: Dtype, accumulation: int, device: str
) -> None:
    """Also where the other plan has on the GPU what was on the host."""
    places: list[tuple[Tier, Tier | None]] = [("host", None), ("gpu", "host")]
    on_host, mixed = (run.plan(tier, state_format, dtype, accumulation, blocks, device) for tier, blocks in places)
    run.train(on_host, tmp_path / "whole", 6, save_steps=3, device=device)
    run.train(on_host, tmp_path / "cut", 3, save_steps=3, device=device)
    _, shown = run.train(mixed, tmp_path / "cut", 6, save_steps=2, resume=True, device=device)
    assert "checkpoint-3 after step 3" in shown
    assert "num_steps: 6, in the checkpoint 3" in shown
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")
    # Both saved after step 6: optimizer state too.
    assert weights_of(tmp_path / "cut" / "checkpoint-6") == weights_of(tmp_path / "whole" / "checkpoint-6")
    assert len(weights_of(tmp_path / "cut" / "checkpoint-6")) > 2 * len(weights_of(tmp_path / "cut"))


def test_the_checkpoint_is_a_model_for_transformers(whole: Path) -> None:
    AutoTokenizer.from_pretrained(whole / "checkpoint-6")
    result: Any = AutoModelForCausalLM.from_pretrained(whole / "checkpoint-6", output_loading_info=True)
    report = result[1]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def truncate(checkpoint: Path) -> None:
    with (checkpoint / "optimizer.safetensors").open("r+b") as file:
        file.truncate(1000)


def flip(checkpoint: Path) -> None:
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def link(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.rename(checkpoint.parent / "elsewhere")
    path.symlink_to(checkpoint.parent / "elsewhere")


def lead_out(checkpoint: Path) -> None:
    """The manifest names a file outside, with the right size and hash."""
    manifest = checkpoint / "manifest.json"
    (checkpoint / "model.safetensors").rename(checkpoint.parent / "model.safetensors")
    manifest.write_text(manifest.read_text().replace('"model.safetensors"', '"../model.safetensors"'))


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: (path / "manifest.json").unlink(), "has no manifest.json: no checkpoint, or its saving was cut"),
    (lambda path: (path / "manifest.json").write_text("{"), "not valid JSON"),
    (lambda path: (path / "model.safetensors").unlink(), "model.safetensors: is missing"),
    (truncate, "optimizer.safetensors: has 1000 bytes, the manifest says"),
    (flip, "model.safetensors: its contents are not those"),
    (link, "model.safetensors: is a link"),
    (lead_out, "'../model.safetensors' is not the name of a file in this folder"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_only_a_whole_checkpoint_is_taken_and_it_is_said_why(
    cut: Path, damage: Callable[[Path], object], reason: str
) -> None:
    damage(cut / "checkpoint-4")
    console = Console(record=True, width=400, file=io.StringIO())
    chosen = choose_checkpoint(cut, True, None, console)
    assert chosen is not None
    assert chosen.path == cut / "checkpoint-3"
    skipped, resuming = console.export_text().splitlines()
    assert skipped.startswith("skipped ")
    assert reason in skipped
    assert resuming == f"resuming from {cut / 'checkpoint-3'} after step 3"
    with pytest.raises(UsageError, match="checkpoint-4"):
        choose_checkpoint(cut, False, str(cut / "checkpoint-4"), console)


def test_a_run_resumed_behind_a_damaged_checkpoint_replaces_it(
    run: SmallRun, plan: Plan, cut: Path, whole: Path
) -> None:
    truncate(cut / "checkpoint-4")
    run.train(plan, cut, 6, save_steps=1, resume=True)
    assert weights_of(cut) == weights_of(whole)
    assert log_of(cut) == log_of(whole)
    assert [*checkpoint_steps(cut)] == [6, 5, 4, 3, 2, 1]


def test_a_checkpoint_by_its_path_into_another_folder(
    run: SmallRun, plan: Plan, cut: Path, whole: Path, tmp_path: Path
) -> None:
    run.train(plan, tmp_path / "other", 6, resume_from_checkpoint=str(cut / "checkpoint-3"))
    assert weights_of(tmp_path / "other") == weights_of(whole)
    assert log_of(tmp_path / "other") == log_of(whole)
    assert len(checkpoint_steps(cut)) == 4
    assert not checkpoint_steps(tmp_path / "other")


def test_one_of_the_output_folders_checkpoints_by_its_name(
    run: SmallRun, plan: Plan, cut: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint-3").mkdir()  # another run's, perhaps
    run.train(plan, cut, 6, resume_from_checkpoint="checkpoint-3/")
    assert weights_of(cut) == weights_of(whole)
    assert log_of(cut) == log_of(whole)


def test_a_run_that_is_done_writes_only_the_model(run: SmallRun, plan: Plan, cut: Path, whole: Path) -> None:
    run.train(plan, cut, 4, resume=True)
    assert weights_of(cut) == {
        name: value for name, value in weights_of(whole / "checkpoint-4").items() if name in weights_of(whole)
    }
    assert len(log_of(cut)) == 4


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """File -> what it holds and when it was written."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("num_saved", [4, 3])
def test_a_finished_run_stays_as_it_is(
    run: SmallRun, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_saved: int
) -> None:
    """Also where steps came after its newest checkpoint."""
    output = tmp_path / "out"
    first, _ = run.train(plan, output, 4, save_steps=num_saved)
    assert main(["report", str(output)]) == 0
    before = contents(output)
    again, shown = run.train(plan, output, 4, resume=True, save_steps=num_saved)
    assert "this run is finished, all 4 steps are done, and stays as it is; to train on, give more" in shown
    assert again == first
    flags = ["--resume", "--max-steps", "4", "--output-dir", str(output)]
    assert main([*command(run, plan, tmp_path), *flags]) == 0
    assert "this run is finished" in capsys.readouterr().out
    assert contents(output) == before


def test_what_is_left_to_do_is_done(run: SmallRun, plan: Plan, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run.train(plan, output, 4, save_steps=3)
    checkpoint = str(output / "checkpoint-3")

    def is_done_again(num_steps: int = 4, **options: Any) -> bool:
        before = contents(output)
        _, shown = run.train(plan, output, num_steps, **options)
        assert ("this run is finished" in shown) == (contents(output) == before)
        return contents(output) != before

    assert not is_done_again(resume=True)
    assert is_done_again(resume_from_checkpoint=checkpoint)  # steps after one that is named are asked for
    assert is_done_again(resume=True, learning_rate=1e-3)
    assert is_done_again(resume=True)
    (output / "model.safetensors").unlink()
    assert is_done_again(resume=True)
    with (output / "log.jsonl").open("a") as log:
        log.write("{")
    assert is_done_again(resume=True)
    assert is_done_again(3, resume_from_checkpoint=checkpoint)
    assert is_done_again(5, resume=True)


def refused(run: SmallRun, plan: Plan, output: Path, num_steps: int = 6, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        run.train(plan, output, num_steps, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_makes_going_on_meaningless_is_refused(run: SmallRun, plan: Plan, cut: Path, tmp_path: Path) -> None:
    before = sorted(cut.rglob("*"))
    other_data = tmp_path / "other.jsonl"
    other_data.write_text("".join(reversed(run.data.read_text().splitlines(keepends=True))))
    seven = refused(run, plan, cut, resume=True, seed=7)
    assert seven.startswith(f"seed: 7, and {cut / 'checkpoint-4'} was made with 42; give --seed 42")
    checkpoint = cut / "checkpoint-4"
    other = refused(SmallRun(run.model, other_data), plan, cut, resume=True)
    names = f"data: {other_data}, and {checkpoint} was made with {run.data}, which has other rows or tokens; "
    assert other.startswith(names + "give the --data")
    four = refused(run, run.plan(accumulation=1), cut, resume=True)
    assert four.startswith("batch_size: 2, and ")
    assert "was made with 4; give a plan that was solved with the same" in four
    formats = refused(run, run.plan(state_format="fp32"), cut, resume=True)
    assert formats.startswith("stages.embed.state_format: fp32, and ")
    few = refused(run, plan, cut, 3, resume=True)
    assert few.startswith("max_steps: 3 is less than the 4 steps of ")
    assert few.endswith("give at least --max-steps 4")
    assert sorted(cut.rglob("*")) == before


def test_data_that_were_changed_are_refused(run: SmallRun, plan: Plan, tmp_path: Path) -> None:
    """Also where a checkpoint does not say what its data were called."""
    data, output = tmp_path / "data.jsonl", tmp_path / "out"
    shutil.copyfile(run.data, data)
    own = SmallRun(run.model, data)
    own.train(plan, output, 2, save_steps=2)
    data.write_text("".join(reversed(run.data.read_text().splitlines(keepends=True))))
    message = refused(own, plan, output, resume=True)
    assert message.startswith(
        f"data: {data} has other rows, or other tokens, than when {output / 'checkpoint-2'} was made;"
    )
    state = output / "checkpoint-2" / "training_state.json"
    old = json.loads(state.read_text())
    assert old.pop("data_name") == str(data)
    assert TrainingState.check(old, "old").data_name is None


def test_another_model_is_refused(run: SmallRun, cut: Path, tmp_path: Path) -> None:
    other = SmallRun(make_model(tmp_path / "model", hidden_size=48), run.data)
    assert refused(other, other.plan(), cut, resume=True).startswith("model_id: LlamaForCausalLM-")


def test_wrong_questions_are_refused(run: SmallRun, plan: Plan, cut: Path, tmp_path: Path) -> None:
    assert refused(run, plan, cut).startswith(f"output_dir: {cut} holds checkpoint-4 of an earlier run; go on from it")
    both = refused(run, plan, cut, resume=True, resume_from_checkpoint="x")
    assert both.startswith("resume_from_checkpoint: x beside resume")
    assert "holds no valid checkpoint; leave --resume out" in refused(run, plan, tmp_path / "new", resume=True)
    assert "no such checkpoint" in refused(run, plan, cut, resume_from_checkpoint=str(tmp_path / "absent"))
    assert refused(run, plan, cut, resume_from_checkpoint="").startswith("resume_from_checkpoint: names nothing")
    assert refused(run, plan, tmp_path / "new", save_steps=-1).startswith("save_steps: -1 is out of range")
    assert refused(run, plan, tmp_path / "new", save_total_limit=0).startswith("save_total_limit: 0 is out of range")
    assert refused(run, plan, cut, resume=True, trace=str(tmp_path / "t"), trace_steps=slice(0, 2)).startswith(
        "trace_steps: 0:2 holds none of the run's steps 4 to 5"
    )
    assert not (tmp_path / "new").exists()


def test_a_folder_where_no_checkpoint_is_valid_says_what_ails_the_newest(run: SmallRun, plan: Plan, cut: Path) -> None:
    for path in checkpoint_steps(cut).values():
        (path / "manifest.json").unlink()
    message = refused(run, plan, cut, resume=True)
    assert "checkpoint-4: has no manifest.json" in message
    assert message.endswith("remove what is there and leave --resume out to begin anew")
    run.train(plan, cut, 4, save_steps=3)  # what was cut is no obstacle to a new run
    assert [*checkpoint_steps(cut)] == [4, 3]
    run.train(plan, cut, 5, save_steps=5, resume=True)
    assert [*checkpoint_steps(cut)] == [5, 3]


def test_old_checkpoints_lose_their_state_and_then_go(run: SmallRun, plan: Plan, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run.train(plan, output, 5, save_steps=1, save_total_limit=3, save_state_limit=1)
    assert [*checkpoint_steps(output)] == [5, 4, 3]
    check_checkpoint(output / "checkpoint-5")
    for step in (3, 4):
        assert not [*(output / f"checkpoint-{step}").glob("optimizer*")]
        with pytest.raises(UsageError, match="keeps the model without optimizer state"):
            check_checkpoint(output / f"checkpoint-{step}")
        assert json.loads((output / f"checkpoint-{step}" / "manifest.json").read_text())["has_state"] is False


def signal_at(monkeypatch: pytest.MonkeyPatch, step: int, *signals: signal.Signals) -> None:
    """Send signals to this process when the numbers of ``step`` are shown."""
    at_step(monkeypatch, {step: lambda: [os.kill(os.getpid(), number) for number in signals]})


def command(run: SmallRun, plan: Plan, folder: Path, *flags: str) -> list[str]:
    plan.save(folder / "plan.json")
    return [
        "train", "--plan", str(folder / "plan.json"), "--model", str(run.model), "--data", str(run.data), "--device",
        "cpu", "--output-dir", str(folder / "out"), "--max-steps", "6", "--learning-rate", "1e-2",
        "--lr-scheduler-type", "constant", "--weight-decay", "0.1", *flags,
    ]  # fmt: skip


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_the_run_goes_on_from_there(
    run: SmallRun, plan: Plan, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], number: signal.Signals, exit_code: int,
) -> None:  # fmt: skip
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        signal_at(patch, 2, number)
        assert main(command(run, plan, tmp_path)) == exit_code
    captured = capsys.readouterr()
    assert "finishing the step, then saving; a second one ends at once" in captured.out
    assert captured.err.strip().endswith(f"after step 2; go on from {tmp_path / 'out' / 'checkpoint-2'} with --resume")
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-2", "log.jsonl"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert main(command(run, plan, tmp_path, "--resume")) == 0
    assert weights_of(tmp_path / "out") == weights_of(whole)
    assert log_of(tmp_path / "out") == log_of(whole)


def test_a_second_ctrl_c_ends_at_once(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signal_at(monkeypatch, 2, signal.SIGINT, signal.SIGINT)
    assert main(command(run, plan, tmp_path)) == 130
    captured = capsys.readouterr()
    assert captured.err == "error: interrupted\n"
    assert "is kept" not in captured.out
    assert os.listdir(tmp_path / "out") == ["log.jsonl"]


def test_who_ends_a_run_at_once_is_told_what_is_kept(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saving, "room_bytes", lambda session: 0)
    signal_at(monkeypatch, 3, signal.SIGINT, signal.SIGINT)
    assert main(command(run, plan, tmp_path, "--save-steps", "2")) == 130
    captured = capsys.readouterr()
    assert captured.err == "error: interrupted\n"
    assert captured.out.endswith(f"{tmp_path / 'out' / 'checkpoint-2'} is kept; go on from it with --resume\n")


def test_a_signal_while_a_due_checkpoint_is_saved_saves_it_once(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training waits here; ``test_saving_beside`` has the other case."""
    synced: list[Path] = []

    def sync(path: Path) -> None:
        if not synced:
            os.kill(os.getpid(), signal.SIGTERM)
        synced.append(path)

    monkeypatch.setattr(saving, "room_bytes", lambda session: 0)
    monkeypatch.setattr(checkpoint_folders, "sync", sync)
    assert main(command(run, plan, tmp_path, "--save-steps", "3")) == 143
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-3", "log.jsonl"]
    assert len([path for path in synced if path.name == "training_state.json"]) == 1


def test_a_step_of_more_rows_than_there_are_is_told(run: SmallRun, plan: Plan, tmp_path: Path) -> None:
    few = SmallRun(run.model, make_data(tmp_path / "few.jsonl", 3))
    told = (
        "warning: a step takes 4 rows and the data have 3: every step trains rows more than once; take a smaller batch"
    )
    assert told in few.train(plan, tmp_path / "few", 1)[1]
    just = SmallRun(run.model, make_data(tmp_path / "just.jsonl", 4))
    assert "more than once" not in just.train(plan, tmp_path / "just", 1)[1]
