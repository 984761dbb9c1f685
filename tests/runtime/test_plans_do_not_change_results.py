"""Whatever a plan places where: losses, norms, gradients and weights are those of the reference, to the bit."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lazysched.runtime.batch import Batch
from lazysched.runtime.model import Model
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Dtype, Plan, SaveVariant, StateFormat
from tests.lowering.plans import plans
from tests.runtime.reference import Hybrid8Loop, ReferenceLoop
from tests.runtime.tiny import CPU, SEQ_LEN, llama, packed_batch, packing, uneven_batch, variants_of

MICRO_BATCH, CHUNK_TOKENS, STEPS, DECAY, SEED = 2, 12, 3, 0.1, 5
LEARNING_RATES = [1e-2, 5e-3, 1e-3]
FP32_ELEMENTS = 1000
"""Between the sizes of the tiny models' matrices, 512 and 1024: some have 8-bit state, some have not."""


def reference_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def batches(accumulation: int, vocabulary: int, packed: bool) -> list[Batch]:
    rows = MICRO_BATCH * accumulation
    if packed:
        return [packed_batch(rows, SEQ_LEN, vocabulary, seed) for seed in range(STEPS)]
    return [uneven_batch(rows, SEQ_LEN, vocabulary, seed, masked_rows=seed % 2) for seed in range(STEPS)]


@cache
def expected(
    tied: bool, accumulation: int, clip_norm: float | None, state_format: StateFormat, packed: bool
) -> tuple[list[tuple[float, float]], dict, dict]:
    config = llama(tied)
    model = reference_model(config)
    common = {
        "micro_batch": MICRO_BATCH, "chunk_tokens": CHUNK_TOKENS, "max_grad_norm": clip_norm, "weight_decay": DECAY,
    }  # fmt: skip
    loop = (
        ReferenceLoop(model, **common)
        if state_format == "fp32"
        else Hybrid8Loop(model, **common, fp32_elements=FP32_ELEMENTS, seed=SEED)
    )
    data = batches(accumulation, config.vocab_size, packed)
    numbers = [loop.step(batch, rate) for batch, rate in zip(data, LEARNING_RATES, strict=True)]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    loop.gradients(data[0])
    return numbers, weights, {name: p.grad.clone() for name, p in model.named_parameters()}


@cache
def tiny_model(tied: bool, dtype: Dtype = "float32", packed: bool = False) -> tuple[Model, dict[str, SaveVariant]]:
    model = Model(llama(tied), dtype, CPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, packing=packed)
    return model, variants_of(model, MICRO_BATCH, SEQ_LEN)


@st.composite
def cases(
    draw: st.DrawFn, *formats: StateFormat, compute_dtype: Dtype = "float32", packed: bool = False
) -> tuple[Plan, bool, float | None]:
    tied, accumulation = draw(st.booleans()), draw(st.sampled_from([1, 4]))
    clip_norm = draw(st.sampled_from([0.5, 100.0, None]))
    model, variants = tiny_model(tied, compute_dtype, packed)
    plan = draw(
        plans(
            model.stages, variants, micro_batch=MICRO_BATCH, accumulation=accumulation, seq_len=SEQ_LEN,
            compute_dtype=compute_dtype, clip_norm=clip_norm, loss_chunk_tokens=CHUNK_TOKENS, formats=formats,
            fp32_state_elements=FP32_ELEMENTS,
        )
    )  # fmt: skip
    plan = plan.model_copy(update={"model_id": model.model_id})
    return packing(plan, model) if packed else plan, tied, clip_norm


def open_session(plan: Plan, config: PretrainedConfig, clip_norm: float | None) -> Session:
    optimizer = AdamWSettings(weight_decay=DECAY, seed=SEED)
    session = Session(plan, config, CPU, settings=optimizer, max_grad_norm=clip_norm, host_limit_bytes=10**9)
    source = dict(reference_model(config).named_parameters())
    session.load(lambda name, target: target.copy_(source[name].detach()))
    return session


def check(plan: Plan, tied: bool, clip_norm: float | None, state_format: StateFormat) -> None:
    numbers, weights, grads = expected(tied, plan.accumulation, clip_norm, state_format, plan.packing)
    config = llama(tied)
    data = batches(plan.accumulation, config.vocab_size, plan.packing)
    with open_session(plan, config, clip_norm) as session:
        for batch, rate, (loss, norm) in zip(data, LEARNING_RATES, numbers, strict=True):
            result = session.executor.step(batch, rate)
            assert (result.loss, result.grad_norm) == (loss, norm)
        session.executor.drain()
        for name, value in weights.items():
            assert torch.equal(session.weight(name), value), name
        session.executor.step(data[0], 0.0)
        for stage in session.model.stages:
            for name, view in session.gradients(stage).items():
                assert torch.equal(view, grads[name]), name


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("fp32"))
def test_random_plans(case: tuple[Plan, bool, float | None]) -> None:
    check(*case, "fp32")


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("fp32"))
def test_many_random_plans(case: tuple[Plan, bool, float | None]) -> None:
    check(*case, "fp32")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("fp32", packed=True))
def test_random_plans_with_packed_rows(case: tuple[Plan, bool, float | None]) -> None:
    """The reference gives transformers' own forward the positions."""
    check(*case, "fp32")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("hybrid8"))
def test_random_plans_with_8bit_state(case: tuple[Plan, bool, float | None]) -> None:
    check(*case, "hybrid8")


def on_one_tier(plan: Plan, tier: str) -> Plan:
    """The same formats with every stage's optimizer state in ``tier``, weights and saved tensors on the GPU."""
    stages = {
        stage: choice.model_copy(
            update={
                "state": tier, "weights": "gpu", "input_tier": "gpu",
                "saved_tiers": dict.fromkeys(choice.saved_tiers, "gpu"),
            }
        )
        for stage, choice in plan.stages.items()
    }  # fmt: skip
    return plan.model_copy(update={"stages": stages})


def outcome(plan: Plan, tied: bool, clip_norm: float | None) -> list[object]:
    """Losses, norms, and every byte of weights and optimizer state, by stage."""
    config = llama(tied)
    with open_session(plan, config, clip_norm) as session:
        results = [
            session.executor.step(batch, rate)
            for batch, rate in zip(
                batches(plan.accumulation, config.vocab_size, plan.packing), LEARNING_RATES, strict=True
            )
        ]
        session.executor.drain()
        kept: list[object] = [(result.loss, result.grad_norm) for result in results]
        for stage, choice in plan.stages.items():
            flats = (session.buffers[f"{choice.state}/{kind}/{stage}"] for kind in ("weights", "state"))
            kept += [flat.view(torch.uint8).numpy().tobytes() for flat in flats]
        return kept


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("hybrid8", "fp32", compute_dtype="bfloat16"))
def test_tiers_give_the_same_weights_and_states(case: tuple[Plan, bool, float | None]) -> None:
    """bf16 weights with 24-bit masters, loaded from fp32: a mixed plan against all on the GPU and all on the host."""
    plan, tied, clip_norm = case
    mixed = outcome(plan, tied, clip_norm)
    for tier in ("gpu", "host"):
        assert outcome(on_one_tier(plan, tier), tied, clip_norm) == mixed
