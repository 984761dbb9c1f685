"""Checkpoints written while training goes on: the same bytes as where it waits, and whatever comes, none is torn."""

from __future__ import annotations

import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lazysched.errors import RunError, StoppedError
from lazysched.runtime import checkpoint_folders, saving, snapshot
from lazysched.runtime.checkpoint_folders import check_checkpoint, checkpoint_steps
from lazysched.runtime.loop import TrainingLoop
from lazysched.schemas import Dtype, Plan, StateFormat, Tier
from lazysched.step_rows import LOG_FILE
from tests.end_to_end.small_runs import SmallRun, at_step, log_of, weights_of
from tests.one_thread import one_thread

__all__ = ["one_thread"]

PATIENCE_S = 60.0
"""A writer that waits for training longer than that never will see it: the test fails instead of hanging."""


@dataclass
class Writer:
    """Rules when checkpoints are written, and knows when they were."""

    begun: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    after_step: dict[int, int] = field(default_factory=dict)
    """Step of a checkpoint -> step that training must have done before a byte of it is written."""
    done: defaultdict[int, threading.Event] = field(default_factory=lambda: defaultdict(threading.Event))
    """Steps of training."""
    in_main: set[int] = field(default_factory=set)
    """Those written while training waited."""

    @classmethod
    def watched(cls, monkeypatch: pytest.MonkeyPatch, after_step: dict[int, int]) -> Writer:
        writer, write = cls(after_step=after_step), checkpoint_folders.write_checkpoint

        def writing(folder: Path, step: int, *more: Any) -> Path:
            assert writer.begun == writer.ended, "two at a time"
            writer.begun.append(step)
            if threading.current_thread() is threading.main_thread():
                writer.in_main.add(step)
            elif step in writer.after_step:
                assert writer.done[writer.after_step[step]].wait(PATIENCE_S)
            try:
                return write(folder, step, *more)
            finally:
                writer.ended.append(step)

        monkeypatch.setattr(checkpoint_folders, "write_checkpoint", writing)
        return writer

    def actions(self, num_steps: int) -> dict[int, Callable[[], object]]:
        """What ``at_step`` needs for ``after_step``."""
        return {step: self.done[step].set for step in range(1, num_steps + 1)}


PLACES: list[tuple[StateFormat, Dtype, Tier, Tier | None]] = [
    ("hybrid8", "bfloat16", "host", None),
    ("hybrid8", "bfloat16", "gpu", "host"),
    ("hybrid8", "float32", "host", "gpu"),
    ("fp32", "bfloat16", "gpu", None),
]


@pytest.mark.parametrize(("state_format", "dtype", "ends", "blocks"), PLACES)
def test_checkpoints_and_result_have_the_bytes_of_runs_that_wait_or_never_save(
    run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_format: StateFormat, dtype: Dtype, ends: Tier,
    blocks: Tier | None,
) -> None:  # fmt: skip
    """Each is written after the next step has changed every weight, but for the last, which has none after it."""
    plan, options = run.plan(ends, state_format, dtype, blocks=blocks), {"save_steps": 2, "save_state_limit": 3}
    run.train(plan, tmp_path / "never", 6)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "room_bytes", lambda session: 0)
        run.train(plan, tmp_path / "waits", 6, **options)
    writer = Writer.watched(monkeypatch, {2: 3, 4: 5})
    at_step(monkeypatch, writer.actions(6))
    result, shown = run.train(plan, tmp_path / "beside", 6, **options)
    assert writer.ended == [2, 4, 6]
    assert not writer.in_main
    assert "copied in memory and written while training goes on" in shown
    assert result.peak_bytes["snapshot"] > 160_000
    for step in (2, 4, 6):
        one, other = (tmp_path / name / f"checkpoint-{step}" for name in ("beside", "waits"))
        assert check_checkpoint(one).files.keys() == check_checkpoint(other).files.keys()
        assert weights_of(one) == weights_of(other)
        assert log_of(one) == log_of(other)
        assert (one / "training_state.json").read_text() == (other / "training_state.json").read_text()
    assert weights_of(tmp_path / "beside") == weights_of(tmp_path / "waits") == weights_of(tmp_path / "never")
    assert log_of(tmp_path / "beside") == log_of(tmp_path / "never")


def test_the_next_waits_for_the_one_before_and_takes_no_second_copy(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is written only when it is waited for."""
    writer, finish, copy = Writer.watched(monkeypatch, {2: 0}), saving.Checkpoints.finish, saving.snapshot

    def finishing(self: saving.Checkpoints) -> None:
        if self._written is not None:
            writer.done[0].set()
        finish(self)

    def copying(tensors: saving.Tensors) -> dict[str, torch.Tensor]:
        assert writer.begun == writer.ended
        return copy(tensors)

    monkeypatch.setattr(saving.Checkpoints, "finish", finishing)
    monkeypatch.setattr(saving, "snapshot", copying)
    run.train(plan, tmp_path / "out", 4, save_steps=2)
    assert writer.ended == [2, 4]


def test_an_old_checkpoint_goes_when_the_new_one_is_whole(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, output = Writer.watched(monkeypatch, {2: 3}), tmp_path / "out"
    found: list[int] = []

    def look() -> None:
        found.extend(checkpoint_steps(output))
        writer.done[3].set()

    at_step(monkeypatch, {3: look})
    run.train(plan, output, 4, save_steps=1, save_total_limit=1)
    assert found == [1]
    assert [*checkpoint_steps(output)] == [4]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_one_is_written_finishes_it_and_saves_the_step_too(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    writer = Writer.watched(monkeypatch, {2: 3})
    at_step(monkeypatch, {3: lambda: (signal.raise_signal(number), writer.done[3].set())})
    with pytest.raises(StoppedError, match=r"after step 3; go on from .*checkpoint-3 with --resume") as caught:
        run.train(plan, tmp_path / "out", 6, save_steps=2)
    assert caught.value.exit_code == 128 + number
    assert [*checkpoint_steps(tmp_path / "out")] == [3, 2]
    assert writer.in_main == {3}  # no copy where training ends
    for path in checkpoint_steps(tmp_path / "out").values():
        check_checkpoint(path)
    monkeypatch.undo()
    run.train(plan, tmp_path / "out", 6, resume=True)
    run.train(plan, tmp_path / "whole", 6)
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "whole")


def test_a_second_ctrl_c_gives_up_what_is_written_and_leaves_nothing_of_it(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer.watched(monkeypatch, {2: 3})
    ends = saving.Checkpoints.__exit__

    def exiting(self: saving.Checkpoints, kind: type[BaseException] | None, *more: object) -> None:
        assert kind is KeyboardInterrupt
        threading.Timer(0.1, writer.done[3].set).start()  # the first file comes when it is being given up
        ends(self, kind, *more)

    monkeypatch.setattr(saving.Checkpoints, "__exit__", exiting)
    at_step(monkeypatch, {3: lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)]})
    with pytest.raises(KeyboardInterrupt):
        run.train(plan, tmp_path / "out", 6, save_steps=2)
    assert writer.begun == writer.ended == [2]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOG_FILE]


def test_a_run_that_fails_waits_for_what_is_written(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        threading.Timer(0.1, writer.done[3].set).start()
        raise RunError("step 3: failed")

    writer = Writer.watched(monkeypatch, {2: 3})
    at_step(monkeypatch, {3: fail})
    with pytest.raises(RunError, match="step 3: failed"):
        run.train(plan, tmp_path / "out", 6, save_steps=2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-2", LOG_FILE]
    check_checkpoint(tmp_path / "out" / "checkpoint-2")


def test_a_fault_of_our_own_in_the_writer_ends_the_run(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "write_model", lambda *_: {}["absent"])
    with pytest.raises(KeyError, match="absent"):
        run.train(plan, tmp_path / "out", 4, save_steps=2)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOG_FILE]


def test_without_room_training_waits_and_it_is_said_once(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer.watched(monkeypatch, {})
    monkeypatch.setattr(saving, "room_bytes", lambda session: 150_000)
    result, shown = run.train(plan, tmp_path / "out", 4, save_steps=2)
    assert writer.in_main == {2, 4}
    (line,) = [line for line in shown.splitlines() if "wait" in line]
    assert line.startswith("checkpoints: 162 kB each, training waits while one is written (a copy needs ")
    assert line.endswith(" kB of host memory, 150 kB are left for it)")
    assert "snapshot" not in result.peak_bytes


@pytest.mark.parametrize("lacks", ["room", "mapping"])
def test_where_memory_runs_out_later_training_waits_from_then_on(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    def refuse(tensors: object) -> None:
        raise RunError("host memory: 1 GB cannot be mapped")

    def take() -> None:
        if lacks == "room":
            monkeypatch.setattr(saving, "room_bytes", lambda session: 0)
        else:
            monkeypatch.setattr(saving, "snapshot", refuse)

    writer = Writer.watched(monkeypatch, {})
    at_step(monkeypatch, {2: take})
    _, shown = run.train(plan, tmp_path / "out", 3, save_steps=1, save_state_limit=3)
    assert writer.in_main == {2, 3}
    (line,) = [line for line in shown.splitlines() if "training waits" in line]
    reason = "a copy needs " if lacks == "room" else "host memory: 1 GB cannot be mapped"
    assert line.startswith(f"checkpoint-2: training waits while it is written ({reason}")
    for path in checkpoint_steps(tmp_path / "out").values():
        check_checkpoint(path)


def test_a_copy_has_the_room_that_the_budget_and_the_machine_leave(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store takes between 0.2 and 0.6 MB of the plan's budget for the host."""
    found: list[int] = []
    room = snapshot.room_bytes
    monkeypatch.setattr(saving, "room_bytes", lambda session: found.append(room(session)) or found[-1])
    for budget_bytes, free_bytes in [(None, 10**10), (10**9, 10**10), (10**6, 10**10), (10**9, 10**8)]:
        monkeypatch.setattr(snapshot, "host_memory", lambda free_bytes=free_bytes: (10**11, free_bytes))
        budget = {} if budget_bytes is None else {"host": budget_bytes}
        with monkeypatch.context() as patch:
            patch.setattr(TrainingLoop, "run", lambda self: (_ for _ in ()).throw(RunError("enough")))
            with pytest.raises(RunError, match="enough"):
                run.train(plan.model_copy(update={"budget_bytes": budget}), tmp_path / "out", 2, save_steps=1)
    unlimited, limited, narrow, full = found
    assert unlimited == 10**10 - snapshot.SPARE_BYTES
    assert 10**9 - 600_000 < limited < 10**9 - 200_000
    assert limited - narrow == 10**9 - 10**6
    assert full == 0
