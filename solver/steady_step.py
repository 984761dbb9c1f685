"""One steady step of a timeline: what repeats every ``step_s`` seconds, and the memory that is in use meanwhile.

The picture begins when ``compute`` is done with the step before. What a step does before or after that lies in its
neighbours' pictures, and theirs in this one, so that all operations of one step are seen exactly once: those that
cross an end go on at the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from lazysched.errors import UsageError
from lazysched.layout import mapping_bytes
from lazysched.lower import lower
from lazysched.schemas import Plan, Profile, Program
from lazysched.solver.simulate import Timeline
from lazysched.timeline import Interval, compute_end_s, intervals_by_step

NS_PER_S = 10**9
"""Moments are rounded to nanoseconds: the same one, reckoned from two steps, differs in its last bits."""


class _Lifetime(NamedTuple):
    """Bytes that exist for a while, once a step; moments in nanoseconds since the picture's begin."""

    tier: str
    kind: str
    num_bytes: int
    start_ns: int
    end_ns: int


def steady_frame(intervals: Iterable[Interval]) -> pd.DataFrame:
    """One row per operation of a steady step, two for one that crosses its end: ``op engine start_s end_s``.

    Seconds count from 0 to the step's time; rows are sorted by their start.

    Args:
        intervals: every operation of at least two consecutive steps; the last one is shown.

    Raises:
        UsageError: there are fewer than two steps.
    """
    last, begin_s, step_ns = _last_step(intervals)
    rows = [
        (interval.op, interval.engine, start_ns / NS_PER_S, end_ns / NS_PER_S)
        for interval in last.values()
        for start_ns, end_ns in _wrapped(*_moments_ns(interval, interval, begin_s), step_ns)
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
    constant = pd.DataFrame(
        {("gpu", kind): num_bytes for kind, num_bytes in outside.items() if num_bytes}, index=frame.index
    )
    return pd.concat([frame, constant], axis=1).sort_index(axis=1) if len(constant.columns) else frame


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
    last, begin_s, step_ns = _last_step(intervals)
    constant: Counter[tuple[str, str]] = Counter()
    for buffer in program.buffers.values():
        if buffer.alloc_at is None or buffer.free_after is None:
            constant[buffer.tier, buffer.kind] += buffer.num_bytes
    events: list[tuple[str, str, int, int]] = [(*key, 0, num_bytes) for key, num_bytes in constant.items()]
    for lifetime in _lifetimes(program, last, begin_s):
        for start_ns, end_ns in _wrapped(lifetime.start_ns, lifetime.end_ns, step_ns):
            events.append((lifetime.tier, lifetime.kind, start_ns, lifetime.num_bytes))
            events.append((lifetime.tier, lifetime.kind, end_ns, -lifetime.num_bytes))
    return _accumulated(events, step_ns)


def _lifetimes(program: Program, last: dict[str, Interval], begin_s: float) -> Iterator[_Lifetime]:
    for buffer in program.buffers.values():
        if buffer.alloc_at is not None and buffer.free_after is not None:
            moments_ns = _moments_ns(last[buffer.alloc_at], last[buffer.free_after], begin_s)
            yield _Lifetime(buffer.tier, buffer.kind, buffer.num_bytes, *moments_ns)
    for op in program.ops.values():
        if op.working_bytes:
            yield _Lifetime("gpu", "working", op.working_bytes, *_moments_ns(last[op.id], last[op.id], begin_s))


def _last_step(intervals: Iterable[Interval]) -> tuple[dict[str, Interval], float, int]:
    """Intervals of the last step by operation, when ``compute`` was done with the one before, and the step's time."""
    by_step = intervals_by_step(intervals)
    number = max(by_step, default=0)
    if number - 1 not in by_step:
        raise UsageError(f"intervals: {len(by_step)} steps are too few to see a steady one; time two in a row")
    begin_s = compute_end_s(by_step[number - 1])
    return by_step[number], begin_s, round(NS_PER_S * (compute_end_s(by_step[number]) - begin_s))


def _moments_ns(first: Interval, last: Interval, begin_s: float) -> tuple[int, int]:
    """From the start of one interval to the end of another."""
    return round(NS_PER_S * (first.start_s - begin_s)), round(NS_PER_S * (last.end_s - begin_s))


def _wrapped(start_ns: int, end_ns: int, step_ns: int) -> Iterator[tuple[int, int]]:
    """The parts of a span that, repeated every ``step_ns``, lie within one step; spans of no length have none."""
    if step_ns <= 0:
        return
    for shift in range(start_ns // step_ns, -(-end_ns // step_ns)):
        part = max(0, start_ns - shift * step_ns), min(step_ns, end_ns - shift * step_ns)
        if part[0] < part[1]:
            yield part


def _accumulated(events: Sequence[tuple[str, str, int, int]], step_ns: int) -> pd.DataFrame:
    """Running sums of (tier, kind, moment, change in bytes)."""
    table = pd.DataFrame(events, columns=["tier", "kind", "time_ns", "num_bytes"])
    changes = table.pivot_table(
        index="time_ns", columns=["tier", "kind"], values="num_bytes", aggfunc="sum", fill_value=0
    ).reindex(sorted({0, *table.time_ns} - {step_ns}), fill_value=0)
    levels = changes.cumsum().astype("int64")
    levels.loc[step_ns] = levels.iloc[-1]
    levels.index = pd.Index(levels.index / NS_PER_S, name="time_s")
    return levels
