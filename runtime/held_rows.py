"""Which rows of the data a step held, for a person who looks for the one that broke it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lazysched.step_rows import StepRow

MOST_NAMED_ROWS = 8


@dataclass(frozen=True)
class HeldRows:
    """Rows of one step.

    Attributes:
        epoch: of the first of them, counted from 0; a step may reach into the next epoch.
        rows: their numbers in the data, counted from 1 through all of its files, dropped ones too, as
            ``lazysched data preview`` counts them; in the order of the batch.
    """

    epoch: int
    rows: tuple[int, ...]


def not_finite(rows: Iterable[StepRow]) -> list[StepRow]:
    """Those of ``rows`` whose gradient was not finite."""
    return [row for row in rows if not math.isfinite(row.grad_norm)]


def steps_and_data(rows: Sequence[StepRow], data_name: str) -> tuple[str, str]:
    """Two texts: ``steps 3-5, 9`` and ``rows 1, 7 of train.jsonl``, the first of those that the steps held."""
    steps = ", ".join(_ranges([row.step + 1 for row in rows]))
    held = sorted({number for row in rows for number in row.data_rows or ()})
    more = len(held) - MOST_NAMED_ROWS
    named = ", ".join(map(str, held[:MOST_NAMED_ROWS])) + (f" and {more} more" if more > 0 else "")
    return f"step{'s' if len(rows) > 1 else ''} {steps}", f"row{'s' if len(held) > 1 else ''} {named} of {data_name}"


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """``3-5`` and ``9`` of ascending numbers."""
    start = 0
    for index, number in enumerate(numbers):
        if index + 1 == len(numbers) or numbers[index + 1] != number + 1:
            yield str(number) if index == start else f"{numbers[start]}-{number}"
            start = index + 1
