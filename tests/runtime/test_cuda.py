"""The same on a GPU in bf16: placement does not change a bit; shapes make transfers slow enough to race."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazysched.lower import lower
from lazysched.runtime.arena import HostArena
from lazysched.runtime.model import Model
from lazysched.runtime.recorder import Recorder
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Plan, SaveVariant, StagePlan, StateFormat
from lazysched.timeline import intervals_by_step, timed_steps
from tests.lowering.plans import plans
from tests.runtime.tiny import llama, uneven_batch, variants_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*determinis.*:UserWarning"),
]
SEQ_LEN, MICRO_BATCH, CHUNK_TOKENS, VOCABULARY, STEPS = 512, 4, 256, 8192, 3
LEARNING_RATE = 1e-3
CLOCKS_AGREE_S = 2e-4
"""Host and GPU clock meet at one event, which the host sees some microseconds late, and drift apart from there."""
Outcome = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Attention's backward adds in any order unless told not to."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def config(tied: bool) -> Any:
    return llama(
        tied, hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=4,
        num_hidden_layers=5, vocab_size=VOCABULARY, max_position_embeddings=SEQ_LEN, initializer_range=0.03,
    )  # fmt: skip


@cache
def model_and_variants(tied: bool) -> tuple[Model, dict[str, SaveVariant]]:
    model = Model(config(tied), "bfloat16", torch.device("cuda"), micro_batch=MICRO_BATCH, seq_len=SEQ_LEN)
    return model, variants_of(model, MICRO_BATCH, SEQ_LEN)


def outcome(plan: Plan, tied: bool, recorder: Recorder | None = None) -> Outcome:
    device = torch.device("cuda")
    with Session(
        plan, config(tied), device, settings=AdamWSettings(weight_decay=0.1), max_grad_norm=0.5, host_limit_bytes=10**10
    ) as session:
        session.initialise(seed=1)
        batches = [uneven_batch(plan.batch_size, SEQ_LEN, VOCABULARY, seed) for seed in range(STEPS)]
        results = [
            session.executor.step(batch, LEARNING_RATE, recorder.of(step) if recorder else None)
            for step, batch in enumerate(batches)
        ]
        session.executor.drain()
        numbers = [(result.loss, result.grad_norm) for result in results]
        return numbers, {name: session.weight(name).clone() for name, _ in session.weight_names()}


def with_state(plan: Plan, tier: str) -> Plan:
    weights = {"weights": "gpu"} if tier == "gpu" else {}
    stages = {key: choice.model_copy(update={"state": tier} | weights) for key, choice in plan.stages.items()}
    return plan.model_copy(update={"stages": stages})


@st.composite
def cases(draw: st.DrawFn, *formats: StateFormat) -> tuple[Plan, bool]:
    tied, accumulation = draw(st.booleans()), draw(st.sampled_from([1, 3]))
    model, variants = model_and_variants(tied)
    plan = draw(
        plans(
            model.stages, variants, micro_batch=MICRO_BATCH, accumulation=accumulation, seq_len=SEQ_LEN,
            compute_dtype="bfloat16", clip_norm=0.5, loss_chunk_tokens=CHUNK_TOKENS,
            formats=formats, fp32_state_elements=4096,
        )
    )  # fmt: skip
    return plan.model_copy(update={"model_id": model.model_id}), tied


@cache
def resident(tied: bool, accumulation: int, tier: str, state_format: StateFormat) -> Outcome:
    """Everything on the GPU and kept, the optimizer state in ``tier``."""
    model, variants = model_and_variants(tied)
    end = StagePlan(weights="gpu", state=tier, state_format=state_format)  # type: ignore[arg-type]
    block = end.model_copy(update={"saved_tiers": {"intermediates": "gpu"}})
    plan = Plan(
        model_id=model.model_id, hardware_id="any", compute_dtype="bfloat16", batch_size=MICRO_BATCH * accumulation,
        seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, accumulation=accumulation, loss_chunk_tokens=CHUNK_TOKENS,
        stages={s.id: block if s.is_block else end for s in model.stages}, variants=variants, budget_bytes={},
    )  # fmt: skip
    return outcome(plan, tied)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("fp32"), st.sampled_from(["host", "gpu"]))
def test_placement_does_not_change_a_bit(case: tuple[Plan, bool], tier: str) -> None:
    plan, tied = case
    assert_equal(outcome(with_state(plan, tier), tied), resident(tied, plan.accumulation, tier, "fp32"))


def assert_equal(found: Outcome, expected: Outcome) -> None:
    assert found[0] == expected[0]
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("fp32", "hybrid8"))
def test_host_memory_that_is_not_page_locked_does_not_change_a_bit(case: tuple[Plan, bool]) -> None:
    pinned, pageable = (case[0].model_copy(update={"host_memory": kind}) for kind in ("pinned", "pageable"))
    assert_equal(outcome(pageable, case[1]), outcome(pinned, case[1]))


def streamed() -> Plan:
    """Everything on the host, every block recomputed."""
    model, variants = model_and_variants(tied=True)
    end = StagePlan(weights="host", state="host")
    return Plan(
        model_id=model.model_id, hardware_id="any", compute_dtype="bfloat16", batch_size=MICRO_BATCH,
        seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, accumulation=1, loss_chunk_tokens=CHUNK_TOKENS,
        stages={s.id: end.model_copy(update={"save": "input"} if s.is_block else {}) for s in model.stages},
        variants=variants, budget_bytes={},
    )  # fmt: skip


def test_a_plan_without_page_locking_locks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch, too, is asked for no page-locked memory."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", None)
    monkeypatch.setattr(HostArena, "_lock", lambda arena, names: locked.extend(names))
    locked: list[str] = []
    plan = streamed().model_copy(update={"host_memory": "pageable"})
    outcome(plan, tied=True)
    assert locked == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("hybrid8"))
def test_mixed_processors_do_not_change_a_bit_with_8bit_state(case: tuple[Plan, bool]) -> None:
    """The update does the same operations on both, with coefficients that were made once."""
    plan, tied = case
    found = outcome(plan, tied)
    for tier in ("host", "gpu"):
        assert_equal(found, resident(tied, plan.accumulation, tier, "hybrid8"))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("fp32"))
def test_mixed_processors_stay_within_their_rounding(case: tuple[Plan, bool]) -> None:
    """CPU and GPU kernels of AdamW round differently; each update moves a weight by about the learning rate.

    The first step starts from equal weights, so masters differ there by rounding alone. A gradient near zero may then
    turn either way, which bounds the difference of a weight after ``STEPS`` steps by twice what Adam can move it.
    """
    plan, tied = case
    numbers, weights = outcome(plan, tied)
    expected_numbers, expected = resident(tied, plan.accumulation, "host", "fp32")
    assert numbers[0] == expected_numbers[0]
    for name, value in expected.items():
        half_ulp = value.float().abs() * 2.0**-8
        limit = 2 * STEPS * LEARNING_RATE * 1.1 + half_ulp
        assert ((weights[name].float() - value.float()).abs() <= limit).all(), name
        moved = (weights[name].float() - value.float()).norm() / value.float().norm()
        assert moved <= 2.0**-8, name


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("fp32", "hybrid8"))
def test_timed_steps_show_every_operation_in_order_and_change_nothing(case: tuple[Plan, bool]) -> None:
    plan, tied = case
    recorder = Recorder([1, 2], torch.device("cuda"))
    assert_equal(outcome(plan, tied, recorder), outcome(plan, tied))
    program, intervals = lower(plan, model_and_variants(tied)[0].stages), recorder.intervals()
    expected = [(op.id, op.engine, step) for step in (1, 2) for op in program.ops.values()]
    assert [(interval.op, interval.engine, interval.step) for interval in intervals] == expected
    for engine in {interval.engine for interval in intervals}:
        rows = [interval for interval in intervals if interval.engine == engine]
        assert all(interval.duration_s >= 0 for interval in rows)
        assert all(before.end_s <= after.start_s for before, after in pairwise(rows)), engine
    by_step = intervals_by_step(intervals)
    for step, here in by_step.items():
        for op, interval in here.items():
            for name, distance in program.predecessors[op]:
                if step - distance in by_step:
                    before = by_step[step - distance][name]
                    one_clock = (before.engine == "cpu") == (interval.engine == "cpu")
                    assert before.end_s <= interval.start_s + (0.0 if one_clock else CLOCKS_AGREE_S), (name, op)
    timed = timed_steps(program, intervals, in_line=False)
    assert timed is not None
    assert 0 <= sum(timed.exposed_s.values()) <= timed.idle_s + 1e-9


def test_a_step_that_is_not_timed_makes_no_timed_event_but_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    real = torch.cuda.Event

    class CountedEvent(real):  # type: ignore[valid-type, misc]
        def __new__(cls, enable_timing: bool = False) -> Any:
            made.append(enable_timing)
            return real.__new__(cls, enable_timing=enable_timing)

    plan = streamed()
    monkeypatch.setattr(torch.cuda, "Event", CountedEvent)
    outcome(plan, tied=True, recorder=Recorder([], torch.device("cuda")))
    assert sum(made) == STEPS
