"""Many solves at once, in processes of their own: for sweeps, and to see what a little more of something would buy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lazysched.errors import InfeasibleError, LazyschedError, UsageError
from lazysched.schemas import Plan, Profile
from lazysched.solver.solve import solve
from lazysched.solver.workers import each_in_processes, usable_cores


@dataclass(frozen=True)
class Request:
    """One call of ``solve``: ``settings`` are its keyword arguments."""

    profile: Profile
    settings: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    Attributes:
        plan: the fastest that was found, without its profile; None where nothing was found.
        missing_bytes: tier -> bytes by which that budget alone would have to grow, where nothing fits.
        problem: why there is no plan, in one line.
        infeasible: whether that is because nothing fits.
        recipes_s: fixed recipe that fits -> step in seconds.
    """

    plan: Plan | None
    missing_bytes: dict[str, int] = field(default_factory=dict)
    problem: str | None = None
    infeasible: bool = False
    recipes_s: dict[str, float] = field(default_factory=dict)


def answer(request: Request) -> Answer:
    """Solve one request; that nothing fits, or that time ran out, is an answer too.

    Raises:
        UsageError: an argument is wrong, or the profile lacks a figure.
    """
    try:
        solution = solve(request.profile, **request.settings)
    except UsageError:
        raise
    except InfeasibleError as error:
        return Answer(None, error.missing_bytes, str(error), infeasible=True)
    except LazyschedError as error:
        return Answer(None, problem=str(error))
    recipes_s = {recipe.name: recipe.timeline.step_s for recipe in solution.recipes if recipe.timeline is not None}
    return Answer(solution.plan.model_copy(update={"profile": None}), recipes_s=recipes_s)


def answer_all(requests: Sequence[Request], report: Callable[[int], None] | None = None) -> list[Answer]:
    """Solve all requests on all cores and return the answers in their order.

    Args:
        requests: independent of each other.
        report: called with the number of answers so far as they come in.

    Raises:
        UsageError: as ``answer``.
        RunError: a process that was solving died.
    """
    workers = min(usable_cores(), len(requests))
    in_turn = ((i, answer(request)) for i, request in enumerate(requests))
    pairs = each_in_processes(answer, requests, workers) if workers > 1 else in_turn
    answers: dict[int, Answer] = {}
    for index, found in pairs:
        answers[index] = found
        if report is not None:
            report(len(answers))
    return [answers[index] for index in range(len(requests))]
