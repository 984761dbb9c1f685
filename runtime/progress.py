"""Progress of a run: one bar on a terminal, a plain line for each step elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lazysched.runtime.loop import StepRow
from lazysched.units import format_seconds


class ProgressReport:
    """Shows step, loss, gradient norm, learning rate, tokens per second and step time, beside the plan's prediction."""

    def __init__(
        self, console: Console, num_steps: int, predicted_step_s: float | None, logging_steps: int, num_done: int = 0
    ) -> None:
        self._console, self._num_steps = console, num_steps
        self._predicted_step_s, self._logging_steps = predicted_step_s, logging_steps
        self._num_skipped = 0
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("train"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )  # fmt: skip
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=num_steps, completed=num_done)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, row: StepRow) -> None:
        """Show one step; with it how many were skipped, as lines may leave steps out."""
        self._num_skipped += row.skipped
        text = self._text(row)
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=text)
        elif (row.step + 1) % self._logging_steps == 0 or row.step + 1 == self._num_steps:
            self._console.print(
                f"step {row.step + 1}/{self._num_steps} {text}", highlight=False, markup=False, soft_wrap=True
            )

    def tell(self, text: str) -> None:
        """Show a line that is no step."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _text(self, row: StepRow) -> str:
        predicted = "" if self._predicted_step_s is None else f" (plan {format_seconds(self._predicted_step_s)})"
        skipped = f" {self._num_skipped} skipped: gradient not finite" if self._num_skipped else ""
        return (
            f"loss {row.loss:.4f} norm {row.grad_norm:.3g} lr {row.learning_rate:.2e} "
            f"{row.tokens / row.step_s:,.0f} tok/s {format_seconds(row.step_s)}{predicted}{skipped}"
        )
