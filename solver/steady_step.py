"""One steady step of a timeline: what repeats every ``step_s`` seconds, and the memory that is in use meanwhile.

The picture is that of the last step and begins when ``compute`` is done with the step before, whose operations go on in
it. The step after is not in the timeline; what it would begin already is what the last step began before its picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lazysched.errors import UsageError
from lazysched.layout import mapping_bytes
from lazysched.lower import lower
from lazysched.schemas import Plan, Profile, Program
from lazysched.solver.simulate import Timeline
from lazysched.timeline import Interval, compute_end_s, intervals_by_step

if TYPE_CHECKING:
    import pandas as pd

NS_PER_S = 10**9
"""Moments are rounded to nanoseconds: the same one, reckoned from two steps, differs in its last bits."""


class _Picture:
    """The time of the last step.

    Args:
        intervals: every operation of at least two consecutive steps.

    Attributes:
        ops: operation id -> when it ran in that step.
        step_ns: length.
    """

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._by_step = intervals_by_step(intervals)
        self._last = max(self._by_step, default=0)
        if self._last - 1 not in self._by_step:
            raise UsageError("intervals: no two steps in a row; time at least two to see a steady one")
        self.ops = self._by_step[self._last]
        self._begin_s = compute_end_s(self._by_step[self._last - 1])
        self.step_ns = self._ns(compute_end_s(self.ops))

    def spans(self, first_op: str, last_op: str) -> Iterator[tuple[int, int]]:
        """When, within the picture, a step is between the start of one operation and the end of another, ns."""
        for step, ops in self._by_step.items():
            start_ns, end_ns = self._ns(ops[first_op].start_s), self._ns(ops[last_op].end_s)
            for shift_ns in (0, self.step_ns) if step == self._last else (0,):
                span = max(0, start_ns + shift_ns), min(self.step_ns, end_ns + shift_ns)
                if span[0] < span[1]:
                    yield span

    def _ns(self, moment_s: float) -> int:
        return round(NS_PER_S * (moment_s - self._begin_s))


def steady_frame(intervals: Iterable[Interval]) -> pd.DataFrame:
    """One row per operation of a steady step, two for one that crosses its end: ``op engine start_s end_s``.

    Seconds count from 0 to the step's time; rows are sorted by their start. Operations that take no time are left out.

    Args:
        intervals: every operation of at least two consecutive steps; the last one is shown.

    Raises:
        UsageError: there are fewer than two steps.
    """
    import pandas as pd

    picture = _Picture(intervals)
    rows = [
        (interval.op, interval.engine, start_ns / NS_PER_S, end_ns / NS_PER_S)
        for interval in picture.ops.values()
        for start_ns, end_ns in picture.spans(interval.op, interval.op)
    ]
    frame = pd.DataFrame(rows, columns=["op", "engine", "start_s", "end_s"])
    return frame.sort_values("start_s", kind="stable", ignore_index=True)


def memory_frame(plan: Plan, timeline: Timeline, profile: Profile | None = None) -> pd.DataFrame:
    """Bytes over one steady step, as ``program_memory_frame`` gives them, with what lies outside the program.

    That is on the tier ``gpu``: ``context`` of the driver, its ``page_tables`` of page-locked memory, and
    ``fragmentation``. The peak of a tier, ``frame["gpu"].sum(axis=1).max()``, is the timeline's.

    Args:
        plan: what was simulated.
        timeline: what the simulator saw.
        profile: what it was simulated with; None: the one in the plan.
    """
    measured = profile or plan.profile
    if measured is None:
        raise UsageError("plan: profile: null, as in a plan written by hand; name one with --profile")
    frame = program_memory_frame(lower(plan, measured.stages), timeline.intervals)
    outside = {
        "context": measured.context_bytes,
        "page_tables": mapping_bytes(timeline.pinned_bytes) if measured.device == "cuda" else 0,
        "fragmentation": measured.fragmentation_bytes.get(plan.micro_batch, 0),
    }
    for kind, num_bytes in outside.items():
        if num_bytes:
            frame["gpu", kind] = num_bytes
    return frame.sort_index(axis=1)


def program_memory_frame(program: Program, intervals: Iterable[Interval]) -> pd.DataFrame:
    """Bytes that the buffers of ``program`` and the working sets of its operations take, over one steady step.

    A buffer exists from the start of the operation that allocates it to the end of the one after which it is freed.

    Args:
        program: one step.
        intervals: every operation of at least two consecutive steps, simulated or measured; the last one counts.

    Returns:
        Index ``time_s``: 0 and whenever something changes, each row valid until the next; the last row closes the step
        and repeats the one before it. Columns (tier, kind), int64: kinds are those of the buffers and ``working``.

    Raises:
        UsageError: there are fewer than two steps.
    """
    picture = _Picture(intervals)
    events = list(_constant_bytes(program))
    for tier, kind, num_bytes, first_op, last_op in _lifetimes(program):
        for start_ns, end_ns in picture.spans(first_op, last_op):
            events += [(tier, kind, start_ns, num_bytes), (tier, kind, end_ns, -num_bytes)]
    return _accumulated(events, picture.step_ns)


def _constant_bytes(program: Program) -> Iterator[tuple[str, str, int, int]]:
    """(tier, kind, 0, bytes) of what exists all the time."""
    total: Counter[tuple[str, str]] = Counter()
    for buffer in program.buffers.values():
        if buffer.alloc_at is None or buffer.free_after is None:
            total[buffer.tier, buffer.kind] += buffer.num_bytes
    return ((tier, kind, 0, num_bytes) for (tier, kind), num_bytes in total.items())


def _lifetimes(program: Program) -> Iterator[tuple[str, str, int, str, str]]:
    """(tier, kind, bytes, first operation, last operation) of what comes and goes."""
    for buffer in program.buffers.values():
        if buffer.alloc_at is not None and buffer.free_after is not None:
            yield buffer.tier, buffer.kind, buffer.num_bytes, buffer.alloc_at, buffer.free_after
    for op in program.ops.values():
        if op.working_bytes:
            yield "gpu", "working", op.working_bytes, op.id, op.id


def _accumulated(events: Sequence[tuple[str, str, int, int]], step_ns: int) -> pd.DataFrame:
    """Running sums of (tier, kind, moment, change in bytes)."""
    import pandas as pd

    table = pd.DataFrame(events, columns=["tier", "kind", "time_ns", "num_bytes"])
    changes = table.pivot_table(
        index="time_ns", columns=["tier", "kind"], values="num_bytes", aggfunc="sum", fill_value=0
    ).reindex(sorted({0, *table.time_ns} - {step_ns}), fill_value=0)
    levels = changes.cumsum().astype("int64")
    levels.loc[step_ns] = levels.iloc[-1]
    levels.index = pd.Index(levels.index / NS_PER_S, name="time_s")
    return levels
