"""Compiled forms of blocks and loss: whatever a graph keeps, wherever that lies, the numbers are the same.

Most tests run the graphs operation by operation (``interpret_graph``): recomputing repeats the very operations, so that
plans agree to the bit. One compiles for real, against the yardstick of ``test_architectures``.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PretrainedConfig

from lazysched.errors import RunError, UsageError
from lazysched.profiles.variants import Wanted, candidates
from lazysched.runtime import graphs
from lazysched.runtime.flat import aligned
from lazysched.runtime.model import Model
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Plan, SaveVariant, Stage, StagePlan, variant_key
from tests.lowering.plans import NOT_TIMED, end_variants, plans
from tests.runtime.test_architectures import CONFIGS, ERROR_RATIO, plan_of, worst_error
from tests.runtime.tiny import CPU, SEQ_LEN, llama, packed_batch, packing, uneven_batch

MICRO_BATCH, CHUNK_TOKENS = 2, 12
LEARNING_RATES = [1e-2, 5e-3]
BUDGETS = (1.0, 0.5, 0.2, 0.0)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Graphs run uncompiled; the list gets an entry for each that is built."""
    built: list[bool] = []

    def interpret(graph: Any, *, is_backward: bool = False) -> Any:
        built.append(is_backward)
        return graphs.interpret_graph(graph, is_backward=is_backward)

    monkeypatch.setattr(graphs, "compile_graph", interpret)
    monkeypatch.setattr(Model, "joint_graph", joint_graph)
    return built


_trace, _split = Model.joint_graph, graphs.JointGraph.split
_traced: dict[tuple[object, ...], graphs.JointGraph] = {}


def joint_graph(model: Model, stage: Stage) -> graphs.JointGraph:
    """Traced once for all models of one architecture, and split once at each budget: both take a second."""
    trained = tuple(name in stage.trained_params for name in stage.params)
    key = (model.model_id, stage.structure, model.argument_bytes > 0, trained)
    if key not in _traced:
        _traced[key] = _trace(model, stage)
        _traced[key].split = cache(partial(_split, _traced[key]))  # type: ignore[method-assign]
    return _traced[key]


def compiled_variants(model: Model, seq_len: int = SEQ_LEN, micro_batch: int = MICRO_BATCH) -> dict[str, SaveVariant]:
    """What the profiler could offer, without times; the head compiled too."""
    head = end_variants("head")["head:all"].model_copy(update={"compiled": True})
    variants: dict[str, SaveVariant] = end_variants("embed") | {variant_key("head", "all"): head}
    for stage in model.stages:
        if not stage.is_block or any(key.startswith(f"{stage.structure}:") for key in variants):
            continue
        input_bytes = aligned(model.calls.hidden_shape.numel() * model.dtype.itemsize)
        for wanted in candidates(partial(model.kept, stage), micro_batch * seq_len, BUDGETS):
            variants[variant_key(stage.structure, wanted.name)] = variant(wanted, input_bytes)
    return variants


def variant(wanted: Wanted, input_bytes: int) -> SaveVariant:
    saved = {"input": input_bytes} | ({"intermediates": wanted.kept_bytes} if wanted.keep else {})
    return SaveVariant(
        name=wanted.name, compiled=True, budget=wanted.budget, saved=saved, forward=NOT_TIMED, backward=NOT_TIMED,
        working_forward_bytes=10, working_backward_bytes=20,
    )  # fmt: skip


@cache
def tiny(tied: bool, packed: bool = False) -> tuple[Model, dict[str, SaveVariant]]:
    model = Model(llama(tied), "float32", CPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, packing=packed)
    return model, compiled_variants(model)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, bool]:
    tied, packed, accumulation = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([1, 3]))
    model, variants = tiny(tied, packed)
    plan = draw(
        plans(
            model.stages, variants, micro_batch=MICRO_BATCH, accumulation=accumulation, seq_len=SEQ_LEN,
            loss_chunk_tokens=CHUNK_TOKENS, formats=("fp32",),
        )
    )  # fmt: skip
    plan = plan.model_copy(update={"model_id": model.model_id})
    return packing(plan, model) if packed else plan, tied


def outcome(plan: Plan, config: PretrainedConfig, steps: int = 2) -> list[Any]:
    """Losses, norms and all weights after some steps."""
    with Session(plan, config, CPU, settings=AdamWSettings(), max_grad_norm=1.0, host_limit_bytes=10**9) as session:
        session.initialise(seed=0)
        found: list[Any] = []
        for step in range(steps):
            batch = (packed_batch if plan.packing else uneven_batch)(plan.batch_size, SEQ_LEN, config.vocab_size, step)
            result = session.executor.step(batch, LEARNING_RATES[step % 2])
            found += [result.loss, result.grad_norm]
        session.executor.drain()
        found += [session.weight(name).clone() for name, _ in session.weight_names()]
    return found


def all_kept(plan: Plan) -> Plan:
    """The same batch with everything on the GPU and nothing recomputed."""
    stages = {}
    for name in plan.stages:
        block = name.startswith("block.")
        stages[name] = StagePlan(weights="gpu", state="gpu", saved_tiers={"intermediates": "gpu"} if block else {})
    return plan.model_copy(update={"stages": stages, "prefetch_depth": 1, "d2h_lag": 0})


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(case=cases())
def test_plans_agree_to_the_bit(case: tuple[Plan, bool], interpreted: list[bool]) -> None:
    plan, tied = case
    ours, theirs = outcome(plan, llama(tied)), outcome(all_kept(plan), llama(tied))
    assert ours[:4] == theirs[:4]
    assert all(torch.equal(a, b) for a, b in zip(ours[4:], theirs[4:], strict=True))


def test_variants_keep_less_and_less() -> None:
    _, variants = tiny(tied=False)
    blocks = [v for key, v in variants.items() if key.startswith("Llama")]
    assert [v.name for v in blocks][:: len(blocks) - 1] == ["all", "input"]
    assert len(blocks) == 4
    sizes = [v.saved_bytes for v in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0
    assert len({v.name for v in blocks}) == len(blocks)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture(name: str, interpreted: list[bool]) -> None:
    model = Model(CONFIGS[name], "float32", CPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN)
    assert worst_error(CONFIGS[name], plan_of(model, compiled_variants(model))) <= ERROR_RATIO


def test_compiled_for_real() -> None:
    """Inductor's graphs: a variant in the middle, the block's input alone, the loss for chunks of two sizes."""
    config = llama(tied=True, num_hidden_layers=2)
    model = Model(config, "float32", CPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN)
    variants = compiled_variants(model)
    middle = [v.name for key, v in variants.items() if key.startswith("Llama")][2]
    assert worst_error(config, plan_of(model, variants, middle)) <= ERROR_RATIO


def test_nothing_is_built_once_a_session_is_open(interpreted: list[bool]) -> None:
    config = llama(tied=False)
    model, variants = tiny(tied=False)
    blocks = [v for key, v in variants.items() if key.startswith("Llama")][:2]
    plan = mixed_plan(model, variants, [v.name for v in blocks])
    with Session(plan, config, CPU, settings=AdamWSettings(), max_grad_norm=1.0, host_limit_bytes=10**9) as session:
        session.initialise(seed=0)
        # Two halves of each variant, and the loss for chunks of 12 tokens and for the 8 left of 32.
        assert sorted(interpreted) == sorted([False, True] * 2 + [False] * 2)
        torch._dynamo.utils.counters.clear()
        for seed in range(4):
            session.executor.step(uneven_batch(2, SEQ_LEN, config.vocab_size, seed, masked_rows=seed % 2), 1e-3)
            session.executor.evaluate(uneven_batch(2, SEQ_LEN, config.vocab_size, seed))
        session.executor.drain()
        assert len(interpreted) == 6
        assert not torch._dynamo.utils.counters


def mixed_plan(model: Model, variants: dict[str, SaveVariant], saves: list[str]) -> Plan:
    blocks = {
        f"block.{i}": StagePlan(
            weights="gpu", state="gpu", save=saves[i % len(saves)], saved_tiers={"intermediates": "gpu"}
        )
        for i in range(len(model.stages) - 2)
    }
    ends = {name: StagePlan(weights="gpu", state="gpu") for name in ("embed", "head")}
    return Plan(
        model_id=model.model_id, hardware_id="any", compute_dtype="float32", batch_size=MICRO_BATCH, seq_len=SEQ_LEN,
        micro_batch=MICRO_BATCH, accumulation=1, loss_chunk_tokens=CHUNK_TOKENS, variants=variants, budget_bytes={},
        stages=ends | blocks,
    )  # fmt: skip


def changed(plan: Plan, **update: Any) -> Plan:
    """The plan with another variant ``all`` of its blocks."""
    key = next(key for key in plan.variants if key.endswith(":all") and key.split(":")[0] not in {"embed", "head"})
    return plan.model_copy(update={"variants": plan.variants | {key: plan.variants[key].model_copy(update=update)}})


def open_session(plan: Plan) -> Session:
    return Session(plan, llama(tied=False), CPU, settings=AdamWSettings(), max_grad_norm=1.0, host_limit_bytes=10**9)


def test_a_graph_that_cannot_be_built_is_refused_when_the_plan_is_loaded(
    interpreted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = mixed_plan(*tiny(tied=False), ["all"])
    with pytest.raises(UsageError, match="is compiled but has no budget"):
        open_session(changed(plan, budget=None))

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no such operator\nand a long story")

    monkeypatch.setattr(graphs, "compile_graph", fail)
    with pytest.raises(RunError, match=r"block.0: it cannot be compiled \(ValueError: no such operator\)"):
        open_session(plan)


def test_a_plan_with_other_bytes_is_refused(interpreted: list[bool]) -> None:
    plan = changed(mixed_plan(*tiny(tied=False), ["all"]), saved={"input": 4096, "intermediates": 1})
    with (
        open_session(plan) as session,
        pytest.raises(RunError, match=r"its forward saves .* of intermediates, the plan expects 1"),
    ):
        session.executor.step(uneven_batch(2, SEQ_LEN, 97, seed=0), 1e-3)
