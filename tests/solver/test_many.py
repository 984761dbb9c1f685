"""Solving in processes of their own: what happens when it does not go well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from lazysched.errors import RunError
from lazysched.solver import explore, solve, workers
from lazysched.solver.highs import NUM_THREADS
from lazysched.solver.many import Request, answer_all
from tests.solver.synthetic import tiny_profile

SETTINGS = {"batch_size": 1, "gpu_memory_bytes": 10**9, "host_memory_bytes": 10**9, "time_limit_s": 5}


class Deadly:
    """Ends the process that receives it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


@pytest.fixture(autouse=True)
def _no_worker_stays() -> Iterator[None]:
    """Other tests of this process have children too, such as the resource tracker of multiprocessing."""
    before = psutil.Process().children()
    yield
    assert [child for child in psutil.Process().children() if child not in before] == []


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))


def test_a_worker_that_dies_is_told() -> None:
    request = Request(Deadly(), {})  # type: ignore[arg-type]
    with pytest.raises(RunError, match="a process that was solving died"):
        answer_all([request, request])


def test_an_interrupt_ends_the_workers_at_once() -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_all([Request(tiny_profile(2), SETTINGS)] * 4, interrupt)


def test_combinations_explored_in_processes_give_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = tiny_profile(4, micro_batches=(1, 2))
    settings: dict[str, Any] = {"batch_size": 2, "gpu_memory_bytes": 70 * 10**6, "host_memory_bytes": 10**9}
    alone = solve(profile, **settings)
    started: list[int] = []
    real = workers._started

    def counted() -> Any:
        started.append(1)
        return real()

    monkeypatch.setattr(workers, "_started", counted)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2 * NUM_THREADS))
    monkeypatch.setattr(explore, "PARALLEL_BLOCKS", 1)
    together = solve(profile, **settings)
    assert started
    assert together.plan.stages == alone.plan.stages
