"""Sentences in lines of a terminal's width."""

from __future__ import annotations

import textwrap

from rich.console import Console

HANGING = 2
"""Spaces that further lines of a sentence have more than its first."""


def print_wrapped(console: Console, line: str) -> None:
    """Print ``line`` broken between words at the width of ``console``; what follows its first line hangs."""
    indent = " " * (len(line) - len(line.lstrip(" ")))
    wrapped = textwrap.fill(
        line.strip(), console.width, initial_indent=indent, subsequent_indent=indent + " " * HANGING,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    console.print(wrapped, highlight=False, markup=False, soft_wrap=True)
