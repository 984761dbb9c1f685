"""A steady step by hand, and its memory beside what the simulator says."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazysched.errors import UsageError
from lazysched.schemas import Buffer, Op, Profile, Program
from lazysched.solver import memory_frame, simulate_plan, solve, steady_frame
from lazysched.solver.steady_step import program_memory_frame
from lazysched.timeline import Interval
from tests.solver.synthetic import CARD, SHAPE_3B, large_profile, tiny_profile

GB = 10**9


def op(op_id: str, engine: str, working_bytes: int = 0) -> Op:
    fields = {"id": op_id, "kind": "copy", "engine": engine, "priority": 0, "working_bytes": working_bytes}
    return Op.model_validate(fields)


OPS = [op("fetch", "h2d"), op("first", "compute", 5), op("second", "compute"), op("update", "cpu")]
BUFFERS = [
    Buffer(id="gpu/weights/a", tier="gpu", kind="weights", num_bytes=100),
    Buffer(id="gpu/saved/a", tier="gpu", kind="saved", num_bytes=30, alloc_at="first", free_after="second"),
    Buffer(id="host/grads/a", tier="host", kind="grads", num_bytes=7, alloc_at="second", free_after="update"),
    Buffer(id="gpu/fetched/a", tier="gpu", kind="fetched", num_bytes=9, alloc_at="fetch", free_after="first"),
]
PROGRAM = Program(plan_hash="", ops={o.id: o for o in OPS}, edges=[], buffers={buffer.id: buffer for buffer in BUFFERS})
TIMES = {"fetch": (-1.0, 0.0), "first": (0.0, 2.0), "second": (2.0, 3.0), "update": (3.0, 5.0)}
"""A step is 3 s on ``compute``; its fetch is 1 s before, its update goes on for 2 s in the next."""


def steps(count: int) -> list[Interval]:
    return [
        Interval(name, PROGRAM.ops[name].engine, 3.0 * step + start_s, 3.0 * step + end_s, step)
        for step in range(count)
        for name, (start_s, end_s) in TIMES.items()
    ]


def test_neighbouring_steps_reach_into_the_picture() -> None:
    frame = steady_frame(steps(3))
    assert sorted(frame.itertuples(index=False, name=None)) == [
        ("fetch", "h2d", 2.0, 3.0),
        ("first", "compute", 0.0, 2.0),
        ("second", "compute", 2.0, 3.0),
        ("update", "cpu", 0.0, 2.0),
    ]


def test_memory_changes_where_operations_start_and_end() -> None:
    frame = program_memory_frame(PROGRAM, steps(3))
    assert frame.index.tolist() == [0.0, 2.0, 3.0]
    assert frame["gpu", "weights"].tolist() == [100, 100, 100]
    assert frame["gpu", "saved"].tolist() == [30, 30, 30]
    assert frame["gpu", "working"].tolist() == [5, 0, 0]
    # From its fetch, in the step before, until the first operation is done.
    assert frame["gpu", "fetched"].tolist() == [9, 9, 9]
    # From the second operation on, and in the next step until the update is done.
    assert frame["host", "grads"].tolist() == [7, 7, 7]


def test_what_leaves_and_comes_at_one_moment_is_not_counted_twice() -> None:
    """Steps whose times differ in the last bits after sums: 0.1 + 0.2 is not 0.3."""
    intervals = [
        Interval(name, PROGRAM.ops[name].engine, 0.1 * (3 * step + start_s), 0.1 * (3 * step + end_s), step)
        for step in range(8)
        for name, (start_s, end_s) in TIMES.items()
    ]
    frame = program_memory_frame(PROGRAM, intervals)
    assert frame.sum(axis=1).max() == 100 + 30 + 5 + 9 + 7
    assert frame["gpu", "saved"].max() == 30


def test_one_step_is_too_few() -> None:
    with pytest.raises(UsageError, match="intervals: no two steps in a row"):
        steady_frame(steps(1))
    apart = [interval for interval in steps(3) if interval.step != 1]
    with pytest.raises(UsageError, match="intervals: no two steps in a row"):
        program_memory_frame(PROGRAM, apart)


def check_peaks(profile: Profile, batch_size: int, gpu_memory_bytes: int, host_memory_bytes: int) -> None:
    """The simulator walks the order of operations, the frame their times: peaks are the same."""
    solution = solve(
        profile, batch_size=batch_size, gpu_memory_bytes=gpu_memory_bytes, host_memory_bytes=host_memory_bytes,
        time_limit_s=3,
    )  # fmt: skip
    frame = memory_frame(solution.plan, solution.timeline)
    for tier in frame.columns.unique("tier"):
        assert int(frame[tier].to_numpy().sum(axis=1).max()) == solution.timeline.peak_bytes[tier]
    compute = steady_frame(solution.timeline.intervals).query("engine == 'compute'")
    assert frame.index[-1] == pytest.approx(solution.timeline.step_s)
    busy_s = (compute.end_s - compute.start_s).sum()
    assert busy_s == pytest.approx(solution.timeline.step_s - sum(solution.timeline.exposed_s.values()))


@pytest.mark.parametrize("gpu_memory_bytes", [20 * GB, 60 * GB])
def test_peaks_are_those_of_the_simulator(gpu_memory_bytes: int) -> None:
    check_peaks(large_profile(SHAPE_3B, CARD, 12, (4, 8)), 32, gpu_memory_bytes, 128 * GB)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_blocks=st.integers(2, 5),
    rows=st.sampled_from([1, 2, 3]),
    link_bytes_per_s=st.sampled_from([0.2e9, 1e9, 8e9]),
    gpu_mb=st.integers(60, 400),
    tied=st.booleans(),
)
def test_peaks_are_those_of_the_simulator_on_small_machines(
    num_blocks: int, rows: int, link_bytes_per_s: float, gpu_mb: int, tied: bool
) -> None:
    profile = tiny_profile(num_blocks, link_bytes_per_s=link_bytes_per_s, tied=tied)
    check_peaks(profile, rows, gpu_mb * 1_000_000, GB)


def test_what_no_program_holds_is_named() -> None:
    profile = tiny_profile().model_copy(update={"context_bytes": 1000, "fragmentation_bytes": {1: 13}})
    plan = solve(profile, batch_size=1, gpu_memory_bytes=GB, host_memory_bytes=GB, time_limit_s=3).plan
    frame = memory_frame(plan, simulate_plan(plan))
    assert (frame["gpu", "context"] == 1000).all()
    assert (frame["gpu", "fragmentation"] == 13).all()
    with pytest.raises(UsageError, match="plan: profile: null"):
        memory_frame(plan.model_copy(update={"profile": None}), simulate_plan(plan))
