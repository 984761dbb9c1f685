"""Processes of their own for solves that do not depend on each other.

Workers are started by command line, not by multiprocessing: that would import the user's script once more, and run it
where it has no guard. They have a pipe each and no threads, so that they can be ended at any moment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from lazysched.errors import LazyschedError, RunError

_IS_WORKER = "LAZYSCHED_SOLVER_WORKER"
Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Cores that this process may run on, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_worker() -> bool:
    """Whether this process is a worker, which has its cores for itself but no others."""
    return _IS_WORKER in os.environ


def each_in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], num_workers: int
) -> Iterator[tuple[int, Result]]:
    """(index, ``function`` of that item) as they come.

    Args:
        function: of a module, so that a worker finds it by name.
        items: what can be pickled.
        num_workers: processes at once.

    Raises:
        LazyschedError: as ``function``; the other workers are ended.
        RunError: a worker died.
    """
    waiting, busy = iter(enumerate(items)), dict[Connection, int]()
    workers: dict[Connection, subprocess.Popen[bytes]] = {}
    try:
        for _ in range(min(num_workers, len(items))):
            connection, process = _started()
            workers[connection] = process
        for connection in workers:
            _hand_out(connection, function, waiting, busy)
        while busy:
            ready = wait(list(busy))
            for connection in [known for known in busy if known in ready]:
                found = connection.recv()
                if isinstance(found, LazyschedError):
                    raise found
                yield busy.pop(connection), found
                _hand_out(connection, function, waiting, busy)
    except (EOFError, ConnectionError):
        raise RunError("a process that was solving died, perhaps for lack of memory; free some") from None
    finally:
        for connection, process in workers.items():
            process.terminate()
            process.wait()
            connection.close()


def _hand_out(
    connection: Connection,
    function: Callable[..., Any],
    waiting: Iterator[tuple[int, Any]],
    busy: dict[Connection, int],
) -> None:
    """Give a worker the next item, if there is one."""
    for index, item in waiting:
        connection.send((function, item))
        busy[connection] = index
        return


def _started() -> tuple[Connection, subprocess.Popen[bytes]]:
    """A worker and the pipe to it."""
    ours, theirs = Pipe()
    # Workers inherit the mask: Ctrl-C, which reaches all processes, is for the main one to answer.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({theirs.fileno()})"
        process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    theirs.close()
    return ours, process


def serve(descriptor: int) -> None:
    """Answer what comes through a pipe until its other end is closed."""
    os.environ[_IS_WORKER] = "1"
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            function, item = connection.recv()
            try:
                found = function(item)
            except LazyschedError as error:
                found = error
            connection.send(found)
