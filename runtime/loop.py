"""The training loop: launches steps, reads their numbers one step late, stops on gradients that are not finite."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from lazysched.errors import RunError
from lazysched.runtime.batch import Batch
from lazysched.runtime.engines import seconds_between
from lazysched.runtime.executor import Executor, StepResult
from lazysched.runtime.held_rows import HeldRows, steps_and_data
from lazysched.runtime.machine import rss_bytes
from lazysched.runtime.recorder import Recorder
from lazysched.runtime.schedule import LearningRateSchedule
from lazysched.step_rows import LOG_FILE, StepRow

MAX_NOT_FINITE_IN_A_ROW = 3
MAX_NAMED_STAGES = 6
WHERE_ALL_ARE = f"those of each step: data_rows in {LOG_FILE}"
WARM_UP_STEPS = 2
"""Steps that are left out of the measured step time."""


@dataclass
class History:
    """Rows of all steps.

    Attributes:
        rows: one a step.
        num_restored: how many of them a checkpoint brought, measured by another process.
    """

    rows: list[StepRow] = field(default_factory=list)
    num_restored: int = 0

    @property
    def num_done(self) -> int:
        """Steps done."""
        return len(self.rows)

    def counts(self, step: int) -> bool:
        """Whether a step says what steps take: warm-up compiles, and a skipped step updates nothing."""
        return step >= self.num_restored + WARM_UP_STEPS and not self.rows[step].skipped

    @property
    def losses(self) -> list[float]:
        """Mean loss of each step."""
        return [row.loss for row in self.rows]

    @property
    def num_skipped(self) -> int:
        """Steps that changed nothing because the gradient was not finite."""
        return sum(row.skipped for row in self.rows)

    @property
    def step_s(self) -> float | None:
        """Median time of a step after warm-up; None for a run that is shorter than that."""
        times = [row.step_s for row in self.rows[self.num_restored + WARM_UP_STEPS :]]
        return statistics.median(times) if times else None

    def jsonl(self) -> str:
        """The rows as lines of the log."""
        return "".join(row.as_line() for row in self.rows)


@dataclass(frozen=True)
class Breaks:
    """What happens between steps.

    Attributes:
        is_due: steps done -> whether to save then.
        save: called with the history when it is due, everything launched so far being done.
        stop: whether to end after this step.
        is_evaluated: steps done -> whether to take the held-out loss then, before saving.
        evaluate: takes it; called with the number of steps done, everything launched so far being done.
    """

    is_due: Callable[[int], bool] = lambda num_done: False
    save: Callable[[History], None] = lambda history: None
    stop: Callable[[], bool] = lambda: False
    is_evaluated: Callable[[int], bool] = lambda num_done: False
    evaluate: Callable[[int], float | None] = lambda num_done: None


class TrainingLoop:
    """Runs the steps of the schedule that are not in the history.

    Args:
        executor: with weights loaded.
        batch_of: step -> its batch.
        schedule: step -> learning rate.
        report: called with each row as soon as its numbers are there.
        log: called with each row when it is complete, which is after the held-out loss where that is taken.
        recorder: times the operations of its steps; None times none.
        history: of the steps before; None: a new run.
        breaks: what happens between steps.
        predicted_step_s: the plan's, which the first row notes.
        held: step -> the rows of the data in its batch, asked where a gradient was not finite.
        data_name: what the user calls the data.
    """

    def __init__(
        self,
        executor: Executor,
        batch_of: Callable[[int], Batch],
        schedule: LearningRateSchedule,
        report: Callable[[StepRow], None],
        recorder: Recorder | None = None,
        history: History | None = None,
        breaks: Breaks = Breaks(),
        *,
        log: Callable[[StepRow], None] = lambda row: None,
        predicted_step_s: float | None = None,
        held: Callable[[int], HeldRows | None] = lambda step: None,
        data_name: str = "the data",
    ) -> None:
        self._held, self._data_name = held, data_name
        self._recorder, self._breaks, self._log, self._predicted_step_s = recorder, breaks, log, predicted_step_s
        self._executor, self._batch_of, self._schedule, self._report = executor, batch_of, schedule, report
        self._history = history or History()
        finite = (math.isfinite(row.grad_norm) for row in reversed(self._history.rows))
        self._not_finite_in_a_row = len(list(itertools.takewhile(lambda is_finite: not is_finite, finite)))
        self._waiting: tuple[int, Batch, StepResult] | None = None
        self._last_end = executor.mark()

    def run(self) -> History:
        """Train.

        Raises:
            RunError: the gradient was not finite ``MAX_NOT_FINITE_IN_A_ROW`` times in a row.
        """
        self._last_end = self._executor.mark()
        try:
            for step in range(self._history.num_done, self._schedule.num_steps):
                self._launch(step)
                self._between(step + 1)
                if self._breaks.stop():
                    break
            self._settle()
        except Exception:
            # The step before has most likely ended and belongs into the log; what broke may have taken its numbers too.
            with contextlib.suppress(Exception):
                self._read_waiting()
            raise
        return self._history

    def _between(self, num_done: int) -> None:
        evaluates, saves = self._breaks.is_evaluated(num_done), self._breaks.is_due(num_done)
        if not (evaluates or saves):
            return
        self._settle()
        if evaluates:
            self._evaluate(num_done)
        if saves:
            self._breaks.save(self._history)
        self._last_end = self._executor.mark()

    def _evaluate(self, num_done: int) -> None:
        rows = self._history.rows
        try:
            rows[-1] = replace(rows[-1], held_out_loss=self._breaks.evaluate(num_done))
        finally:
            self._log(rows[-1])

    def _launch(self, step: int) -> None:
        batch = self._batch_of(step)
        timed = None if self._recorder is None else self._recorder.of(step)
        result = self._executor.step(batch, self._schedule.rate(step), timed)
        # Reading the numbers of a step that runs waits for it, so the next one is launched first.
        self._read_waiting()
        self._waiting = (step, batch, result)
        if not result.is_running:
            self._read_waiting()

    def _settle(self) -> None:
        self._read_waiting()
        self._executor.drain()

    def _read_waiting(self) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._read(*waiting)

    def _read(self, step: int, batch: Batch, result: StepResult) -> None:
        loss, grad_norm, skipped = result.loss, result.grad_norm, result.skipped
        row = StepRow(
            step=step, loss=loss, grad_norm=grad_norm, learning_rate=self._schedule.rate(step),
            tokens=batch.input_ids.numel(), trained_tokens=batch.num_trained_tokens,
            step_s=seconds_between(self._last_end, result.end), skipped=skipped, host_rss_bytes=rss_bytes(),
            predicted_step_s=self._predicted_step_s if len(self._history.rows) == self._history.num_restored else None,
        )  # fmt: skip
        self._last_end = result.end
        held = None if math.isfinite(grad_norm) else self._held(step)
        if held is not None:
            row = replace(row, epoch=held.epoch, data_rows=held.rows)
        self._history.rows.append(row)
        self._not_finite_in_a_row = 0 if math.isfinite(grad_norm) else self._not_finite_in_a_row + 1
        fails = self._not_finite_in_a_row == MAX_NOT_FINITE_IN_A_ROW
        if fails or not self._breaks.is_evaluated(step + 1):
            self._log(row)
        self._report(row)
        if fails:
            steps, data = steps_and_data(self._history.rows[-MAX_NOT_FINITE_IN_A_ROW:], self._data_name)
            where = "the data of these steps" if held is None else f"{data}, which {steps} held ({WHERE_ALL_ARE})"
            raise RunError(
                f"step {step + 1}: the gradient norm was {grad_norm} in {MAX_NOT_FINITE_IN_A_ROW} steps in a row, last "
                f"in {_named(result.stages_not_finite())}, with loss {loss}; lower --learning-rate or look at {where}"
            )


def _named(stages: list[str]) -> str:
    """The first of ``stages``, and how many more there are."""
    more = len(stages) - MAX_NAMED_STAGES
    return ", ".join(stages[:MAX_NAMED_STAGES]) + (f" and {more} more" if more > 0 else "")


def mean_loss(executor: Executor, batches: Iterable[Batch]) -> float:
    """Loss per trained token over ``batches``, nothing changes.

    Raises:
        RunError: no token of the batches is trained.
    """
    total, num_tokens = 0.0, 0
    for batch in batches:
        total += executor.evaluate(batch).loss * batch.num_trained_tokens
        num_tokens += batch.num_trained_tokens
    if num_tokens == 0:
        raise RunError("evaluation: no token is trained; give data with answers that fit the plan's seq_len")
    return total / num_tokens
