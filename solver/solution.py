"""What ``solve`` returns."""

from __future__ import annotations

from dataclasses import dataclass

from lazysched.schemas import Plan, SolverReport
from lazysched.solver.instance import Candidate
from lazysched.solver.recipes import Recipe
from lazysched.solver.simulate import Timeline

DEFAULT_GAP = 0.01
"""Distance to the bound that counts as optimal, as a share of the step."""


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


def report_with(report: SolverReport, step_s: float, bound_s: float, gap: float) -> SolverReport:
    """``report`` of a search, for another plan and bound of the same problem.

    Args:
        report: of the search.
        step_s: of the plan.
        bound_s: no plan is faster.
        gap: that counts as optimal.
    """
    bound_s = min(bound_s, step_s)
    left = 1 - bound_s / step_s
    status = "optimal" if left <= gap else "feasible"
    return report.model_copy(update={"objective_s": step_s, "bound_s": bound_s, "gap": left, "status": status})


def sought_gap(given: float | None) -> float:
    """The gap that a search ends at where ``given`` was asked for, or nothing."""
    return DEFAULT_GAP if given is None else given
