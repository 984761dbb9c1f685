from __future__ import annotations

import threading

import pytest
import torch

from lazysched.profiles import clock
from lazysched.runtime.engines import cpu_threads

CPU = torch.device("cpu")


def test_median_and_interquartile_range() -> None:
    timing = clock.timing([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (timing.median_s, timing.spread_s, timing.repeats) == (3.0, 2.0, 5)
    rate = clock.rate([1.0, 2.0, 4.0], amount=8)
    assert (rate.per_s, rate.spread, rate.repeats) == (4.0, 0.75, 3)
    assert clock.timing([2.0]).spread_s == 0.0


@pytest.mark.parametrize(
    ("once_s", "asked", "expected"),
    [(10.0, None, 2), (0.6, None, 3), (0.1, None, 5), (1e-6, None, 20), (0.0, None, 20), (10.0, 1, 1), (1e-6, 7, 7)],
)
def test_repeats_follow_the_time_one_takes(once_s: float, asked: int | None, expected: int) -> None:
    assert clock.num_repeats(once_s, asked, target_s=0.5) == expected


def test_first_run_does_not_count() -> None:
    calls: list[int] = []
    durations = clock.durations_of(lambda: calls.append(1), CPU, repeats=4)
    assert (len(calls), len(durations)) == (5, 4)


def test_cpu_engine_runs_in_line_without_a_gpu_and_on_its_own_thread_beside_one() -> None:
    here = threading.get_ident()
    assert clock.on_cpu_engine(threading.get_ident, CPU) == here
    threads = torch.get_num_threads()
    beside_gpu = torch.device("cuda")
    assert clock.on_cpu_engine(threading.get_ident, beside_gpu) != here
    assert clock.on_cpu_engine(torch.get_num_threads, beside_gpu) == cpu_threads(beside_gpu)
    assert torch.get_num_threads() == threads
