"""What a terminal shows while a plan is searched; elsewhere nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

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


def in_words(progress: SearchProgress) -> str:
    """``step 1.2 s, at best 1.1 s``."""
    best = "looking for a plan" if progress.best_s is None else f"step {format_seconds(progress.best_s)}"
    return best if progress.bound_s is None else f"{best}, at best {format_seconds(progress.bound_s)}"
