"""How long work takes: events of the stream on a GPU, the wall clock on a CPU; medians over repeats.

On a GPU all repeats are queued at once, as the executor queues a step, so that launching hides where it also would in
training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

from lazysched.runtime.engines import cpu_threads
from lazysched.schemas import Rate, Timing, interquartile

T = TypeVar("T")

MAX_REPEATS = 20
TARGET_S = 0.5
"""Time to spend on the repeats of one figure."""
PATIENCE_S = 2.0
"""Three repeats may take so long; where they would take longer there are two."""


class Stopwatch(Protocol):
    """Collects the durations of laps."""

    def lap(self, work: Callable[[], T]) -> T:
        """Do ``work`` and note how long it takes."""
        ...

    def durations_s(self) -> list[float]:
        """Seconds of every lap; waits for the device."""
        ...


class WallStopwatch:
    """Times work that is done when its call returns."""

    def __init__(self) -> None:
        self._durations_s: list[float] = []

    def lap(self, work: Callable[[], T]) -> T:
        """Do ``work`` and note how long it takes."""
        start_s = time.perf_counter()
        result = work()
        self._durations_s.append(time.perf_counter() - start_s)
        return result

    def durations_s(self) -> list[float]:
        """Seconds of every lap."""
        return self._durations_s


class EventStopwatch:
    """Times what is queued on one stream, between two of its events."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._laps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def lap(self, work: Callable[[], T]) -> T:
        """Queue ``work`` on the stream between two events."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            start.record(self._stream)
            result = work()
            end.record(self._stream)
        self._laps.append((start, end))
        return result

    def durations_s(self) -> list[float]:
        """Seconds of every lap, after the stream has finished."""
        self._stream.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in self._laps]


def stopwatch(device: torch.device) -> Stopwatch:
    """A stopwatch for work on ``device``, on a GPU for its current stream."""
    return EventStopwatch(torch.cuda.current_stream(device)) if device.type == "cuda" else WallStopwatch()


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``work`` takes alone, from an idle device to an idle device."""
    synchronize(device)
    start_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start_s


def num_repeats(once_s: float, asked: int | None, target_s: float = TARGET_S) -> int:
    """How often to repeat what takes ``once_s``: as often as asked, else for about ``target_s`` within limits."""
    if asked is not None:
        return asked
    fewest = 3 if 3 * once_s <= PATIENCE_S else 2
    return max(fewest, min(MAX_REPEATS, int(target_s / max(once_s, 1e-9))))


def durations_of(
    work: Callable[[], object], device: torch.device, repeats: int | None, target_s: float = TARGET_S
) -> list[float]:
    """Seconds of each repeat of ``work``, after one that does not count."""
    count = num_repeats(wall_s(work, device), repeats, target_s)
    watch = stopwatch(device)
    for _ in range(count):
        watch.lap(work)
    return watch.durations_s()


def timing(durations_s: Sequence[float]) -> Timing:
    """Median and interquartile range of ``durations_s``."""
    return Timing.of(durations_s)


def rate(durations_s: Sequence[float], amount: int) -> Rate:
    """Rate at which ``amount`` of work gets done in each of ``durations_s``."""
    rates = [amount / duration for duration in durations_s]
    median = statistics.median(rates)
    return Rate(per_s=median, spread=interquartile(rates) / median, repeats=len(rates))


def on_cpu_engine(work: Callable[[], T], device: torch.device) -> T:
    """Run ``work`` where the executor runs the engine ``cpu``: in line, or beside a GPU on a thread of its own."""
    if device.type != "cuda":
        return work()
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(cpu_threads(device),)) as worker:
        return worker.submit(work).result()
