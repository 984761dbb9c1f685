"""Frozen parameters keep their bits and count for nothing; all else is what plain PyTorch gives with them frozen."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PretrainedConfig, PreTrainedModel

from lazysched.errors import UsageError
from lazysched.lower import lower
from lazysched.runtime.batch import Batch
from lazysched.runtime.graphs import without_written
from lazysched.runtime.model import Model
from lazysched.runtime.operations import Operations, StepContext
from lazysched.runtime.session import Session
from lazysched.schemas import Op, Plan, StagePlan, StateFormat, Tier
from tests.lowering.plans import plans
from tests.runtime.reference import Hybrid8Loop, ReferenceLoop
from tests.runtime.test_compiled import compiled_variants, interpreted
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

__all__ = ["interpreted"]

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


SETS = {
    "projections of one block": ["layers.1.self_attn.[qk]_proj"],
    "norms and the last product": ["norm", "down_proj"],
    "last block and head": ["layers.2.", "lm_head"],
    "final norm alone": ["^model.norm"],
}


def plan_for(trainable: list[str], *, compiled: bool) -> Plan:
    """Everything on the GPU and kept, two micro-batches."""
    model = Model(llama(False), "float32", CPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, trainable=trainable)
    variants = compiled_variants(model) if compiled else variants_of(model, MICRO_BATCH, SEQ_LEN)
    stages = {stage.id: StagePlan(weights="gpu", state="gpu") for stage in model.stages}
    for stage in model.stages[1:-1]:
        save = "all" if model.has_backward(stage) else "input"
        saved_tiers: dict[str, Tier] = {"intermediates": "gpu"} if save == "all" else {}
        stages[stage.id] = StagePlan(weights="gpu", state="gpu", save=save, saved_tiers=saved_tiers)
    return Plan(
        model_id=model.model_id, hardware_id="any", compute_dtype="float32", batch_size=2 * MICRO_BATCH,
        seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, accumulation=2, loss_chunk_tokens=CHUNK_TOKENS, variants=variants,
        budget_bytes={}, stages=stages, trainable=trainable,
    )  # fmt: skip


def gradients_of(plan: Plan) -> dict[str, torch.Tensor]:
    with open_session(plan, llama(False), 1.0) as session:
        session.executor.step(batches(2, llama(False).vocab_size, packed=False)[0], 0.0)
        session.executor.drain()
        return {n: g.clone() for stage in session.model.stages for n, g in session.gradients(stage).items()}


@pytest.mark.parametrize("trainable", SETS.values(), ids=SETS)
def test_compiled_graphs_have_the_same_gradients_and_no_others(trainable: list[str], interpreted: list[bool]) -> None:
    """Uncompiled ones are those of plain PyTorch; graphs round otherwise, by a few ulp of sums of 32 terms."""
    ours, theirs = (gradients_of(plan_for(trainable, compiled=compiled)) for compiled in (True, False))
    assert set(ours) == set(theirs) == {n for n in NAMES[False] if any(re.search(p, n) for p in trainable)}
    for name, grad in theirs.items():
        assert (ours[name] - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.parametrize(
    ("trainable", "num_products"),
    [([], 14), (["layers.1.mlp"], 10), (["layers.1.self_attn"], 11), (["input_layernorm"], 7), (["embed"], 7)],
)
def test_no_graph_multiplies_for_a_frozen_matrix(trainable: list[str], num_products: int) -> None:
    """Seven matrices of a block: one product each for the gradient that goes on, one for that of each trained one."""
    model = Model(llama(False), "float32", CPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, trainable=trainable)
    _, backward, _ = model.joint_graph(model.stages[2]).split(1.0)
    products = (torch.ops.aten.mm.default, torch.ops.lazysched.mm_into.default)
    assert sum(node.target in products for node in backward.graph.nodes) == num_products


@pytest.mark.parametrize(
    ("trainable", "num_products"), [(["layers.1.mlp"], 4), (["layers.1.self_attn"], 8), (["input_layernorm"], 7)]
)
@pytest.mark.parametrize("budget", [0.0, 1.0])
def test_no_graph_of_the_first_trained_block_multiplies_for_its_input(
    trainable: list[str], num_products: int, budget: float
) -> None:
    """Below the trained matrices nothing is left of the backward; at budget 0 the forward's products come again."""
    model = Model(llama(False), "float32", CPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, trainable=trainable)
    _, backward, _ = model.joint_graph(model.stages[2]).split(budget)
    left, products = without_written(backward), (torch.ops.aten.mm.default, torch.ops.lazysched.mm_into.default)
    num_left, num_before = (sum(node.target in products for node in g.graph.nodes) for g in (left, backward))
    assert num_left < num_before or trainable == ["input_layernorm"]
    assert num_left == num_products or budget == 0.0
    inputs = [[node.name for node in g.graph.nodes if node.op == "placeholder"] for g in (left, backward)]
    assert inputs[0] == inputs[1]


@pytest.mark.parametrize("compiled", [True, False])
def test_the_gradient_of_an_input_is_made_where_something_before_wants_it(
    compiled: bool, interpreted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 1 is the first that trains anything: its backward writes no gradient of its input, block 2's does."""
    written = dict[str, bool]()
    handle = Operations._backward

    def backward(self: Operations, op: Op, context: StepContext) -> None:
        self._hidden(op.writes).fill_(float("nan"))
        handle(self, op, context)
        written[str(op.stage)] = not bool(self._hidden(op.writes).isnan().any())

    monkeypatch.setattr(Operations, "_backward", backward)
    found = gradients_of(plan_for(["layers.1.mlp", "layers.2."], compiled=compiled))
    assert written == {"block.1": False, "block.2": True}
    assert all(bool(grad.isfinite().all()) for grad in found.values())


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ([""], "trainable: '' is in every name; leave trainable out to train everything"),
        (["lm_head("], "trainable: 'lm_head(' is no regular expression (missing ), unterminated subpattern"),
        (["norm", "layers.9"], "trainable: 'layers.9' is in no parameter's name; they look like model.layers.0."),
        (["lm_head"], "the output embedding is tied, it is model.embed_tokens.weight"),
    ],
)
def test_wrong_patterns_are_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        Model(llama(True), "float32", CPU, micro_batch=1, seq_len=SEQ_LEN, trainable=patterns)
    assert message in str(refusal.value)


def test_structures_tell_blocks_apart_that_are_not_trained_alike() -> None:
    trained = ["layers.1.mlp", "layers.2.mlp", "layers.2.self_attn", "layers.3.self_attn"]
    model = Model(llama(False, num_hidden_layers=6), "float32", CPU, micro_batch=1, seq_len=4, trainable=trained)
    kinds = [stage.structure.removeprefix("LlamaDecoderLayer") for stage in model.stages[1:-1]]
    assert kinds == ["-forward", "-part0", "-part1", "-part2", "-frozen", "-frozen"]
    assert not model.stages[-1].is_trained
    assert model.stages[3].num_trained == sum(model.stages[3].num_params for _ in "x") - 2 * 32  # but for two norms


def test_plans_that_keep_for_a_backward_that_is_not_there_are_refused() -> None:
    plan = plan_for(["lm_head"], compiled=False)
    for change in ({"input_tier": "host"}, {"segment": 2}):
        stages = plan.stages | {"block.0": plan.stages["block.0"].model_copy(update=change)}
        model = Model(llama(False), "float32", CPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, trainable=["lm_head"])
        with pytest.raises(UsageError, match=r"stages.block.0: has no backward, nothing before it is trained"):
            lower(plan.model_copy(update={"stages": stages}), model.stages)


def test_a_block_compiled_for_real() -> None:
    """Inductor's halves of a block of which the feed-forward part is trained, against its own code."""
    model = Model(llama(False), "float32", CPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, trainable=["mlp"])
    stage, arguments = model.stages[1], model.arguments(model.stages[1])
    torch.manual_seed(0)
    weights, hidden = torch.randn(stage.weight_bytes // 4) / 8, torch.randn(model.calls.hidden_shape)
    model.templates[stage.structure].bind(weights, stage)
    found = []
    for budget, wants_input_grad in ((None, True), (1.0, True), (1.0, False)):
        form = model.block_form(stage, budget, keep=True, input_grad=wants_input_grad)
        targets = [torch.empty(shape) for shape in stage.trained_params.values()]
        output, input_grad = torch.empty_like(hidden), torch.full_like(hidden, 7.0)
        saved = form.forward(hidden, arguments, output)
        form.backward(saved, arguments, torch.ones_like(hidden), input_grad, targets, first=True)
        found.append([output, input_grad, *targets])
    assert len(found[0]) == 2 + 3
    for theirs, ours, without in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
        assert (
            bool((without == 7.0).all()) if theirs is found[0][1] else (without - theirs).norm() <= 1e-5 * theirs.norm()
        )
