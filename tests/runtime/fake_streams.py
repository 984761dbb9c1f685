"""Stand-ins for CUDA's streams and events on a CPU: what is launched on a stream runs later, in order, on a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

import pytest
import torch

from lazysched.schemas import Op
from tests.runtime.racing import Around

T = TypeVar("T")
_here = threading.local()
COPIES = ("h2d", "d2h")


class FakeStream:
    """One thread; what it raises is raised again when the device is synchronised."""

    all: ClassVar[list[FakeStream]] = []

    def __init__(self, device: object = None) -> None:
        self._worker = ThreadPoolExecutor(1, "stream", initializer=torch.set_num_threads, initargs=(1,))
        self._launched: list[Future[Any]] = []
        FakeStream.all.append(self)

    def launch(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work``."""
        done = self._worker.submit(work)
        self._launched.append(done)
        return done

    def wait_event(self, event: FakeEvent) -> None:
        """What is launched from here on comes after ``event``."""
        self.launch(event.synchronize_later())

    def synchronize(self) -> None:
        """Wait for everything; raise what any of it raised."""
        launched, self._launched = self._launched, []
        for done in launched:
            done.result()

    def close(self) -> None:
        """Give the thread back."""
        self._worker.shutdown(wait=True)


class FakeEvent:
    """Happens when its stream gets to where it was recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._reached_s: Future[float] = Future()

    def record(self, stream: FakeStream | None = None) -> None:
        self._reached_s = (stream or current_stream()).launch(time.perf_counter)

    def synchronize(self) -> None:
        self._reached_s.result()

    def elapsed_time(self, later: FakeEvent) -> float:
        """Milliseconds."""
        return 1e3 * (later._reached_s.result() - self._reached_s.result())

    def synchronize_later(self) -> Callable[[], object]:
        """A call that waits for the event as it is recorded now."""
        return self._reached_s.result


def current_stream() -> FakeStream:
    """The stream of the calling thread."""
    stream: FakeStream = getattr(_here, "stream", None) or FakeStream.all[0]
    return stream


@contextmanager
def _on_stream(stream: FakeStream) -> Iterator[None]:
    before, _here.stream = getattr(_here, "stream", None), stream
    try:
        yield
    finally:
        _here.stream = before


def _synchronize() -> None:
    for stream in FakeStream.all:
        stream.synchronize()


@contextmanager
def fake_streams() -> Iterator[None]:
    """``torch.cuda`` makes such streams and events."""
    FakeStream.all = []
    FakeStream()
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in {
            "Event": FakeEvent, "Stream": FakeStream, "current_stream": current_stream, "stream": _on_stream,
            "synchronize": _synchronize, "current_device": lambda: 0, "set_device": lambda _: None,
        }.items():  # fmt: skip
            patch.setattr(torch.cuda, name, stand_in)
        try:
            yield
        finally:
            for stream in FakeStream.all:
                stream.close()


def launched(around: Around, *, blocking_copies: bool) -> Around:
    """``around`` on the stream of the engine; with ``blocking_copies`` a copy keeps the thread that issues it.

    The engine ``cpu`` has no stream.
    """

    def run(op: Op, work: Callable[[], None]) -> None:
        if op.engine == "cpu":
            around(op, work)
            return
        done = current_stream().launch(partial(around, op, work))
        if blocking_copies and op.engine in COPIES:
            done.result()

    return run
