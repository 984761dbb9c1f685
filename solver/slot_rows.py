"""Rows of slots that windows use in turn: when the slot that the next one takes is free.

Where every window used one, that would be a fixed number of windows back. Some windows use none, and which is decided:
so the ends of the last uses are handed on from window to window, the latest first, and one that uses none leaves them
as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import pulp

from lazysched.solver.decisions import Expression


class Place(NamedTuple):
    """Of the ``windows``-th last window that used slots, the ``back``-th last micro-batch: its end frees one."""

    windows: int
    back: int


def freeing_place(num_slots: int, num_micro_batches: int) -> Place:
    """Where the use lies that had the slot before: ``num_slots`` micro-batches back, counted over windows."""
    windows = -(-num_slots // num_micro_batches)
    return Place(windows, num_slots - (windows - 1) * num_micro_batches)


class SlotChain:
    """Ends of the last uses, as variables with rows from below.

    Args:
        problem: gets the rows.
        letter: names the variables.
        num_ends: how many uses back the slot was taken.
        slack_s: what the end of one window can be behind that of the last use at most, where it matters.
    """

    def __init__(self, problem: pulp.LpProblem, letter: str, num_ends: int, slack_s: float) -> None:
        self._problem, self._letter, self._slack_s = problem, letter, slack_s
        self._ends: list[Expression | None] = [None] * num_ends

    @property
    def free(self) -> Expression | None:
        """When the next use's slot is free; None where nothing had it in this step."""
        return self._ends[-1]

    def use(self, window: int, end: Expression, idle: Expression) -> None:
        """A window has come of which ``end`` frees its slot; ``idle`` is 1 (or more) where it uses none, else 0."""
        shifted = [end, *self._ends[:-1]]
        self._ends = [
            self._end(f"{self._letter}{k + 1}_{window}", own, before, idle)
            for k, (own, before) in enumerate(zip(self._ends, shifted, strict=True))
        ]

    def _end(
        self, name: str, own: Expression | None, shifted: Expression | None, idle: Expression
    ) -> Expression | None:
        """The later of what it was and, unless idle, the one that is more recent by one use."""
        if shifted is None:
            return own
        end = self._problem.add_variable(name, None)
        self._problem += end >= shifted - self._slack_s * idle
        if own is not None:
            self._problem += end >= own
        return end
