"""The same on a GPU: the product's own engines, one of which lags, on buffers poisoned in the order of the streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazysched.lower import lower
from lazysched.runtime.batch import Batch
from lazysched.runtime.model import Model
from lazysched.runtime.operations import StepContext
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Op, Plan, Program, SaveVariant, StagePlan
from tests.lowering.plans import plans
from tests.runtime.race_plans import KINDS, Case, Edge, Kind, examples_of, fixed_plans
from tests.runtime.racing import Around, Disturbed, Late, racing_executor, without
from tests.runtime.tiny import llama, uneven_batch, variants_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*determinis.*:UserWarning"),
    pytest.mark.timeout(900),
]
DEVICE = torch.device("cuda")
SEQ_LEN, MICRO_BATCH, CHUNK_TOKENS, VOCABULARY, FP32_ELEMENTS = 128, 2, 64, 1024, 4096
STEPS, LEARNING_RATE = 4, 1e-3
LATE_STEP = 2
"""Kernels are built in the steps before."""
LATE_S = {0: 0.2, 1: 0.6}
"""By step distance: the host launches the rest of a step, or the next one too, in less time."""
CYCLES_PER_S = 2e9
"""Of a GPU's clock, roughly: a kernel that counts them keeps a stream busy."""
IMPLIED_BY_LAUNCHES: Kind = ("d2h: scale copy", "compute: scale", 1)
"""Launching waits until uploads were issued, behind a host update wherever this copy is read, before the next scale."""
Outcome = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Attention's backward adds in any order unless told not to; fresh memory is filled with NaN too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def config(tied: bool) -> Any:
    return llama(
        tied, hidden_size=128, intermediate_size=256, vocab_size=VOCABULARY, max_position_embeddings=SEQ_LEN,
        initializer_range=0.03,
    )  # fmt: skip


@cache
def model_and_variants(tied: bool) -> tuple[Model, dict[str, SaveVariant]]:
    model = Model(config(tied), "bfloat16", DEVICE, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN)
    return model, variants_of(model, MICRO_BATCH, SEQ_LEN)


def keep_busy(op: Op, seconds: float) -> None:
    """Keep the worker, or the current stream, busy."""
    if op.engine == "cpu":
        time.sleep(seconds)
    elif seconds:
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))


def data(plan: Plan) -> list[Batch]:
    return [uneven_batch(plan.batch_size, SEQ_LEN, VOCABULARY, seed) for seed in range(STEPS)]


def warm_pinned_memory(batches: list[Batch], num_tensors: int) -> None:
    """Let torch keep page-locked memory for all steps: taking it from the system may wait for the device."""
    contexts = [StepContext.of(batch, 0.0, num_tensors, training=True, pinned=True) for batch in batches]
    del contexts


def outcome(case: Case, around: Around | None = None, missing: Edge | None = None, seed: int | None = None) -> Outcome:
    """Losses, norms and weights after steps launched at once, with ``around`` or seeded delays, without one edge."""
    plan, tied, clip_norm = case
    with Session(
        plan, config(tied), DEVICE, settings=AdamWSettings(weight_decay=0.1), max_grad_norm=clip_norm,
        host_limit_bytes=10**9,
    ) as session:  # fmt: skip
        session.initialise(seed=1)
        batches = data(plan)
        warm_pinned_memory(batches, len(session.weight_names()))
        executor = session.executor
        if around is not None or seed is not None:
            program = session.program if missing is None else without(session.program, missing)
            chosen = around or Disturbed(session, seed or 0, keep_busy)
            executor = racing_executor(session, program, None, chosen)
        try:
            results = [executor.step(batch, LEARNING_RATE) for batch in batches]
            executor.drain()
        finally:
            executor.close()
        numbers = [(result.loss, result.grad_norm) for result in results]
        return numbers, {name: session.weight(name).clone() for name, _ in session.weight_names()}


def equal(found: Outcome, expected: Outcome) -> bool:
    return found[0] == expected[0] and all(torch.equal(found[1][name], value) for name, value in expected[1].items())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tied, accumulation = draw(st.booleans()), draw(st.sampled_from([1, 2]))
    model, variants = model_and_variants(tied)
    plan = draw(
        plans(
            model.stages, variants, micro_batch=MICRO_BATCH, accumulation=accumulation, seq_len=SEQ_LEN,
            compute_dtype="bfloat16", clip_norm=0.5, loss_chunk_tokens=CHUNK_TOKENS, formats=("hybrid8",),
            fp32_state_elements=FP32_ELEMENTS,
        )
    )  # fmt: skip
    return plan.model_copy(update={"model_id": model.model_id}), tied, 0.5


@cache
def resident(tied: bool, accumulation: int) -> Outcome:
    """Everything on the GPU, nothing delayed; format ``hybrid8`` gives the same bits on either processor."""
    model, variants = model_and_variants(tied)
    end = StagePlan(weights="gpu", state="gpu", state_format="hybrid8")
    block = end.model_copy(update={"saved_tiers": {"intermediates": "gpu"}})
    plan = Plan(
        model_id=model.model_id, hardware_id="any", compute_dtype="bfloat16", batch_size=MICRO_BATCH * accumulation,
        seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, accumulation=accumulation, loss_chunk_tokens=CHUNK_TOKENS,
        stages={s.id: block if s.is_block else end for s in model.stages}, variants=variants, budget_bytes={},
        fp32_state_elements=FP32_ELEMENTS,
    )  # fmt: skip
    return outcome((plan, tied, 0.5))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.integers(0, 2**32))
def test_random_plans_with_random_delays(case: Case, seed: int) -> None:
    assert equal(outcome(case, seed=seed), resident(case[1], case[0].accumulation))


@cache
def fixed_cases() -> list[Case]:
    return list(
        fixed_plans(
            model_and_variants, "bfloat16", micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, chunk_tokens=CHUNK_TOKENS,
            fp32_elements=FP32_ELEMENTS,
        )
    )  # fmt: skip


def lowered(case: Case) -> Program:
    return lower(case[0], model_and_variants(case[1])[0].stages)


@cache
def examples() -> dict[Kind, tuple[int, Edge]]:
    return examples_of([lowered(case) for case in fixed_cases()], one_launcher=True)


@cache
def expected(index: int) -> Outcome:
    return outcome(fixed_cases()[index])


@pytest.mark.parametrize("kind", [k for k in KINDS if k != IMPLIED_BY_LAUNCHES], ids=lambda k: " -> ".join(map(str, k)))
def test_only_the_edge_makes_the_result_right_when_its_first_operation_is_late(kind: Kind) -> None:
    index, edge = examples()[kind]
    case = fixed_cases()[index]

    def late() -> Around:
        return Late(edge, LATE_STEP, LATE_S[edge[2]], keep_busy)

    assert equal(outcome(case, late()), expected(index))
    try:
        wrong = not equal(outcome(case, late(), missing=edge), expected(index))
    except RuntimeError as error:
        wrong = "modified by an inplace operation" in str(error)  # autograd, of the embedding, noticed it first
    assert wrong
