"""Lines that a run says, as they are: no markup, no colours of numbers, no breaks but the terminal's."""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False) -> Console:
    """A console that takes ``:x:`` in a name for what it is, not for a picture."""
    return Console(stderr=stderr, emoji=False)


def say(console: Console, text: str) -> None:
    """Show a line."""
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def warn(console: Console, text: str) -> None:
    """Show a line as a warning."""
    console.print(f"warning: {text}", style="yellow", highlight=False, markup=False, emoji=False, soft_wrap=True)
