"""A disk that fills up while a run saves: training goes on, what is whole stays, and the end is honest."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lazysched.errors import RunError, UsageError
from lazysched.runtime import checkpoint, checkpoint_folders, saving
from lazysched.runtime.checkpoint_folders import check_checkpoint, checkpoint_steps
from lazysched.runtime.loop import History, TrainingLoop
from lazysched.schemas import Plan
from tests.end_to_end.small_runs import SmallRun, at_step, log_of, weights_of
from tests.one_thread import one_thread

__all__ = ["one_thread"]


@pytest.fixture(params=["waiting", "beside"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits while checkpoints are written, or they come from a thread; then only the test's steps wait."""
    save = saving.Checkpoints.save

    def save_and_wait(self: saving.Checkpoints, history: History) -> None:
        save(self, history)
        self.finish()

    if request.param == "waiting":
        monkeypatch.setattr(saving, "room_bytes", lambda session: 0)
    monkeypatch.setattr(saving.Checkpoints, "save", save_and_wait)


@pytest.fixture(scope="module")
def whole(run: SmallRun, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "out"
    run.train(plan, output, 4)
    return output


def fill_disk(folder: Path, leave_bytes: int) -> None:
    free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    (folder / "ballast").write_bytes(b"x" * (free_bytes - leave_bytes))


@pytest.mark.parametrize("checks_first", [True, False])
def test_a_disk_that_fills_up_costs_a_checkpoint_and_not_the_run(
    run: SmallRun, plan: Plan, whole: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, checks_first: bool
) -> None:
    output, entries = small_disk / "out", []
    at_step(
        monkeypatch,
        {
            2: lambda: fill_disk(small_disk, 150_000),
            3: lambda: (entries.extend(os.listdir(output)), (small_disk / "ballast").unlink()),
        },
    )
    if not checks_first:  # as where others fill the disk meanwhile
        monkeypatch.setattr(saving.Checkpoints, "_check", lambda self, history: None)
    _, shown = run.train(plan, output, 4, save_steps=1, save_total_limit=1)
    (warning,) = [line for line in shown.splitlines() if "not saved" in line]
    assert warning.startswith("warning: checkpoint-2: not saved (")
    assert f"{output / 'checkpoint-1'} is kept, and the run goes on" in warning
    assert ("will be written and" in warning) == checks_first
    assert sorted(entries) == ["checkpoint-1", "log.jsonl"]
    assert [*checkpoint_steps(output)] == [4]
    assert weights_of(output) == weights_of(whole)
    assert log_of(output) == log_of(whole)


def test_a_result_that_cannot_be_written_ends_the_run_with_the_checkpoint_kept(
    run: SmallRun, plan: Plan, whole: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = small_disk / "out"
    at_step(monkeypatch, {4: lambda: fill_disk(small_disk, 40_000)})
    with pytest.raises(RunError) as caught:
        run.train(plan, output, 4, save_steps=3)
    message = str(caught.value)
    assert message.endswith(f"{output / 'checkpoint-3'} is kept, go on from it with --resume")
    assert "\n" not in message
    assert caught.value.exit_code == 1
    assert sorted(os.listdir(output)) == ["checkpoint-3", "log.jsonl"]
    monkeypatch.undo()
    (small_disk / "ballast").unlink()
    run.train(plan, output, 4, resume=True)
    assert weights_of(output) == weights_of(whole)


def test_a_disk_too_small_for_a_checkpoint_is_refused_before_the_first_step(
    run: SmallRun, plan: Plan, small_disk: Path
) -> None:
    fill_disk(small_disk, 120_000)
    with pytest.raises(UsageError, match=r"out: 162 kB will be written and .* are free; free disk space"):
        run.train(plan, small_disk / "out", 4, save_steps=2)
    assert os.listdir(small_disk) == ["ballast"]
    run.train(plan, small_disk / "out", 4)  # the result alone fits


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["save_file", "sync", "_write_manifest", "write_model"])
def test_wherever_saving_fails_nothing_of_it_is_left(
    run: SmallRun, plan: Plan, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    modules = {"save_file": checkpoint, "write_model": saving}
    module = modules.get(where, checkpoint_folders)
    good = getattr(module, where)
    entries: list[str] = []
    output = tmp_path / "out"
    at_step(
        monkeypatch,
        {
            2: lambda: monkeypatch.setattr(module, where, no_space),
            3: lambda: (entries.extend(os.listdir(output)), monkeypatch.setattr(module, where, good)),
        },
    )
    _, shown = run.train(plan, output, 4, save_steps=1)
    assert shown.count("not saved (No space left on device)") == 1
    assert sorted(entries) == ["checkpoint-1", "log.jsonl"]
    assert [*checkpoint_steps(output)] == [4, 3, 1]
    check_checkpoint(output / "checkpoint-4")
    assert weights_of(output) == weights_of(whole)


def test_a_disk_that_is_full_to_the_end_fails_the_run_and_keeps_the_checkpoint(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, {2: lambda: monkeypatch.setattr(checkpoint, "save_file", no_space)})
    with pytest.raises(RunError, match=r"No space left on device.*checkpoint-1 is kept, go on from it with --resume"):
        run.train(plan, tmp_path / "out", 3, save_steps=1)
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-1", "log.jsonl"]
    assert os.listdir(tmp_path) == ["out"]
    check_checkpoint(tmp_path / "out" / "checkpoint-1")


def test_old_checkpoints_that_cannot_be_removed_are_told_apart(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_folders, "remove", no_space)
    _, shown = run.train(plan, tmp_path / "out", 2, save_steps=1, save_total_limit=1)
    assert "checkpoint-2: not pruned (No space left on device); the run goes on" in shown
    assert "not saved" not in shown
    assert [*checkpoint_steps(tmp_path / "out")] == [2, 1]


def test_weights_that_may_not_be_finite_take_no_checkpoints_place(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TrainingLoop._read

    def reading(self: TrainingLoop, *waiting: object) -> None:
        read(self, *waiting)
        if len(self._history.rows) == 2:
            self._history.rows[-1] = replace(self._history.rows[-1], grad_norm=float("nan"))

    monkeypatch.setattr(TrainingLoop, "_read", reading)
    _, shown = run.train(plan, tmp_path / "out", 2, save_steps=1, save_total_limit=1)
    assert "checkpoint-2: not saved (the gradient norm was nan, so weights may not be finite)" in shown
    assert [*checkpoint_steps(tmp_path / "out")] == [1]
