"""The training loop: launches steps, reads their numbers one step late, stops on gradients that are not finite."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from lazysched.errors import RunError
from lazysched.runtime.batch import Batch
from lazysched.runtime.engines import seconds_between
from lazysched.runtime.executor import Executor, StepResult
from lazysched.runtime.recorder import Recorder
from lazysched.runtime.schedule import LearningRateSchedule

MAX_NOT_FINITE_IN_A_ROW = 3
MAX_NAMED_STAGES = 6
WARM_UP_STEPS = 2
"""Steps that are left out of the measured step time."""


@dataclass(frozen=True)
class StepRow:
    """What one step reports; ``step_s`` is the time from the end of the step before, on ``compute``."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    trained_tokens: int
    step_s: float
    skipped: bool


@dataclass
class History:
    """Rows of all steps."""

    rows: list[StepRow] = field(default_factory=list)

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
        times = [row.step_s for row in self.rows[WARM_UP_STEPS:]]
        return statistics.median(times) if times else None

    def jsonl(self) -> str:
        """One JSON object a step."""
        return "".join(json.dumps(asdict(row)) + "\n" for row in self.rows)


class TrainingLoop:
    """Runs ``num_steps`` steps.

    Args:
        executor: with weights loaded.
        batch_of: step -> its batch.
        schedule: step -> learning rate.
        report: called with each row as it becomes known.
        recorder: times the operations of its steps; None times none.
    """

    def __init__(
        self,
        executor: Executor,
        batch_of: Callable[[int], Batch],
        schedule: LearningRateSchedule,
        report: Callable[[StepRow], None],
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder
        self._executor, self._batch_of, self._schedule, self._report = executor, batch_of, schedule, report
        self._history = History()
        self._not_finite_in_a_row = 0
        self._last_end = executor.mark()

    def run(self) -> History:
        """Train.

        Raises:
            RunError: the gradient was not finite ``MAX_NOT_FINITE_IN_A_ROW`` times in a row.
        """
        self._last_end = self._executor.mark()
        waiting: tuple[int, Batch, StepResult] | None = None
        for step in range(self._schedule.num_steps):
            batch = self._batch_of(step)
            timed = None if self._recorder is None else self._recorder.of(step)
            result = self._executor.step(batch, self._schedule.rate(step), timed)
            # Reading the numbers of a step that runs waits for it, so the next one is launched first.
            if waiting is not None:
                self._read(*waiting)
            waiting = (step, batch, result)
            if not result.is_running:
                self._read(*waiting)
                waiting = None
        if waiting is not None:
            self._read(*waiting)
        self._executor.drain()
        return self._history

    def _read(self, step: int, batch: Batch, result: StepResult) -> None:
        loss, grad_norm, skipped = result.loss, result.grad_norm, result.skipped
        row = StepRow(
            step=step, loss=loss, grad_norm=grad_norm, learning_rate=self._schedule.rate(step),
            tokens=batch.input_ids.numel(), trained_tokens=batch.num_trained_tokens,
            step_s=seconds_between(self._last_end, result.end), skipped=skipped,
        )  # fmt: skip
        self._last_end = result.end
        self._history.rows.append(row)
        self._report(row)
        self._not_finite_in_a_row = 0 if math.isfinite(grad_norm) else self._not_finite_in_a_row + 1
        if self._not_finite_in_a_row == MAX_NOT_FINITE_IN_A_ROW:
            raise RunError(
                f"step {step + 1}: the gradient norm was {grad_norm} in {MAX_NOT_FINITE_IN_A_ROW} steps in a row, last "
                f"in {_named(result.stages_not_finite())}, with loss {loss}; lower --learning-rate or look at the data "
                f"of these steps"
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
