"""Memory of a step, operation by operation: what is alive is what the program says, no more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from transformers import PretrainedConfig

from lazysched.lower import lower
from lazysched.profiles.live_bytes import LiveBytes
from lazysched.profiles.measure import profile
from lazysched.runtime import graphs
from lazysched.runtime.recorder import Work
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Op, Plan, Profile, Program, StagePlan, Tier, variant_key
from lazysched.trainable import first_trained
from tests.runtime.tiny import llama, uneven_batch

CPU = torch.device("cpu")
SEQ_LEN, MICRO_BATCH, ACCUMULATION, VOCABULARY = 64, 4, 2, 512
CONFIG = llama(
    False, num_hidden_layers=4, hidden_size=64, intermediate_size=256, vocab_size=VOCABULARY,
    max_position_embeddings=SEQ_LEN, architectures=["LlamaForCausalLM"],
)  # fmt: skip
HOST_TENSORS_BYTES = 2 * (2 * 8 * MICRO_BATCH * ACCUMULATION * SEQ_LEN) + 2048
"""On a CPU the batch, its stacked copy and what the step reports are seen too."""


FROZEN = ["layers.2.", "layers.3.mlp", "lm_head"]
"""Trained alone: all of one block, some of the next, and of the head the matrix."""


@pytest.fixture(
    scope="module", params=[(False, None), (True, None), (False, FROZEN), (True, FROZEN)],
    ids=["uncompiled", "interpreted", "uncompiled, some frozen", "interpreted, some frozen"],
)  # fmt: skip
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "compile_graph", graphs.interpret_graph)
        return profile(
            str(folder), device="cpu", seq_len=SEQ_LEN, micro_batches=[MICRO_BATCH], loss_chunk_tokens=64, repeats=1,
            compiled=request.param[0], trainable=request.param[1],
        )  # fmt: skip


def make_plan(measured: Profile, tiers: tuple[Tier, ...]) -> Plan:
    """Every variant in turn, what it saves in ``tiers``."""
    variants = {variant_key(s, v.name): v for s, sizes in measured.variants.items() for v in sizes[MICRO_BATCH]}
    stages = {stage.id: StagePlan(weights="gpu", state="gpu") for stage in measured.stages}
    first = first_trained(measured.stages)
    for i, (stage, tier) in enumerate(zip(measured.stages[1:-1], tiers, strict=True)):
        listed = measured.variants[stage.structure][MICRO_BATCH]
        variant = listed[i % len(listed)]
        saved_tiers = {group: tier for group in variant.saved if group != "input"}
        stages[stage.id] = StagePlan(
            weights="gpu", state="gpu", save=variant.name, saved_tiers=saved_tiers,
            input_tier=tier if i + 1 >= first else "gpu",
        )  # fmt: skip
    return Plan(
        model_id=measured.model_id, hardware_id="any", compute_dtype="float32", batch_size=MICRO_BATCH * ACCUMULATION,
        seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, accumulation=ACCUMULATION, loss_chunk_tokens=64, stages=stages,
        variants=variants, budget_bytes={}, trainable=measured.trainable,
    )  # fmt: skip


def planned_bytes(program: Program) -> dict[str, int]:
    """Operation -> most bytes that are not allocated once, while it runs."""
    starts: dict[str | None, int] = defaultdict(int)
    ends: dict[str | None, int] = defaultdict(int)
    live = sum(b.num_bytes for b in program.buffers.values() if b.kind == "outgoing")
    for buffer in program.buffers.values():
        if buffer.tier == "gpu" and buffer.alloc_at is not None:
            starts[buffer.alloc_at] += buffer.num_bytes
            ends[buffer.free_after] += buffer.num_bytes
    planned = {}
    for op in program.ops.values():
        live += starts[op.id]
        planned[op.id] = live + op.working_bytes
        live -= ends[op.id]
    return planned


def peaks(plan: Plan, config: PretrainedConfig) -> dict[str, int]:
    """Operation of ``compute`` -> most bytes made in steps and alive while it ran, in the worst of three steps."""
    found: dict[str, int] = defaultdict(int)
    with (
        Session(plan, config, CPU, settings=AdamWSettings(), max_grad_norm=1.0, host_limit_bytes=10**9) as session,
        LiveBytes() as meter,
    ):
        session.initialise(seed=0)

        def timed(op: Op, work: Work) -> Callable[[], None]:
            def run() -> None:
                meter.reset_peak()
                work()
                found[op.id] = max(found[op.id], meter.peak_bytes())

            return run

        for step in range(3):
            session.executor.step(uneven_batch(plan.batch_size, SEQ_LEN, VOCABULARY, step), 1e-3, timed)
    return {op.id: found[op.id] for op in session.program.ops.values() if op.engine == "compute"}


@pytest.mark.parametrize(
    "tiers", [("gpu", "host", "gpu", "host"), ("host", "host", "gpu", "gpu"), ("gpu", "gpu", "gpu", "host")]
)
def test_no_operation_holds_more_than_planned(
    measured: Profile, tiers: tuple[Tier, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "compile_graph", graphs.interpret_graph)
    plan = make_plan(measured, tiers)
    planned = planned_bytes(lower(plan, measured.stages))
    found = peaks(plan, CONFIG)
    first = max(0, first_trained(measured.stages) - 1)
    assert set(found) >= {"forward/block.3/1", "loss/head/1", f"backward/block.{first}/0"}
    for op, num_bytes in found.items():
        assert num_bytes <= planned[op] + HOST_TENSORS_BYTES, op
    # Nor much less, but for slots as large as the largest variant, which others leave part empty.
    slots_bytes = sum(b.num_bytes for b in lower(plan, measured.stages).buffers.values() if b.kind == "outgoing")
    assert max(found.values()) >= 0.95 * (max(planned[op] for op in found) - slots_bytes)
