"""Timed steps: every operation once, on its engine, in order; nothing else about the run changes."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazysched.runtime import recorder as recorder_module
from lazysched.runtime.loop import History, TrainingLoop
from lazysched.runtime.recorder import Recorder, make_recording
from lazysched.runtime.schedule import LearningRateSchedule
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Op, Plan, Program
from lazysched.timeline import Interval, both_ways, intervals_by_step
from tests.lowering.plans import plans
from tests.runtime.test_plans_do_not_change_results import CHUNK_TOKENS, MICRO_BATCH, tiny_model
from tests.runtime.tiny import CPU, SEQ_LEN, llama, uneven_batch

NUM_STEPS = 4


@st.composite
def cases(draw: st.DrawFn) -> Plan:
    model, variants = tiny_model(tied=True)
    plan = draw(
        plans(
            model.stages, variants, micro_batch=MICRO_BATCH, accumulation=draw(st.sampled_from([1, 2])),
            seq_len=SEQ_LEN, loss_chunk_tokens=CHUNK_TOKENS, clip_norm=draw(st.sampled_from([1.0, None])),
        )
    )  # fmt: skip
    return plan.model_copy(update={"model_id": model.model_id})


def trained(plan: Plan, recorder: Recorder | None) -> tuple[Program, History, list[bytes]]:
    """The program, what its steps reported, and all weights."""
    with Session(
        plan, llama(tied=True), CPU, settings=AdamWSettings(), max_grad_norm=plan.update.clip_norm,
        host_limit_bytes=10**9,
    ) as session:  # fmt: skip
        session.initialise(seed=3)
        schedule = LearningRateSchedule(1e-2, "constant", NUM_STEPS, 0.0)
        batches = [uneven_batch(plan.batch_size, SEQ_LEN, 97, seed) for seed in range(NUM_STEPS)]
        rows: list[Any] = []
        history = TrainingLoop(session.executor, batches.__getitem__, schedule, rows.append, recorder).run()
        weights = [session.weight(name).numpy().tobytes() for name, _ in session.weight_names()]
        return session.program, history, weights


def check_order(program: Program, intervals: list[Interval]) -> None:
    """Engines do one thing at a time, and nothing starts before all of its predecessors have ended."""
    by_step = intervals_by_step(intervals)
    for engine in {interval.engine for interval in intervals}:
        rows = [interval for interval in intervals if interval.engine == engine]
        assert all(before.end_s <= after.start_s for before, after in pairwise(rows))
    for step, here in by_step.items():
        for op, interval in here.items():
            assert interval.start_s <= interval.end_s
            for before, distance in program.predecessors[op]:
                if step - distance in by_step:
                    assert by_step[step - distance][before].end_s <= interval.start_s, (before, op)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_every_operation_of_the_chosen_steps_once_on_its_engine_in_order(plan: Plan) -> None:
    recorder = Recorder([1, 2], CPU)
    program, _, _ = trained(plan, recorder)
    intervals = recorder.intervals()
    expected = [(op.id, op.engine, step) for step in (1, 2) for op in program.ops.values()]
    assert [(interval.op, interval.engine, interval.step) for interval in intervals] == expected
    check_order(program, intervals)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_timing_changes_no_result(plan: Plan) -> None:
    _, plain, weights = trained(plan, None)
    _, timed, timed_weights = trained(plan, Recorder(range(NUM_STEPS), CPU))
    assert [(row.loss, row.grad_norm) for row in plain.rows] == [(row.loss, row.grad_norm) for row in timed.rows]
    assert weights == timed_weights


def test_nothing_is_done_for_a_step_that_is_not_chosen() -> None:
    assert Recorder([1], CPU).of(0) is None
    assert Recorder([], torch.device("cuda")).of(0) is None  # would need a GPU


class FakeEvent:
    """An event of a GPU whose clock stands at ``now_ms``."""

    now_ms = 5000.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at_ms = -1.0

    def record(self, stream: object = None) -> None:
        self.at_ms = FakeEvent.now_ms

    def synchronize(self) -> None:
        assert self.at_ms >= 0

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at_ms - self.at_ms


def test_clocks_of_gpu_and_host_come_onto_one_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(FakeEvent, "now_ms", 5000.0)
    host_s = 70.0
    monkeypatch.setattr(time, "perf_counter", lambda: host_s)
    recorder = Recorder([6], torch.device("cuda"))
    timed = recorder.of(6)
    assert timed is not None

    def launched() -> None:
        """Takes the GPU a quarter of a second, the host nothing."""
        FakeEvent.now_ms += 250.0

    def updated() -> None:
        nonlocal host_s
        host_s += 0.5

    ops = [("gpu", "compute", launched), ("cpu", "cpu", updated), ("up", "h2d", launched)]
    for priority, (name, engine, work) in enumerate(ops):
        op = Op.model_validate({"id": name, "kind": "update", "engine": engine, "priority": priority})
        timed(op, work)()
    found = [(interval.op, interval.start_s, interval.end_s) for interval in recorder.intervals()]
    assert found == [("gpu", 70.0, 70.25), ("cpu", 70.0, 70.5), ("up", 70.25, 70.5)]


def test_the_anchor_is_the_try_that_the_host_saw_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host readings around five tries; the second took 2 s, less than the others."""
    readings = iter([0.0, 9.0, 10.0, 12.0, 20.0, 23.0, 30.0, 34.0, 40.0, 45.0])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    assert recorder_module._anchor()[1] == 12.0


def test_a_recording_has_the_median_of_each_cost_and_size() -> None:
    model, variants = tiny_model(tied=True)
    plan = plan_of_all_on_host(model, variants)
    with Session(
        plan, llama(tied=True), CPU, settings=AdamWSettings(), max_grad_norm=1.0, host_limit_bytes=10**9
    ) as session:
        program = session.program
    loads = [op for op in program.ops.values() if op.cost == ("link", "h2d") and op.stage == "block.0"]
    updates = [op for op in program.ops.values() if op.kind == "update" and op.stage.startswith("block.")]
    moments = iter(range(1000))
    intervals = [Interval(op.id, op.engine, 0.0, next(moments) + 1.0, 2) for op in (*loads, *updates)]
    intervals += [Interval("totals", "compute", 0.0, 1.0, 3)]  # costs nothing in a profile
    recording = make_recording(plan, "here", program, intervals)
    (load, update) = recording.durations
    assert (load.cost, load.num_bytes, load.duration.median_s, load.duration.repeats) == (
        ("link", "h2d"), loads[0].num_bytes, 1.5, 2,
    )  # fmt: skip
    assert (update.cost, update.num_params, update.duration.median_s, update.duration.repeats) == (
        ("update", "cpu", "fp32"), updates[0].num_params, 4.0, 3,
    )  # fmt: skip
    assert (recording.steps, recording.hardware_id, recording.micro_batch) == ([2, 3], "here", MICRO_BATCH)
    assert recording.both_ways == both_ways(program) is True


def plan_of_all_on_host(model: Any, variants: Any) -> Plan:
    end = {"weights": "host", "state": "host"}
    return Plan.model_validate(
        {
            "model_id": model.model_id, "hardware_id": "any", "compute_dtype": "float32", "batch_size": MICRO_BATCH,
            "seq_len": SEQ_LEN, "micro_batch": MICRO_BATCH, "accumulation": 1, "loss_chunk_tokens": CHUNK_TOKENS,
            "variants": variants, "budget_bytes": {},
            "stages": {s.id: end | ({"save": "input"} if s.is_block else {}) for s in model.stages},
        }
    )  # fmt: skip
