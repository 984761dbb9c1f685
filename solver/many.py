"""Many solves at once, in processes of their own: for sweeps, and to see what a little more of something would buy."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from lazysched.errors import InfeasibleError, LazyschedError, RunError, UsageError
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


def answer_all(requests: Sequence[Request], report: Callable[[int], None] | None = None) -> list[Answer]:
    """Solve all requests on all cores and return the answers in their order.

    Args:
        requests: independent of each other.
        report: called with the number of answers so far as they come in.

    Raises:
        UsageError: as ``answer``.
        RunError: a process that was solving died.
    """
    workers = min(os.cpu_count() or 1, len(requests))
    pairs = _in_processes(requests, workers) if workers > 1 else ((i, answer(r)) for i, r in enumerate(requests))
    answers: dict[int, Answer] = {}
    for index, found in pairs:
        answers[index] = found
        if report is not None:
            report(len(answers))
    return [answers[index] for index in range(len(requests))]


def _in_processes(requests: Sequence[Request], num_workers: int) -> Iterator[tuple[int, Answer]]:
    """(index, answer) as they come. Workers have a pipe each and no threads, so they can be ended at any moment."""
    waiting, busy = iter(enumerate(requests)), dict[Connection, int]()
    workers: dict[Connection, SpawnProcess] = {}
    try:
        for _ in range(num_workers):
            connection, process = _started()
            workers[connection] = process
        for connection in workers:
            _hand_out(connection, waiting, busy)
        while busy:
            ready = wait(list(busy))
            for connection in [known for known in busy if known in ready]:
                found = connection.recv()
                if isinstance(found, LazyschedError):
                    raise found
                yield busy.pop(connection), found
                _hand_out(connection, waiting, busy)
    except (EOFError, ConnectionError):
        raise RunError("a process that was solving died, perhaps for lack of memory; free some") from None
    finally:
        for connection, process in workers.items():
            process.terminate()
            process.join()
            connection.close()


def _hand_out(connection: Connection, waiting: Iterator[tuple[int, Request]], busy: dict[Connection, int]) -> None:
    """Give a worker the next request, if there is one."""
    for index, request in waiting:
        connection.send(request)
        busy[connection] = index
        return


def _started() -> tuple[Connection, SpawnProcess]:
    """A worker and the pipe to it."""
    # Spawned, not forked: HiGHS and numpy have threads that a fork would leave half alive.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    resource_tracker.ensure_running()  # starting it later would undo the mask
    # Workers inherit the mask: Ctrl-C, which reaches all processes, is for the main one to answer.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    theirs.close()
    return ours, process


def _serve(connection: Connection) -> None:
    """Answer requests until the other end is closed."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            request = connection.recv()
            try:
                found: Answer | LazyschedError = answer(request)
            except LazyschedError as error:
                found = error
            connection.send(found)
