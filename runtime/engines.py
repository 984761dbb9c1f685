"""What does work, in order: streams and worker threads on a GPU, everything at once in line on a CPU.

Only uploads wait for the CPU's updates, so uploads are issued by a thread of their own: the thread that launches a step
never waits for an update that its next operation does not need.

A copy from or to memory that is not page-locked keeps the thread that asks for it: the driver moves the bytes through
memory of its own. Then copies to the host have a thread of their own too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch

from lazysched.schemas import Engine

Done = torch.cuda.Event | Future[torch.cuda.Event | None] | None
"""Tells when an operation has finished: an event of its stream; a worker's promise, kept when the CPU's operation has
finished or the copy was issued, and then an event too; None where it has finished or nobody asks."""

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
    """Compute on the current stream, a stream for each copy direction, worker threads for the CPU and for uploads.

    Args:
        threads: of the CPU's work.
        blocking_copies: whether host memory is not page-locked, so that copies keep the thread that issues them.
    """

    def __init__(self, threads: int, *, blocking_copies: bool = False) -> None:
        self._blocking_copies = blocking_copies
        self._streams: dict[str, torch.cuda.Stream] = {
            "compute": torch.cuda.current_stream(), "h2d": torch.cuda.Stream(), "d2h": torch.cuda.Stream(),
        }  # fmt: skip
        device = torch.cuda.current_device()
        # The number of threads of a parallel region belongs to the thread that opens it, hence the initializer.
        self._workers = {
            "cpu": ThreadPoolExecutor(1, "lazysched-cpu", initializer=torch.set_num_threads, initargs=(threads,)),
            "h2d": ThreadPoolExecutor(1, "lazysched-h2d", initializer=torch.cuda.set_device, initargs=(device,)),
        }
        if blocking_copies:
            self._workers["d2h"] = ThreadPoolExecutor(
                1, "lazysched-d2h", initializer=torch.cuda.set_device, initargs=(device,)
            )
        self._outstanding: list[Future[torch.cuda.Event | None]] = []

    def submit(self, engine: Engine, work: Callable[[], None], after: Sequence[Done], signal: bool) -> Done:
        """Queue ``work``; a stream waits on the device, and this thread waits only until a worker issued a copy."""
        if engine not in self._workers:
            return self._issue(engine, work, after, signal)
        run: Callable[[], torch.cuda.Event | None]
        if engine == "cpu":
            run = partial(_wait_and_run, after, work)
        elif self._blocking_copies:
            run = partial(self._wait_and_issue, engine, work, after, signal)
        else:
            run = partial(self._issue, engine, work, after, signal)
        future: Future[torch.cuda.Event | None] = self._workers[engine].submit(run)
        self._outstanding = [f for f in self._outstanding if not f.done() or f.exception()]
        self._outstanding.append(future)
        return future

    def _wait_and_issue(
        self, engine: Engine, work: Callable[[], None], after: Sequence[Done], signal: bool
    ) -> torch.cuda.Event | None:
        """Issue a copy when nothing is left to wait for, so that it does not wait inside the driver, in others' way.

        Whether the call returns before the bytes have arrived is up to the driver; the event behind it tells.
        """
        wait_for(*after)
        return self._issue(engine, work, (), signal)

    def _issue(
        self, engine: Engine, work: Callable[[], None], after: Sequence[Done], signal: bool
    ) -> torch.cuda.Event | None:
        stream = self._streams[engine]
        for event in _events(after):
            stream.wait_event(event)
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
        """Wait for workers and device."""
        outstanding, self._outstanding = self._outstanding, []
        for future in outstanding:
            future.result()
        torch.cuda.synchronize()

    def close(self) -> None:
        """Drop work not begun, finish what runs."""
        for worker in self._workers.values():
            worker.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers.values():
            worker.shutdown(wait=True)
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


def _events(after: Sequence[Done]) -> Iterator[torch.cuda.Event]:
    """What a stream has to wait for, once the workers have kept their promises; raises what a worker raised."""
    for done in after:
        event = done.result() if isinstance(done, Future) else done
        if event is not None:
            yield event


def wait_for(*after: Done) -> None:
    """Wait on the calling thread until all that is behind ``after`` has finished; raises what a worker raised."""
    for event in _events(after):
        event.synchronize()


def _wait_and_run(after: Sequence[Done], work: Callable[[], None]) -> None:
    wait_for(*after)
    work()
