"""Rows as a person reads them: their tokens one by one, those that are trained marked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from lazysched.errors import UsageError
from lazysched.runtime.data.dataset import Dataset
from lazysched.runtime.data.formats import IGNORED
from lazysched.runtime.data.store import TOO_LONG, TRUNCATED, UNTRAINED, Example

_SEPARATOR = "│"
_NOTES = {
    TRUNCATED: "cut at the sequence length", TOO_LONG: "dropped, answer beyond the sequence length",
    UNTRAINED: "dropped, nothing to train",
}  # fmt: skip


def preview_rows(dataset: Dataset, asked: slice | None, num_rows: int) -> range:
    """Rows to show, as indices of the store.

    Args:
        dataset: loaded.
        asked: rows counted from 1, as errors count them; None takes the first ones.
        num_rows: how many without ``asked``.

    Raises:
        UsageError: ``asked`` holds no row of the data.
    """
    every = range(len(dataset.store))
    if asked is None:
        return every[:num_rows]
    start, stop = (bound - 1 if bound is not None and bound > 0 else bound for bound in (asked.start, asked.stop))
    chosen = every[start : stop : asked.step]
    if not chosen:
        raise UsageError(f"rows: none of the data's {len(every)} rows, counted from 1; give others with --rows")
    return chosen


def print_preview(dataset: Dataset, rows: range, tokenizer: Any, console: Console) -> None:
    """Print ``rows``, a line a run of tokens: ``+`` where they are trained, ``-`` where not."""
    for row in rows:
        example, flags = dataset.store.example(row), int(dataset.store.flags[row])
        notes = "".join(f", {note}" for flag, note in _NOTES.items() if flags & flag)
        head = f"row {row + 1}: {len(example.input_ids)} tokens, {example.num_trained_tokens} trained{notes}"
        console.print(Text(head, style="bold"), soft_wrap=True)
        for is_trained, pieces in runs(example, tokenizer):
            line = f"{'+' if is_trained else '-'} {_SEPARATOR.join(pieces)}"
            console.print(Text(line, style="green" if is_trained else "dim"), soft_wrap=True)


def runs(example: Example, tokenizer: Any) -> Iterator[tuple[bool, list[str]]]:
    """Whether a run of tokens is trained, and their texts."""
    for is_trained, places in itertools.groupby(
        range(len(example.labels)), key=lambda place: bool(example.labels[place] != IGNORED)
    ):
        yield is_trained, list(_pieces([int(example.input_ids[place]) for place in places], tokenizer))


def _pieces(ids: list[int], tokenizer: Any) -> Iterator[str]:
    """Text of each token; those that hold one character only together share a piece."""
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = str(tokenizer.decode(waiting))
        if "\ufffd" not in text or len(waiting) == 4:  # UTF-8 has four bytes a character at most
            yield _visible(text)
            waiting = []
    if waiting:
        yield _visible(str(tokenizer.decode(waiting)))


def _visible(text: str) -> str:
    """Control characters as their escapes, so that a run stays on its line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def length_line(dataset: Dataset) -> str:
    """How long the trained rows are, for a person."""
    shares = {"shortest": 0, "median": 50, "95 %": 95, "longest": 100}
    lengths = np.percentile(dataset.lengths, list(shares.values()), method="lower")
    found = ", ".join(f"{name} {int(length)}" for name, length in zip(shares, lengths, strict=True))
    return f"tokens a row: {found}"
