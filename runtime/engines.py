"""What does work, in order: streams and one worker thread on a GPU, everything at once in line on a CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from lazysched.schemas import Engine

Done = torch.cuda.Event | Future[None] | None
"""Tells when an operation has finished: an event of its stream, the promise of the worker; None where it has."""

Mark = torch.cuda.Event | float
"""A moment on ``compute``: a timed event, or seconds of the host's clock where engines run in line."""

RESERVED_CORES = 2
"""Cores left to the thread that launches kernels and to the driver."""


class Engines(Protocol):
    """Runs operations; each engine keeps the order in which its operations were submitted."""

    def submit(self, engine: Engine, work: Callable[[], None], after: Sequence[Done], signal: bool) -> Done:
        """Queue ``work`` behind everything in ``after``; with ``signal``, return what others can wait for."""

    def mark(self) -> Mark:
        """The moment at which everything submitted to ``compute`` so far is done."""
        ...

    def drain(self) -> None:
        """Wait for everything; raise what a worker raised."""

    def close(self) -> None:
        """Finish and give the threads back."""


class InlineEngines:
    """Every engine is the calling thread: work runs when it is submitted, which the program's order allows."""

    def submit(self, engine: Engine, work: Callable[[], None], after: Sequence[Done], signal: bool) -> Done:
        """Run ``work`` now."""
        work()
        return None

    def mark(self) -> Mark:
        """Now."""
        return time.perf_counter()

    def drain(self) -> None:
        """Nothing is ever outstanding."""

    def close(self) -> None:
        """Nothing to give back."""


class CudaEngines:
    """Compute on the current stream, a stream for each copy direction, a worker thread for the CPU."""

    def __init__(self, threads: int) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {
            "compute": torch.cuda.current_stream(), "h2d": torch.cuda.Stream(), "d2h": torch.cuda.Stream(),
        }  # fmt: skip
        # The number of threads of a parallel region belongs to the thread that opens it, hence the initializer.
        self._worker = ThreadPoolExecutor(1, "lazysched-cpu", initializer=torch.set_num_threads, initargs=(threads,))
        self._outstanding: list[Future[None]] = []

    def submit(self, engine: Engine, work: Callable[[], None], after: Sequence[Done], signal: bool) -> Done:
        """Queue ``work``; a stream waits on the device, and this thread waits only for the worker."""
        if engine == "cpu":
            events = [done for done in after if isinstance(done, torch.cuda.Event)]
            future = self._worker.submit(_after_events, events, work)
            self._outstanding = [f for f in self._outstanding if not f.done() or f.exception()]
            self._outstanding.append(future)
            return future
        stream = self._streams[engine]
        for done in after:
            if isinstance(done, Future):
                done.result()
            elif done is not None:
                stream.wait_event(done)
        with torch.cuda.stream(stream):
            work()
        if not signal:
            return None
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def mark(self) -> Mark:
        """A timed event behind everything on ``compute``."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._streams["compute"])
        return event

    def drain(self) -> None:
        """Wait for worker and device."""
        outstanding, self._outstanding = self._outstanding, []
        for future in outstanding:
            future.result()
        torch.cuda.synchronize()

    def close(self) -> None:
        """Drop work not begun, finish what runs."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        torch.cuda.synchronize()


def cpu_threads(device: torch.device) -> int:
    """Threads of the engine ``cpu`` beside ``device``."""
    if device.type != "cuda":
        return torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) - RESERVED_CORES)


def seconds_between(earlier: Mark, later: Mark) -> float:
    """Time between two marks of one run; waits for the later one."""
    if isinstance(earlier, torch.cuda.Event) and isinstance(later, torch.cuda.Event):
        later.synchronize()
        return float(earlier.elapsed_time(later)) / 1e3
    assert not isinstance(earlier, torch.cuda.Event)
    assert not isinstance(later, torch.cuda.Event)
    return later - earlier


def _after_events(events: Sequence[torch.cuda.Event], work: Callable[[], None]) -> None:
    for event in events:
        event.synchronize()
    work()
