"""Frozen parameters keep their bits and count for nothing; all else is what plain PyTorch gives with them frozen."""

from __future__ import annotations

import re

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PretrainedConfig, PreTrainedModel

from lazysched.runtime.batch import Batch
from lazysched.runtime.model import Model
from lazysched.runtime.session import Session
from lazysched.schemas import Plan, StateFormat
from tests.lowering.plans import plans
from tests.runtime.reference import Hybrid8Loop, ReferenceLoop
from tests.runtime.test_plans_do_not_change_results import (
    CHUNK_TOKENS,
    DECAY,
    FP32_ELEMENTS,
    LEARNING_RATES,
    MICRO_BATCH,
    SEED,
    batches,
    open_session,
    reference_model,
)  # fmt: skip
from tests.runtime.tiny import CPU, SEQ_LEN, llama, variants_of

NAMES = {tied: [name for name, _ in reference_model(llama(tied)).named_parameters()] for tied in (True, False)}
"""Tied -> parameters, the tied matrix once, under the embedding's name."""


def exactly(names: list[str]) -> list[str]:
    """Patterns that train these parameters and no other."""
    return [f"^{re.escape(name)}$" for name in names]


def model_of(tied: bool, trained: list[str]) -> Model:
    return Model(llama(tied), "float32", CPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, trainable=exactly(trained))


@st.composite
def subsets(draw: st.DrawFn, tied: bool) -> list[str]:
    """Any parameters, or those from some block on, or those of one kind."""
    names, kind = NAMES[tied], draw(st.sampled_from(["any", "last", "alike"]))
    if kind == "any":
        return draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    if kind == "last":
        return names[draw(st.integers(0, len(names) - 1)) :]
    part = draw(st.sampled_from(["q_proj", "mlp", "norm", "embed_tokens", "layers.1."]))
    return [name for name in names if part in name]


@st.composite
def cases(draw: st.DrawFn, state_format: StateFormat) -> tuple[Plan, bool, list[str]]:
    tied, accumulation = draw(st.booleans()), draw(st.sampled_from([1, 4]))
    trained = draw(subsets(tied))
    return draw(plan_of(tied, trained, accumulation, state_format)), tied, trained


@st.composite
def plan_of(draw: st.DrawFn, tied: bool, trained: list[str], accumulation: int, state_format: StateFormat) -> Plan:
    model = model_of(tied, trained)
    plan = draw(
        plans(
            model.stages, variants_of(model, MICRO_BATCH, SEQ_LEN), micro_batch=MICRO_BATCH,
            accumulation=accumulation, seq_len=SEQ_LEN, clip_norm=draw(st.sampled_from([0.5, 100.0, None])),
            loss_chunk_tokens=CHUNK_TOKENS, formats=(state_format,), fp32_state_elements=FP32_ELEMENTS,
        )
    )  # fmt: skip
    return plan.model_copy(update={"model_id": model.model_id, "trainable": exactly(trained)})


def frozen_reference(config: PretrainedConfig, trained: list[str]) -> PreTrainedModel:
    model = reference_model(config)
    for name, param in model.named_parameters():
        param.requires_grad_(name in trained)
    return model


def reference_loop(plan: Plan, tied: bool, trained: list[str], state_format: StateFormat) -> ReferenceLoop:
    common = {
        "micro_batch": MICRO_BATCH, "chunk_tokens": CHUNK_TOKENS, "max_grad_norm": plan.update.clip_norm,
        "weight_decay": DECAY,
    }  # fmt: skip
    model = frozen_reference(llama(tied), trained)
    if state_format == "fp32":
        return ReferenceLoop(model, **common)
    return Hybrid8Loop(model, **common, fp32_elements=FP32_ELEMENTS, seed=SEED)


def run_and_compare(session: Session, loop: ReferenceLoop, data: list[Batch]) -> None:
    for batch, rate in zip(data, LEARNING_RATES, strict=True):
        loss, norm = loop.step(batch, rate)
        result = session.executor.step(batch, rate)
        assert (result.loss, result.grad_norm) == (loss, norm)
    session.executor.drain()


def check(plan: Plan, tied: bool, trained: list[str], state_format: StateFormat) -> None:
    config = llama(tied)
    data = batches(plan.accumulation, config.vocab_size, packed=False)
    loop = reference_loop(plan, tied, trained, state_format)
    before = {name: param.detach().clone() for name, param in loop.model.named_parameters()}
    with open_session(plan, config, plan.update.clip_norm) as session:
        run_and_compare(session, loop, data)
        for name, value in loop.model.named_parameters():
            assert torch.equal(session.weight(name), value), name
            assert name in trained or torch.equal(session.weight(name), before[name]), name
        assert {name.rsplit(".", 1)[0] for name, _ in session.state_names()} == set(trained)
        loop.gradients(data[0])
        session.executor.step(data[0], 0.0)
        grads = {name: view for stage in session.model.stages for name, view in session.gradients(stage).items()}
        assert set(grads) == set(trained)
        for name, param in loop.model.named_parameters():
            assert name not in trained or torch.equal(grads[name], param.grad), name


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases("fp32"))
def test_any_parameters_trained(case: tuple[Plan, bool, list[str]]) -> None:
    check(*case, "fp32")


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases("hybrid8"))
def test_any_parameters_trained_with_8bit_state(case: tuple[Plan, bool, list[str]]) -> None:
    check(*case, "hybrid8")
