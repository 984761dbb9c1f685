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
from lazysched.schemas import Plan, SaveVariant
from tests.lowering.plans import plans
from tests.runtime.reference import ReferenceLoop
from tests.runtime.tiny import CPU, SEQ_LEN, llama, uneven_batch, variants_of

MICRO_BATCH, CHUNK_TOKENS, STEPS, DECAY = 2, 12, 3, 0.1
LEARNING_RATES = [1e-2, 5e-3, 1e-3]


def reference_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def batches(accumulation: int, vocabulary: int) -> list[Batch]:
    rows = MICRO_BATCH * accumulation
    return [uneven_batch(rows, SEQ_LEN, vocabulary, seed, masked_rows=seed % 2) for seed in range(STEPS)]


@cache
def expected(tied: bool, accumulation: int, clip_norm: float | None) -> tuple[list[tuple[float, float]], dict, dict]:
    config = llama(tied)
    model = reference_model(config)
    loop = ReferenceLoop(
        model, micro_batch=MICRO_BATCH, chunk_tokens=CHUNK_TOKENS, max_grad_norm=clip_norm, weight_decay=DECAY
    )
    data = batches(accumulation, config.vocab_size)
    numbers = [loop.step(batch, rate) for batch, rate in zip(data, LEARNING_RATES, strict=True)]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    loop.gradients(data[0])
    return numbers, weights, {name: p.grad.clone() for name, p in model.named_parameters()}


@cache
def tiny_model(tied: bool) -> tuple[Model, dict[str, SaveVariant]]:
    model = Model(llama(tied), "float32", CPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN)
    return model, variants_of(model, MICRO_BATCH, SEQ_LEN)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, bool, float | None]:
    tied, accumulation = draw(st.booleans()), draw(st.sampled_from([1, 4]))
    clip_norm = draw(st.sampled_from([0.5, 100.0, None]))
    model, variants = tiny_model(tied)
    plan = draw(
        plans(
            model.stages, variants, micro_batch=MICRO_BATCH, accumulation=accumulation, seq_len=SEQ_LEN,
            clip_norm=clip_norm, loss_chunk_tokens=CHUNK_TOKENS, formats=("fp32",),
        )
    )  # fmt: skip
    return plan.model_copy(update={"model_id": model.model_id}), tied, clip_norm


def open_session(plan: Plan, config: PretrainedConfig, clip_norm: float | None) -> Session:
    session = Session(
        plan, config, CPU, settings=AdamWSettings(weight_decay=DECAY), max_grad_norm=clip_norm, host_limit_bytes=10**9
    )
    source = dict(reference_model(config).named_parameters())
    session.load(lambda name, target: target.copy_(source[name].detach()))
    return session


def check(plan: Plan, tied: bool, clip_norm: float | None) -> None:
    numbers, weights, grads = expected(tied, plan.accumulation, clip_norm)
    config = llama(tied)
    data = batches(plan.accumulation, config.vocab_size)
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
@given(cases())
def test_random_plans(case: tuple[Plan, bool, float | None]) -> None:
    check(*case)


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_many_random_plans(case: tuple[Plan, bool, float | None]) -> None:
    check(*case)
