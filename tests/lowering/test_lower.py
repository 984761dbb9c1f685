"""The program of a plan: its order, its dependencies, its buffers."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazysched.errors import UsageError
from lazysched.lower import lower
from lazysched.optimizer_state import hybrid8_layout
from lazysched.schemas import BYTES_PER_ELEMENT, Dtype, Plan, Program, Stage, StagePlan, Update
from lazysched.trainable import trained_part
from tests.lowering.cases import VARIANTS, cases, executable_cases, model


def conflicts(program: Program) -> list[tuple[str, str, int]]:
    """Every (earlier, later, distance) pair over two steps that touches one buffer, one of them writing."""
    ops = list(program.ops.values())
    unrolled = [(step, op) for step in (0, 1) for op in ops]
    pairs = []
    for position, (step, later) in enumerate(unrolled):
        for earlier_step, earlier in unrolled[:position]:
            touched = set(later.writes) & set(earlier.reads + earlier.writes) | set(later.reads) & set(earlier.writes)
            if touched:
                pairs.append((earlier.id, later.id, step - earlier_step))
    return pairs


def hidden_slots(buffers: tuple[str, ...]) -> list[str]:
    return [buffer for buffer in buffers if buffer.startswith("gpu/hidden/")]


@settings(max_examples=100, deadline=None)
@given(executable_cases(), st.booleans())
def test_every_hidden_state_and_gradient_is_where_it_is_read(case: tuple[Plan, list[Stage]], training: bool) -> None:
    plan, stages = case
    position = {stage.id: index for index, stage in enumerate(stages)}
    program = lower(plan, stages, training=training)
    holds: dict[str, tuple[str, int, int | None]] = {}
    for op in program.ops.values():
        if op.stage is None or op.kind not in {"forward", "loss", "backward", "copy"}:
            continue
        at, m = position[op.stage], op.micro_batch
        expected = {
            "forward": [("state", at, m)] if at else [], "copy": [("state", at, m)], "loss": [("state", at, m)],
            "backward": [("grad", at + 1, m), ("state", at, m)],
        }[op.kind]  # fmt: skip
        assert not set(hidden_slots(op.reads)) & set(hidden_slots(op.writes)), op.id
        read = [holds[slot] for slot in hidden_slots(op.reads)]
        assert read == expected[: len(read)], op.id
        assert len(read) >= (op.kind != "copy") * min(len(expected), 1), op.id
        for slot in hidden_slots(op.writes):
            holds[slot] = ("state", at + 1, m) if op.kind == "forward" else ("grad", at, m)
    slots = {buffer for buffer in program.buffers if buffer.startswith("gpu/hidden/")}
    assert set(holds) <= slots
    tiers = [{choice.input_tier, *choice.saved_tiers.values()} for choice in list(plan.stages.values())[1:-1]]
    leaving = plan.accumulation * tiers.count({"host"})
    if not training or (all(len(each) == 1 for each in tiers) and (leaving == 0 or leaving > plan.d2h_lag)):
        assert set(holds) == slots


@settings(max_examples=20, deadline=None)
@given(cases())
def test_ordinary_host_memory_changes_nothing_but_links_and_what_is_page_locked(
    case: tuple[Plan, list[Stage]],
) -> None:
    plan, stages = case
    pinned, pageable = (lower(plan.model_copy(update={"host_memory": kind}), stages) for kind in ("pinned", "pageable"))
    assert pageable.edges == pinned.edges
    for op in pinned.ops.values():
        link = ("link", f"{op.engine}_pageable") if op.engine in ("h2d", "d2h") else op.cost
        assert pageable.ops[op.id] == op.model_copy(update={"cost": link})
        if op.engine in ("h2d", "d2h"):
            assert op.cost == ("link", op.engine)
    for buffer in pinned.buffers.values():
        assert buffer.pinned == (buffer.tier == "host" and buffer.kind != "state")
        assert pageable.buffers[buffer.id] == buffer.model_copy(update={"pinned": False})


@settings(max_examples=40, deadline=None)
@given(cases())
def test_every_conflict_is_ordered_by_edges_and_engine_order(case: tuple[Plan, list[Stage]]) -> None:
    program = lower(*case)
    order = nx.DiGraph()
    ops = list(program.ops.values())
    for step in (0, 1):
        last: dict[str, str] = {}
        for op in ops:
            if op.engine in last:
                order.add_edge((step, last[op.engine]), (step, op.id))
            elif step == 1:
                order.add_edge((0, [o.id for o in ops if o.engine == op.engine][-1]), (1, op.id))
            last[op.engine] = op.id
    for before, after, distance in program.edges:
        for step in range(distance, 2):
            order.add_edge((step - distance, before), (step, after))
    assert nx.is_directed_acyclic_graph(order)
    reachable = {node: nx.descendants(order, node) for node in order}
    for before, after, distance in conflicts(program):
        assert (distance, after) in reachable[(0, before)], (before, after, distance)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_lifetimes_cover_every_use(case: tuple[Plan, list[Stage]]) -> None:
    program = lower(*case)
    position = {op: index for index, op in enumerate(program.ops)}
    for op in program.ops.values():
        for buffer_id in op.reads + op.writes:
            buffer = program.buffers[buffer_id]
            assert buffer.alloc_at is None or position[buffer.alloc_at] <= position[op.id]
            assert buffer.free_after is None or position[op.id] <= position[buffer.free_after]


@settings(max_examples=40, deadline=None)
@given(cases())
def test_weights_are_in_place_whenever_a_block_runs(case: tuple[Plan, list[Stage]]) -> None:
    plan, stages = case
    held: dict[str, str] = {}
    for op in lower(plan, stages).ops.values():
        if op.id.startswith("load/"):
            held[op.writes[0]] = op.stage or ""
        elif (
            op.kind in {"forward", "backward", "loss"}
            and op.stage != "embed"
            and plan.stages[op.stage or ""].state == "host"
        ):
            weights = next(b for b in op.reads if b.startswith("gpu/weights/"))
            assert held[weights] == op.stage


def waits_for(program: Program, op: str) -> set[str]:
    """Operations of the same step that must end before ``op`` starts: by edges, and by the order of engines."""
    order, last = program.graph.copy(), dict[str, str]()
    for each in program.ops.values():
        if each.engine in last:
            order.add_edge(last[each.engine], each.id)
        last[each.engine] = each.id
    return nx.ancestors(order, op)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_updates_wait_for_the_norm_unless_check_and_clipping_are_given_up(case: tuple[Plan, list[Stage]]) -> None:
    plan, stages = case
    program = lower(plan, stages)
    trained = [stage for stage in stages if stage.is_trained]
    assert {op.stage for op in program.ops.values() if op.kind == "update"} == {stage.id for stage in trained}
    for stage in trained:
        before = waits_for(program, f"update/{stage.id}")
        assert "scale" in before
        assert f"{'loss' if stage.id == 'head' else 'backward'}/{stage.id}/{plan.accumulation - 1}" in before
        if plan.update.waits_for_norm:
            assert "totals" in before
            assert {f"norm/{other.id}" for other in trained} <= before
        else:
            assert "totals" not in before
            # Gradients come in the order of the backward; those still to come are not waited for.
            later = stages[: stages.index(stage)]
            assert not {f"norm/{other.id}" for other in later} & before
    assert "totals" in waits_for(program, "totals/copy")


def test_a_tied_embedding_is_updated_when_both_sums_are_in() -> None:
    stages = model(2, tied=True)
    choice = StagePlan(weights="gpu", state="gpu", save="input")
    plan = Plan(
        model_id="m", hardware_id="h", compute_dtype="float32", batch_size=2, seq_len=8, micro_batch=2, accumulation=1,
        loss_chunk_tokens=8, variants=VARIANTS, budget_bytes={}, update=Update(clip_norm=None, check_finite=False),
        stages={s.id: choice if s.is_block else choice.model_copy(update={"save": "all"}) for s in stages},
    )  # fmt: skip
    order = [op for op in lower(plan, stages).ops if op.startswith(("update", "accumulate", "totals"))]
    assert order == [
        "update/head", "update/block.1", "update/block.0", "accumulate/embed", "update/embed", "totals", "totals/copy",
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(cases())
def test_state_buffers_have_the_size_of_their_format(case: tuple[Plan, list[Stage]]) -> None:
    plan, stages = case
    buffers = lower(plan, stages).buffers
    for stage in stages:
        choice, elements = plan.stages[stage.id], trained_part(stage, 4).weight_bytes // 4
        # With fp32 weights there is no master: two fp32 moments, or what the 8-bit layout takes.
        expected = hybrid8_layout(stage, 4, plan.fp32_state_elements)[1]
        expected = 8 * elements if choice.state_format == "fp32" else expected
        found = buffers.get(f"{choice.state}/state/{stage.id}")
        assert (found.num_bytes if found else 0) == expected


@pytest.mark.parametrize(
    ("dtype", "accumulation", "per_element"),
    [("float32", 1, [0]), ("float32", 3, [0, 4, 4]), ("bfloat16", 1, [0]), ("bfloat16", 3, [2, 6, 6])],
)
def test_accumulation_costs_what_fp32_sums_move_beyond_one_write(
    dtype: Dtype, accumulation: int, per_element: list[int]
) -> None:
    stages = model(1, tied=False)
    plan = Plan(
        model_id="tiny", hardware_id="any", compute_dtype=dtype, batch_size=accumulation, seq_len=8, micro_batch=1,
        accumulation=accumulation, loss_chunk_tokens=16, variants=VARIANTS, budget_bytes={},
        stages={
            s.id: StagePlan(weights="gpu", state="gpu", saved_tiers={"intermediates": "gpu"} if s.is_block else {})
            for s in stages
        },
    )  # fmt: skip
    ops, elements = lower(plan, stages).ops, 512 // BYTES_PER_ELEMENT[dtype]
    assert [ops[f"backward/block.0/{m}"].num_bytes for m in range(accumulation)] == [
        each * elements for each in per_element
    ]


def test_only_fp32_updates_on_the_gpu_need_memory_of_their_own() -> None:
    stages = model(2, tied=False)
    for state_format, on_gpu_bytes in (("fp32", 512), ("hybrid8", 0)):
        choice = StagePlan(weights="gpu", state="gpu", state_format=state_format, save="input")
        end = choice.model_copy(update={"save": "all"})
        plan = Plan(
            model_id="m", hardware_id="h", compute_dtype="float32", batch_size=2, seq_len=8, micro_batch=2,
            accumulation=1, loss_chunk_tokens=8, variants=VARIANTS, budget_bytes={},
            stages={s.id: choice if s.is_block else end for s in stages}
            | {"block.1": choice.model_copy(update={"state": "host"})},
        )  # fmt: skip
        ops = lower(plan, stages).ops
        assert ops["update/block.0"].working_bytes == on_gpu_bytes
        assert ops["update/block.1"].working_bytes == 0


def test_blocks_at_the_turn_are_not_uploaded_again() -> None:
    stages = model(6, tied=True)
    choice = StagePlan(weights="host", state="host", save="input")
    end = choice.model_copy(update={"save": "all"})
    plan = Plan(
        model_id="m", hardware_id="h", compute_dtype="bfloat16", batch_size=2, seq_len=8, micro_batch=2, accumulation=1,
        loss_chunk_tokens=8, stages={s.id: choice if s.is_block else end for s in stages},
        variants=VARIANTS, budget_bytes={},
    )  # fmt: skip
    order = [op for op in lower(plan, stages).ops if not op.startswith(("save", "fetch", "grads", "norm"))]
    uploads = [op for op in order if op.startswith("load/") and op.endswith("/backward")]
    assert uploads == [f"load/block.{i}/backward" for i in (3, 2, 1, 0)]
    # Each upload may start while the block before its own still computes.
    before = [order[order.index(op) - 1] for op in uploads]
    assert before == [f"backward/block.{i}/0" for i in (5, 4, 3, 2)]


@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        ("block.0", {"save": "half"}, "'half' is not among the plan's variants"),
        ("block.0", {"saved_tiers": {}}, "saved_tiers: names"),
    ],
)
def test_decisions_that_do_not_fit_the_model_are_refused(stage: str, change: dict[str, object], message: str) -> None:
    stages = model(2, tied=False)
    choice = StagePlan(weights="host", state="host", save="all", saved_tiers={"intermediates": "gpu"})
    end = StagePlan(weights="gpu", state="host")
    choices = {s.id: choice if s.is_block else end for s in stages}
    choices[stage] = choices[stage].model_copy(update=change)
    plan = Plan(
        model_id="m", hardware_id="h", compute_dtype="float32", batch_size=2, seq_len=8, micro_batch=2, accumulation=1,
        loss_chunk_tokens=8, stages=choices, variants=VARIANTS, budget_bytes={},
    )  # fmt: skip
    with pytest.raises(UsageError, match=message):
        lower(plan, stages)


def test_a_variant_under_another_name_is_refused() -> None:
    stages = model(2, tied=False)
    choice = StagePlan(weights="host", state="host", save="all", saved_tiers={"intermediates": "gpu"})
    end = StagePlan(weights="gpu", state="host")
    plan = Plan(
        model_id="m", hardware_id="h", compute_dtype="float32", batch_size=2, seq_len=8, micro_batch=2, accumulation=1,
        loss_chunk_tokens=8, stages={s.id: choice if s.is_block else end for s in stages}, budget_bytes={},
        variants=VARIANTS | {"B:all": VARIANTS["B:all"].model_copy(update={"name": "input"})},
    )  # fmt: skip
    with pytest.raises(UsageError, match="name: is 'input'"):
        lower(plan, stages)


def test_a_plan_for_other_stages_is_refused() -> None:
    stages = model(2, tied=True)
    end = StagePlan(weights="gpu", state="host")
    block = StagePlan(weights="host", state="host", save="input")
    plan = Plan(
        model_id="m", hardware_id="h", compute_dtype="float32", batch_size=2, seq_len=8, micro_batch=2, accumulation=1,
        loss_chunk_tokens=8, stages={"embed": end, "block.0": block, "head": end}, variants=VARIANTS, budget_bytes={},
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"'block\.1' is not in both"):
        lower(plan, stages)
