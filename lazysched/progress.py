"""What a terminal shows while a model is profiled or a plan is searched; elsewhere nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from lazysched.units import format_seconds

if TYPE_CHECKING:
    from lazysched.solver.solution import Progress as SearchProgress


@contextlib.contextmanager
def search_shown(time_limit_s: float, console: Console, each: str = "") -> Iterator[Callable[[SearchProgress], None]]:
    """Show a line with the best step, its bound and the time on ``console`` until the block is left.

    Args:
        time_limit_s: of the search.
        console: on stderr; where it is no terminal nothing is shown.
        each: what the limit is for where there are many searches, as ``a batch``.

    Yields:
        what the search calls when it gets on.
    """
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
        TextColumn(f"of at most about {time_limit_s:g} s {each}".strip()),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("looking for a plan", total=None)
        yield lambda progress: shown.update(task, description=in_words(progress))


@contextlib.contextmanager
def profile_shown(console: Console) -> Iterator[Callable[[str, float], None]]:
    """Show a line with what is measured, the time and what is about left on ``console`` until the block is left.

    Args:
        console: where it is no terminal nothing is shown.

    Yields:
        what ``profile`` calls as each part begins.
    """
    columns = SpinnerColumn(), TextColumn("measuring {task.description}"), TimeElapsedColumn(), _Left()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("the model", total=1.0, at_s=0.0)
        yield lambda part, done: shown.update(
            task, description=part, completed=done, at_s=shown.tasks[0].elapsed or 0.0
        )


class _Left(ProgressColumn):
    """Time that is left, as far as what is done tells."""

    def render(self, task: Task) -> Text:
        """``about 20 s left``; nothing before the first part is done, or where it takes longer than it looked."""
        left = left_s(task.elapsed or 0.0, task.fields["at_s"], task.completed) if task.completed else 0
        return Text(f"about {left} s left" if left > 0 else "")


def left_s(elapsed_s: float, at_s: float, done: float) -> int:
    """Seconds that are left, where the share ``done`` was over ``at_s`` after the start; 0 or less: unknown."""
    return round(at_s / done - elapsed_s)


def in_words(progress: SearchProgress) -> str:
    """``step 1.2 s, at best 1.1 s``."""
    best = "looking for a plan" if progress.best_s is None else f"step {format_seconds(progress.best_s)}"
    return best if progress.bound_s is None else f"{best}, at best {format_seconds(progress.bound_s)}"
