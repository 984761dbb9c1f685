"""Many solves at once, in processes of their own: for sweeps, and to see what a little more of something would buy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        interrupted: whether Ctrl-C came before the end.
        recipes_s: fixed recipe that fits -> step in seconds.
    """

    plan: Plan | None
    missing_bytes: dict[str, int] = field(default_factory=dict)
    problem: str | None = None
    infeasible: bool = False
    interrupted: bool = False
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
    plan = solution.plan.model_copy(update={"profile": None})
    return Answer(plan, interrupted=solution.interrupted, recipes_s=recipes_s)


def answer_until_interrupted(requests: Sequence[Request], report: Callable[[int], None] | None = None) -> list[Answer]:
    """As ``answer_all``, but after Ctrl-C what is not answered by then is ``interrupted``.

    Raises:
        KeyboardInterrupt: Ctrl-C came before there was any answer.
    """
    answers: dict[int, Answer] = {}
    try:
        for index, found in _as_they_come(requests, report):
            answers[index] = found
            if found.interrupted:
                break
    except KeyboardInterrupt:
        if not answers:
            raise
    return [answers.get(index, Answer(None, interrupted=True)) for index in range(len(requests))]


def answer_all(requests: Sequence[Request], report: Callable[[int], None] | None = None) -> list[Answer]:
    """Solve all requests on all cores and return the answers in their order.

    Args:
        requests: independent of each other.
        report: called with the number of answers so far as they come in.

    Raises:
        UsageError: as ``answer``.
        RunError: a process that was solving died.
    """
    answers = dict(_as_they_come(requests, report))
    return [answers[index] for index in range(len(requests))]


def _as_they_come(requests: Sequence[Request], report: Callable[[int], None] | None) -> Iterator[tuple[int, Answer]]:
    workers = min(usable_cores(), len(requests))
    in_turn = ((i, answer(request)) for i, request in enumerate(requests))
    pairs = each_in_processes(answer, requests, workers) if workers > 1 else in_turn
    for count, pair in enumerate(pairs, start=1):
        yield pair  # first, so that it is kept if Ctrl-C comes while it is reported
        if report is not None:
            report(count)
