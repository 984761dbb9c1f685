"""Many solves at once, in processes of their own: for sweeps, and to see what a little more of something would buy."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lazysched.errors import InfeasibleError, LazyschedError, UsageError
from lazysched.schemas import Plan, Profile
from lazysched.solver.solve import solve


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
    """

    plan: Plan | None
    missing_bytes: dict[str, int] = field(default_factory=dict)
    problem: str | None = None
    infeasible: bool = False


def answer(request: Request) -> Answer:
    """Solve one request; that nothing fits, or that time ran out, is an answer too.

    Raises:
        UsageError: an argument is wrong, or the profile lacks a figure.
    """
    try:
        plan = solve(request.profile, **request.settings).plan
    except UsageError:
        raise
    except InfeasibleError as error:
        return Answer(None, error.missing_bytes, str(error), infeasible=True)
    except LazyschedError as error:
        return Answer(None, problem=str(error))
    return Answer(plan.model_copy(update={"profile": None}))


def answer_all(requests: Sequence[Request], report: Callable[[int, Answer], None] | None = None) -> list[Answer]:
    """Solve all requests on all cores and return the answers in their order.

    Args:
        requests: independent of each other.
        report: called with each request's index and answer, in order, as they come in.
    """
    answers: list[Answer] = []
    workers = min(os.cpu_count() or 1, len(requests))
    if workers <= 1:
        for request in requests:
            _take(answers, answer(request), report)
        return answers
    # Spawned, not forked: HiGHS and numpy have threads that a fork would leave half alive.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_die_of_interrupts)
    try:
        for result in pool.map(answer, requests):
            _take(answers, result, report)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return answers


def _take(answers: list[Answer], result: Answer, report: Callable[[int, Answer], None] | None) -> None:
    answers.append(result)
    if report is not None:
        report(len(answers) - 1, result)


def _die_of_interrupts() -> None:
    """Ctrl-C reaches all processes: a worker ends without a traceback, the main process says so once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
