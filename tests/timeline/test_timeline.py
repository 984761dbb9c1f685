"""Exposed and idle time: by hand, and the same for a simulated step as the simulator says."""

from __future__ import annotations

import pytest

from lazysched.lower import lower
from lazysched.schemas import Op, Program
from lazysched.solver import simulate, solve
from lazysched.timeline import Interval, timed_steps
from tests.solver.synthetic import tiny_profile

MB = 1_000_000


def op(op_id: str, engine: str, num_bytes: int = 0) -> Op:
    return Op.model_validate({"id": op_id, "kind": "copy", "engine": engine, "priority": 0, "num_bytes": num_bytes})


OPS = [op("load", "h2d", 5 * MB), op("first", "compute"), op("second", "compute", 9), op("update", "cpu")]
PROGRAM = Program(
    plan_hash="", buffers={}, ops={o.id: o for o in OPS},
    edges=[("load", "second", 0), ("second", "update", 0), ("update", "first", 1)],
)  # fmt: skip


def step(number: int, times: dict[str, tuple[float, float]]) -> list[Interval]:
    return [Interval(name, PROGRAM.ops[name].engine, *when, number) for name, when in times.items()]


BEFORE = step(4, {"load": (0.0, 1.0), "first": (0.0, 1.0), "second": (1.0, 2.0), "update": (2.0, 5.0)})


def test_a_gap_belongs_to_the_engine_of_the_predecessor_that_ends_last() -> None:
    here = step(5, {"load": (5.0, 9.0), "first": (5.0, 7.0), "second": (9.0, 10.0), "update": (10.0, 11.0)})
    timed = timed_steps(PROGRAM, BEFORE + here, in_line=False)
    assert timed is not None
    # 2 to 5 until the update of the step before, 7 to 9 until the upload.
    assert timed.exposed_s == {"cpu": pytest.approx(3.0), "h2d": pytest.approx(2.0)}
    assert timed.idle_s == pytest.approx(5.0)
    assert (timed.steps, timed.moved_bytes) == ((5,), {"h2d": 5 * MB})


def test_waiting_to_be_launched_is_idle_and_exposed_to_nobody() -> None:
    here = step(5, {"load": (5.0, 7.5), "first": (5.0, 7.0), "second": (9.0, 10.0), "update": (10.0, 11.0)})
    timed = timed_steps(PROGRAM, BEFORE + here, in_line=False)
    assert timed is not None
    assert timed.exposed_s == {"cpu": pytest.approx(3.0), "h2d": pytest.approx(0.5)}
    assert timed.idle_s == pytest.approx(5.0)


def test_an_operation_that_seems_to_start_early_waited_no_longer_than_until_its_start() -> None:
    """Two clocks never agree wholly."""
    here = step(5, {"load": (2.0, 3.0), "first": (4.9, 7.0), "second": (7.0, 8.0), "update": (8.0, 9.0)})
    timed = timed_steps(PROGRAM, BEFORE + here, in_line=False)
    assert timed is not None
    assert timed.exposed_s == {"cpu": pytest.approx(2.9)}


def test_in_line_all_that_is_not_compute_is_exposed() -> None:
    before = step(0, {"load": (0.0, 1.0), "first": (1.0, 2.0), "second": (2.0, 3.0), "update": (3.0, 5.0)})
    here = step(1, {"load": (5.5, 7.0), "first": (7.0, 8.0), "second": (8.0, 9.0), "update": (9.0, 10.0)})
    timed = timed_steps(PROGRAM, before + here, in_line=True)
    assert timed is not None
    assert timed.exposed_s == {"h2d": pytest.approx(1.5), "cpu": pytest.approx(1.0)}
    assert timed.idle_s == pytest.approx(6.0 - 2.0)


FILE_OPS = [
    op("before", "compute"), op("write", "nvme_write", MB), op("read", "nvme_read", MB), op("other", "h2d", MB),
    op("load", "h2d", MB), op("after", "compute"),
]  # fmt: skip
FILES = Program(
    plan_hash="", buffers={}, ops={o.id: o for o in FILE_OPS},
    edges=[("write", "read", 0), ("read", "load", 0), ("load", "after", 0)],
)  # fmt: skip


def exposed(times: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Of a step of ``FILES``; the step before it ended at 0."""
    before = [Interval(o.id, o.engine, -1.0, 0.0, 0) for o in FILE_OPS]
    here = [Interval(name, FILES.ops[name].engine, *when, 1) for name, when in times.items()]
    timed = timed_steps(FILES, before + here, in_line=False)
    assert timed is not None
    assert sum(timed.exposed_s.values()) == pytest.approx(timed.idle_s)
    return {str(engine): seconds for engine, seconds in timed.exposed_s.items()}


class TestFiles:
    """``before`` ends at 1, ``after`` starts when it is loaded."""

    def test_take_of_a_wait_what_they_took_on_the_way_to_its_cause(self) -> None:
        times = {"before": (0, 1), "write": (0, 3), "read": (3, 7), "other": (1, 6), "load": (7, 8), "after": (8, 9)}
        # 1 to 3 the write, 3 to 7 the read, 7 to 8 the upload
        assert exposed(times) == pytest.approx({"nvme_write": 2, "nvme_read": 4, "h2d": 1})

    def test_take_nothing_where_the_link_was_busy_for_longer(self) -> None:
        times = {
            "before": (0, 1),
            "write": (0, 0.5),
            "read": (0.5, 4),
            "other": (1, 5),
            "load": (5, 8),
            "after": (8, 9),
        }
        assert exposed(times) == pytest.approx({"h2d": 7})

    def test_take_nothing_before_the_wait_began(self) -> None:
        times = {"before": (0, 1), "write": (-3, -2), "read": (-2, 2), "other": (0, 1), "load": (2, 3), "after": (3, 4)}
        assert exposed(times) == pytest.approx({"nvme_read": 1, "h2d": 1})

    def test_clocks_that_disagree_give_no_more_than_the_wait(self) -> None:
        times = {
            "before": (0, 1),
            "write": (0, 3.5),
            "read": (3, 8.5),
            "other": (1, 6),
            "load": (7, 8),
            "after": (8, 9),
        }
        assert exposed(times) == pytest.approx({"nvme_write": 2, "nvme_read": 4, "h2d": 1})


def test_steps_without_the_one_before_say_nothing() -> None:
    assert timed_steps(PROGRAM, [], in_line=False) is None
    assert timed_steps(PROGRAM, BEFORE, in_line=False) is None
    apart = [interval._replace(step=6) for interval in BEFORE]
    assert timed_steps(PROGRAM, BEFORE + apart, in_line=False) is None


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_simulated_step_reads_as_the_simulator_says(device: str) -> None:
    profile = tiny_profile(num_blocks=3, link_bytes_per_s=0.2e9, cpu_params_per_s=30e6)
    profile = profile.model_copy(update={"device": device})
    solution = solve(profile, batch_size=1, gpu_memory_bytes=50 * MB, host_memory_bytes=1000 * MB, time_limit_s=5)
    program = lower(solution.plan, profile.stages)
    timeline = simulate(program, profile, micro_batch=1, steps=4)
    last = [interval for interval in timeline.intervals if interval.step >= 2]
    timed = timed_steps(program, last, in_line=device == "cpu")
    assert timed is not None
    assert timed.exposed_s == pytest.approx(timeline.exposed_s)
    assert sum(timed.exposed_s.values()) > 0.01
    assert timed.idle_s == pytest.approx(sum(timeline.exposed_s.values()))
    assert timed.moved_bytes == timeline.moved_bytes
