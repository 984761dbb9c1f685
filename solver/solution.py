"""What ``solve`` returns."""

from __future__ import annotations

from dataclasses import dataclass

from lazysched.schemas import Plan
from lazysched.solver.instance import Candidate
from lazysched.solver.recipes import Recipe
from lazysched.solver.simulate import Timeline


@dataclass(frozen=True)
class Progress:
    """Where a search stands.

    Attributes:
        best_s: step of the fastest plan so far, by the quick replay; None before the first.
        bound_s: no plan is faster; None before that is known.
    """

    best_s: float | None
    bound_s: float | None


@dataclass(frozen=True)
class Tried:
    """One combination of the outer search.

    Attributes:
        candidate: micro-batch, accumulation, prefetch depth, D2H lag, size that may be sent to the host and kind of
            its memory.
        bound_s: no plan of it is faster; infinite when none fits.
        step_s: of its best plan found, by the window replay; None when it was left out.
    """

    candidate: Candidate
    bound_s: float
    step_s: float | None = None


@dataclass(frozen=True)
class Solution:
    """What ``solve`` found.

    Attributes:
        plan: the schedule, with prediction and solver report.
        timeline: its simulation.
        recipes: fixed recipes on the same budgets, simulated.
        tried: all combinations of the outer search, best bound first.
        interrupted: whether Ctrl-C ended the search, so that the plan is the best of a part of it.
    """

    plan: Plan
    timeline: Timeline
    recipes: list[Recipe]
    tried: list[Tried]
    interrupted: bool = False
