"""Progress of a run: two lines that stay in place on a terminal, a plain line for each step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from lazysched.lines import say
from lazysched.step_rows import StepRow
from lazysched.units import format_seconds


class ProgressReport:
    """Shows how far the run is, what is left of it, the step's numbers, and its time beside the plan's prediction.

    Args:
        console: where to.
        num_steps: of the whole run.
        predicted_step_s: the plan's; None: it predicts nothing.
        logging_steps: steps between two plain lines.
        num_done: steps that were done before.
        clock: seconds since any moment; tells how long a step takes with all that comes between two, as saving.
    """

    def __init__(
        self, console: Console, num_steps: int, predicted_step_s: float | None, logging_steps: int, num_done: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._console, self._num_steps = console, num_steps
        self._predicted_step_s, self._logging_steps, self._clock = predicted_step_s, logging_steps, clock
        self._num_skipped = 0
        self._first: tuple[int, float] | None = None
        """The first step that this process did and when it was known: what came before would count as warm-up."""
        self._live: Live | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("train"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}")
            )
            self._task = self._bar.add_task("", total=num_steps, completed=num_done)
            self._live = Live(self._bar, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, row: StepRow) -> None:
        """Show one step; with it how many were skipped, as lines may leave steps out."""
        self._num_skipped += row.skipped
        left = self._time_left(row.step)
        if self._live is not None:
            self._bar.update(self._task, completed=row.step + 1, description=f"{self._pace(row)}{left}")
            numbers = Text(f"      {self._numbers(row)}", no_wrap=True, overflow="ellipsis")
            self._live.update(Group(self._bar, numbers))
        elif (row.step + 1) % self._logging_steps == 0 or row.step + 1 == self._num_steps:
            say(self._console, f"step {row.step + 1}/{self._num_steps} {self._numbers(row)}, {self._pace(row)}{left}")

    def tell(self, text: str) -> None:
        """Show a line that is no step."""
        say(self._console, text)

    def _numbers(self, row: StepRow) -> str:
        skipped = f", {self._num_skipped} skipped: gradient not finite" if self._num_skipped else ""
        return (
            f"loss {row.loss:.4f}, norm {row.grad_norm:.3g}, lr {row.learning_rate:.2e}, "
            f"{row.tokens_per_s:,.0f} tokens/s{skipped}"
        )

    def _pace(self, row: StepRow) -> str:
        predicted = "" if self._predicted_step_s is None else f" (plan {format_seconds(self._predicted_step_s)})"
        return f"{format_seconds(row.step_s)}{predicted}"

    def _time_left(self, step: int) -> str:
        """For the steps after ``step`` at the mean pace so far; nothing before there is one, nor at the end."""
        now_s, num_left = self._clock(), self._num_steps - step - 1
        if self._first is None:
            self._first = (step, now_s)
            return ""
        if num_left == 0:
            return ""
        pace_s = (now_s - self._first[1]) / (step - self._first[0])
        return f", {timedelta(seconds=round(num_left * pace_s))} left"
