"""What makes a missing dependency show: engines that really run beside each other, poison, delays, edges taken out."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from lazysched.runtime.engines import Done, Engines, Mark
from lazysched.runtime.executor import Executor
from lazysched.runtime.operations import StepContext
from lazysched.runtime.session import Session
from lazysched.schemas import Engine, Op, Program
from tests.runtime.race_plans import Edge

Around = Callable[[Op, Callable[[], None]], None]
"""Runs an operation's work, and something before and after it, where and when the engine would."""

ENGINES: tuple[Engine, ...] = ("compute", "h2d", "d2h", "cpu")
LAGGING_S: dict[Engine, float] = {"compute": 1e-3, "h2d": 4e-3, "d2h": 4e-3, "cpu": 1e-2}
"""Longest delays of the engine that lags in a plan: the fewer operations it has, the longer."""
OTHERS_S = (0.0, 2e-4)
"""Longest delays of another engine, one of these."""
GUARD_S = 60.0
"""After so long an operation held back gives up, so that a mistake in these tests cannot hang them."""


class ThreadedEngines:
    """One thread for each engine, which keeps its order; nothing but ``after`` orders the engines among themselves."""

    def __init__(self) -> None:
        self._workers = {
            engine: ThreadPoolExecutor(1, engine, initializer=torch.set_num_threads, initargs=(1,))
            for engine in ENGINES
        }  # fmt: skip
        self._outstanding: list[Future[torch.cuda.Event | None]] = []

    def submit(self, engine: Engine, work: Callable[[], None], after: Sequence[Done], signal: bool) -> Done:
        futures = [done for done in after if isinstance(done, Future)]
        run = partial(_after, futures, work)
        future = self._workers[engine].submit(run)
        self._outstanding.append(future)
        return future if signal else None

    def mark(self) -> Mark:
        return time.perf_counter()

    def drain(self) -> None:
        outstanding, self._outstanding = self._outstanding, []
        for future in outstanding:
            future.result()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.shutdown(wait=True, cancel_futures=True)


def _after(futures: Sequence[Future[Any]], work: Callable[[], None]) -> torch.cuda.Event | None:
    for future in futures:
        future.result()
    work()
    return None


class Disturbed:
    """Random delays around every operation, and one engine that lags; what is about to be overwritten is poisoned.

    A reader that comes too late, or too early, then finds NaN.

    Args:
        session: whose operations these are.
        seed: of the delays.
        pause: keeps the engine of the operation busy for so many seconds.
    """

    def __init__(self, session: Session, seed: int, pause: Callable[[Op, float], None]) -> None:
        self._buffers, self._device, self._pause = session.buffers, session.device, pause
        draws = random.Random(seed)
        lagging = draws.choice(ENGINES)
        self._longest_s = {engine: draws.choice(OTHERS_S) for engine in ENGINES} | {lagging: LAGGING_S[lagging]}
        self._draws = {engine: random.Random(draws.random()) for engine in ENGINES}

    def __call__(self, op: Op, work: Callable[[], None]) -> None:
        self._wait(op)
        for buffer in overwritten(op):
            poison(self._buffers[buffer], self._device)
        self._wait(op)
        work()
        self._wait(op)

    def _wait(self, op: Op) -> None:
        self._pause(op, self._draws[op.engine].random() * self._longest_s[op.engine])


class HeldBack:
    """Lets one operation of one step run only when an operation that should wait for it has finished.

    Whatever fails lets it go too: the other operation might never run then.
    """

    def __init__(self, edge: Edge, step: int) -> None:
        self._before, self._after, distance = edge
        self._step_of = {self._before: step, self._after: step + distance}
        self._seen: Counter[str] = Counter()
        self._finished = threading.Event()

    def __call__(self, op: Op, work: Callable[[], None]) -> None:
        step, self._seen[op.id] = self._seen[op.id], self._seen[op.id] + 1
        chosen = self._step_of.get(op.id) == step
        if chosen and op.id == self._before:
            assert self._finished.wait(GUARD_S), f"{self._after} never ran without {self._before}"
        try:
            work()
        except Exception:
            self._finished.set()
            raise
        if chosen and op.id == self._after:
            self._finished.set()


class Late:
    """Keeps an engine busy before the first operation of an edge in one step, for long enough that the second is first.

    Args:
        edge: whose first operation is late.
        step: in which it is.
        seconds: by how much.
        pause: keeps the engine of the operation busy for so many seconds.
    """

    def __init__(self, edge: Edge, step: int, seconds: float, pause: Callable[[Op, float], None]) -> None:
        self._late, self._step, self._seconds, self._pause = edge[0], step, seconds, pause
        self._seen: Counter[str] = Counter()

    def __call__(self, op: Op, work: Callable[[], None]) -> None:
        step, self._seen[op.id] = self._seen[op.id], self._seen[op.id] + 1
        if op.id == self._late and step == self._step:
            self._pause(op, self._seconds)
        work()


def overwritten(op: Op) -> list[str]:
    """Buffers all of whose content ``op`` replaces without having read it."""
    if op.kind == "copy":
        return [buffer for buffer in op.writes if buffer not in ("host/scale", "host/totals")]  # a step's own
    if op.kind in ("backward", "loss") and op.micro_batch == 0:
        return [buffer for buffer in op.writes if buffer.split("/")[1] in ("accumulator", "grads", "loss")]
    if op.kind == "norm":
        return [buffer for buffer in op.writes if buffer != "gpu/norms"]
    return []


def poison(buffer: torch.Tensor, device: torch.device) -> None:
    """NaN, whatever the bytes are read as; the first token where they are tokens, which must stay valid.

    Written by the current stream of ``device``, in its order, also where the buffer is on the host.
    """
    value = float("nan") if buffer.is_floating_point() else 255 if buffer.dtype == torch.uint8 else 0
    if buffer.device.type == device.type:
        buffer.fill_(value)
    else:
        buffer.copy_(torch.full_like(buffer, value, device=device), non_blocking=True)


def racing_executor(session: Session, program: Program, engines: Engines | None, around: Around) -> Executor:
    """An executor of ``program`` on the session's memory, with ``around`` around every operation.

    Args:
        session: with weights loaded; its own executor is not used.
        program: of the session's plan, perhaps without some edges.
        engines: None takes those that the executor chooses.
        around: runs the operations.
    """
    own = session.executor._operations
    executor = Executor(
        session.plan, program, session.model, session.buffers, session.updates, own._settings, own._max_grad_norm
    )
    run = executor._operations.run

    def disturbed(op: Op, context: StepContext) -> None:
        around(op, partial(run, op, context))

    executor._operations.run = disturbed
    if engines is not None:
        executor._engines.close()
        executor._engines = engines
    return executor


def without(program: Program, edge: Edge) -> Program:
    """``program`` as if ``edge`` had been forgotten."""
    return Program(
        plan_hash=program.plan_hash, ops=program.ops, buffers=program.buffers,
        edges=[other for other in program.edges if other != edge],
    )  # fmt: skip
