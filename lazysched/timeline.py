"""When operations ran, simulated or measured, and what that says of a step. One set of definitions for both.

**Exposed time** is time in which ``compute`` waits for another engine: between the end of the operation before it on
``compute`` and the end of its last-finishing predecessor, an operation of ``compute`` is exposed to the engine of that
predecessor. What of it a file took, read or written on the way to that predecessor, is exposed to the file's engine.
Where engines run in line, on a CPU, whatever is not compute is exposed. **Idle time** is all of a step in
which ``compute`` runs nothing: what is exposed, and what it waits for its operations to be launched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lazysched.schemas import Engine, Op, Program

ROUNDING = 1e-9
"""Share of a wait that is no wait."""
BUSY_SHARE = 0.01
"""Of what the other direction moves: from there on both directions count as busy."""
FILE_ENGINES: tuple[Engine, ...] = ("nvme_read", "nvme_write")
LINK_ENGINES: tuple[Engine, ...] = ("h2d", "d2h", "nvme_read", "nvme_write", "collective")


class Interval(NamedTuple):
    """One operation of one step on its engine; seconds since any moment that all intervals share."""

    op: str
    engine: Engine
    start_s: float
    end_s: float
    step: int

    @property
    def duration_s(self) -> float:
        """From start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class TimedSteps:
    """What the intervals of consecutive steps say of one step, on average.

    Attributes:
        steps: those whose figures these are; the step before each was timed too.
        exposed_s: engine -> time in which ``compute`` waited for it.
        idle_s: time in which ``compute`` ran nothing.
        moved_bytes: engine -> bytes that its operations moved.
    """

    steps: tuple[int, ...]
    exposed_s: dict[Engine, float]
    idle_s: float
    moved_bytes: dict[Engine, int]


def timed_steps(program: Program, intervals: Iterable[Interval], *, in_line: bool) -> TimedSteps | None:
    """Figures of the steps in ``intervals`` that follow another one there; None where none does.

    Args:
        program: one step.
        intervals: every operation of some steps.
        in_line: whether all engines are one thread.
    """
    by_step = intervals_by_step(intervals)
    steps = tuple(step for step in sorted(by_step) if step - 1 in by_step)
    if not steps:
        return None
    exposed_s: dict[Engine, float] = defaultdict(float)
    idle_s = 0.0
    moved: dict[Engine, int] = defaultdict(int)
    for step in steps:
        here, before = by_step[step], by_step[step - 1]
        for engine, seconds in exposed_of_step(program, here, before, in_line=in_line).items():
            exposed_s[engine] += seconds / len(steps)
        idle_s += idle_of_step(here, before) / len(steps)
        for engine, num_bytes in moved_bytes(program.ops[op] for op in here).items():
            moved[engine] += num_bytes
    return TimedSteps(steps, dict(exposed_s), idle_s, {key: total // len(steps) for key, total in moved.items()})


def intervals_by_step(intervals: Iterable[Interval]) -> dict[int, dict[str, Interval]]:
    """Step -> operation id -> when it ran."""
    by_step: dict[int, dict[str, Interval]] = defaultdict(dict)
    for interval in intervals:
        by_step[interval.step][interval.op] = interval
    return dict(by_step)


def last_two_steps(intervals: Iterable[Interval]) -> list[Interval]:
    """Those of the last step that follows another one there, and of that one; nothing where none does."""
    by_step = intervals_by_step(intervals)
    last = max((step for step in by_step if step - 1 in by_step), default=None)
    return [] if last is None else [*by_step[last - 1].values(), *by_step[last].values()]


class Wait(NamedTuple):
    """``compute`` had nothing to do before operation ``op``, because ``cause`` had not finished on its own engine.

    ``cause`` is a predecessor of ``op``, or a file's operation on the way to one.
    """

    op: str
    cause: str
    engine: Engine
    """That of ``cause``."""
    seconds: float
    free_s: float
    """When the wait began."""
    cause_step: int
    """Step in which ``cause`` ran."""


def exposed_of_step(
    program: Program, here: Mapping[str, Interval], before: Mapping[str, Interval], *, in_line: bool
) -> dict[Engine, float]:
    """Engine -> time in which ``compute`` waited for it; the arguments are those of :func:`waits_of_step`."""
    exposed_s: dict[Engine, float] = defaultdict(float)
    for wait in waits_of_step(program, here, before, in_line=in_line):
        exposed_s[wait.engine] += wait.seconds
    return dict(exposed_s)


def waits_of_step(
    program: Program, here: Mapping[str, Interval], before: Mapping[str, Interval], *, in_line: bool
) -> list[Wait]:
    """Every wait of ``compute`` for another engine, in order.

    Args:
        program: one step.
        here: operation id -> when it ran in this step.
        before: the same of the step before.
        in_line: whether all engines are one thread; every operation that is not compute is then its own cause.
    """
    if in_line:
        others = [interval for interval in here.values() if interval.engine != "compute"]
        return [Wait(o.op, o.op, o.engine, o.duration_s, o.start_s, o.step) for o in others]
    chain = Chain(program, here, before) if any(op.engine in FILE_ENGINES for op in program.ops.values()) else None
    waits: list[Wait] = []
    free_s = compute_end_s(before)
    for op in program.ops.values():
        if op.engine != "compute":
            continue
        ends = [(before if distance else here)[earlier] for earlier, distance in program.predecessors[op.id]]
        last = max(ends, key=lambda interval: interval.end_s, default=None)
        # Measured, an operation can start before its predecessor seems to end: the host's clock is another one.
        waited_s = 0.0 if last is None else min(last.end_s, here[op.id].start_s) - free_s
        if last is not None and last.engine != "compute" and waited_s > 0:
            wait = Wait(op.id, last.op, last.engine, waited_s, free_s, last.step)
            waits += [wait] if chain is None else _told_apart(wait, chain)
        free_s = here[op.id].end_s
    return waits


def _told_apart(wait: Wait, chain: Chain) -> list[Wait]:
    """``wait`` less what files took of it, and that."""
    parts, until_s = [], wait.free_s + wait.seconds
    for interval in chain.leading_to(wait):
        start_s = max(interval.start_s, wait.free_s)
        taken_s = min(interval.end_s, until_s) - start_s
        if interval.engine in FILE_ENGINES and taken_s > 0:
            parts.append(Wait(wait.op, interval.op, interval.engine, taken_s, start_s, interval.step))
        until_s = min(until_s, start_s)
    rest_s = wait.seconds - sum(part.seconds for part in parts)
    return [*parts, wait._replace(seconds=rest_s)] if rest_s > ROUNDING * wait.seconds else parts


class Chain:
    """What kept an operation from starting, and that one, and so on, within a step and the one before it."""

    def __init__(self, program: Program, here: Mapping[str, Interval], before: Mapping[str, Interval]) -> None:
        self._program, self._steps = program, (here, before)
        self._step = next(iter(here.values())).step
        last = {op.engine: (op.id, 1) for op in program.ops.values()}
        self._previous: dict[str, tuple[str, int]] = {}
        for op in program.ops.values():
            self._previous[op.id] = last[op.engine]
            last[op.engine] = (op.id, 0)

    def leading_to(self, wait: Wait) -> list[Interval]:
        """The cause of ``wait``, what kept that from starting, and so on back to what ran when the wait began."""
        op, distance = wait.cause, self._step - wait.cause_step
        found = [self._steps[distance][op]]
        while found[-1].start_s > wait.free_s:
            listed = [*self._program.predecessors[op], self._previous[op]]
            earlier = [(name, distance + d) for name, d in listed if distance + d < len(self._steps)]
            if not earlier:
                break
            op, distance = max(earlier, key=lambda item: self._steps[item[1]][item[0]].end_s)
            if self._steps[distance][op].end_s <= wait.free_s:
                break
            found.append(self._steps[distance][op])
        return found


def idle_of_step(here: Mapping[str, Interval], before: Mapping[str, Interval]) -> float:
    """Seconds of a step, end to end on ``compute``, in which that engine ran nothing."""
    busy_s = sum(interval.duration_s for interval in here.values() if interval.engine == "compute")
    return max(0.0, compute_end_s(here) - compute_end_s(before) - busy_s)


def compute_end_s(step: Mapping[str, Interval]) -> float:
    """When ``compute`` was done with a step."""
    return max((interval.end_s for interval in step.values() if interval.engine == "compute"), default=0.0)


def moved_bytes(ops: Iterable[Op]) -> dict[Engine, int]:
    """Engine -> bytes that ``ops`` move over it; traffic inside GPU memory is not counted."""
    moved: dict[Engine, int] = {}
    for op in ops:
        if op.engine in LINK_ENGINES and op.num_bytes:
            moved[op.engine] = moved.get(op.engine, 0) + op.num_bytes
    return moved


def both_ways(program: Program) -> bool:
    """Whether a step keeps both directions between host and GPU busy."""
    moved = moved_bytes(program.ops.values())
    less, more = sorted((moved.get("h2d", 0), moved.get("d2h", 0)))
    return less >= BUSY_SHARE * more and less > 0
