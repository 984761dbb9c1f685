"""Segments: the order of their backward, what they hold, and runs that are no segments."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from lazysched.errors import UsageError
from lazysched.lower import lower
from lazysched.schemas import Program, Stage, StagePlan, Tier
from lazysched.trainable import first_trained
from tests.lowering.cases import Case, cases, model
from tests.lowering.test_files import plan_of

END = StagePlan(weights="gpu", state="gpu")
KEPT = StagePlan(weights="gpu", state="gpu", saved_tiers={"intermediates": "gpu"})


def lowered(stages: list[Stage], choices: list[StagePlan], **changes: object) -> Program:
    plan = plan_of(stages, KEPT, END, **changes)
    of_blocks = {stage.id: choice for stage, choice in zip(stages[1:-1], choices, strict=True)}
    return lower(plan.model_copy(update={"stages": plan.stages | of_blocks}), stages)


def segment(length: int, input_tier: Tier = "gpu", **changes: object) -> list[StagePlan]:
    first = KEPT.model_copy(update={"segment": length, "input_tier": input_tier, **changes})
    return [first] + (length - 1) * [first.model_copy(update={"input_tier": "gpu"})]


def turns(program: Program) -> list[str]:
    kinds = {"forward": "f", "recompute": "r", "backward": "b"}
    ops = [op for op in program.ops.values() if op.kind in kinds and op.stage not in ("embed", "head")]
    return [f"{kinds[op.kind]}{(op.stage or '').removeprefix('block.')}.{op.micro_batch}" for op in ops]


def test_a_segment_runs_forward_in_order_and_back_each_block_for_all_micro_batches() -> None:
    program = lowered(model(3, tied=False), [KEPT, *segment(2)])
    backward = "r1.0 r1.1 r2.0 r2.1 b2.0 b2.1 b1.0 b1.1 b0.0 b0.1"
    assert turns(program) == ["f0.0", "f0.1", "f1.0", "f1.1", "f2.0", "f2.1", *backward.split()]
    recompute = program.ops["recompute/block.1/0"]
    assert recompute.cost == ("variant", "B", "all", "forward")
    assert (recompute.kind, recompute.phase, recompute.working_bytes) == ("recompute", "recompute", 10)
    saved = program.buffers["gpu/saved/block.1/0"]
    assert (saved.num_bytes, saved.alloc_at, saved.free_after) == (400, "recompute/block.1/0", "backward/block.1/0")
    # The first run makes what the variant saves too, and drops it.
    assert program.ops["forward/block.1/0"].working_bytes == 10 + 400
    assert program.ops["forward/block.0/0"].working_bytes == 10
    assert not any(buffer.startswith("gpu/saved") for buffer in program.ops["forward/block.1/0"].writes)


def test_where_nothing_but_inputs_is_saved_the_last_block_does_not_run_again() -> None:
    program = lowered(model(3, tied=False), segment(3, save="input", saved_tiers={}), micro_batch=2, accumulation=1)
    assert turns(program) == ["f0.0", "f1.0", "f2.0", "r0.0", "r1.0", "b2.0", "b1.0", "b0.0"]
    # Two inner inputs and the first; the output's gradient and the next.
    assert len([key for key in program.buffers if key.startswith("gpu/hidden/")]) == 5


def test_inputs_that_left_come_back_once_for_the_first_block() -> None:
    program = lowered(model(4, tied=False), segment(2, "host") + segment(2, "nvme"), prefetch_depth=3)
    saves = [op for op in program.ops if op.startswith("save/")]
    assert saves == [f"save/block.{i}/{m}" for i in (0, 2) for m in (0, 1)]
    fetches = [op for op in program.ops.values() if op.id.startswith("fetch/")]
    assert [op.id for op in fetches] == [f"fetch/block.{i}/{m}" for i in (2, 0) for m in (0, 1)]
    assert [op.writes for op in fetches] == [(f"gpu/segment/slot{slot}",) for slot in range(4)]
    # Accumulation and the depth.
    assert [b.num_bytes for key, b in program.buffers.items() if key.startswith("gpu/segment/")] == 5 * [100]
    assert not [key for key in program.buffers if key.startswith(("gpu/fetched", "gpu/outgoing"))]
    for fetch in fetches:
        for kind in ("recompute", "backward"):
            assert fetch.writes[0] in program.ops[f"{kind}/{fetch.stage}/{fetch.micro_batch}"].reads


@settings(max_examples=60, deadline=None)
@given(cases())
def test_hidden_slots_are_no_more_than_are_needed_at_once(case: Case) -> None:
    plan, stages = case
    blocks = [plan.stages[stage.id] for stage in stages[1:-1]]
    written = {b for op in lower(plan, stages).ops.values() for b in op.writes if b.startswith("gpu/hidden/")}
    most, waiting, start, leaves = 0, 0, max(0, first_trained(stages) - 1), False
    while start < len(blocks):
        waiting += blocks[start].input_tier == "gpu"
        leaves |= blocks[start].input_tier != "gpu"
        most = max(most, waiting + blocks[start].segment - 1)
        start += blocks[start].segment
    counted = plan.accumulation * (most + 1) + 1 + leaves * (plan.d2h_lag + 1)
    assert len(written) <= counted
    if not leaves:
        assert len(written) == counted


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([*segment(2), *segment(2)[:1]], r"block\.2\.segment: 2 is more than the blocks from there on; use 1"),
        (
            [*segment(3)[:2], KEPT],
            r"block\.2\.segment: 1 in the segment of 3 blocks that block\.0 begins; use 3",
        ),
        (
            [segment(2)[0], segment(2, save="input", saved_tiers={})[0], KEPT],
            r"block\.1\.save: 'input' in the segment of 2 blocks that block\.0 begins; use 'all'",
        ),
        (
            [KEPT, segment(2)[0], segment(2, "host")[0]],
            r"block\.2\.input_tier: host in the segment .*, which keeps no other; use gpu",
        ),
        (
            [*segment(2, saved_tiers={"intermediates": "nvme"}), KEPT],
            r"block\.0\.saved_tiers\.intermediates: nvme in the segment .*, which is made anew; use gpu",
        ),
    ],
)
def test_runs_that_are_no_segments_are_refused(choices: list[StagePlan], message: str) -> None:
    with pytest.raises(UsageError, match=rf"^plan: stages\.{message}$"):
        lowered(model(3, tied=False), choices)


def test_blocks_of_two_structures_form_no_segment() -> None:
    with pytest.raises(UsageError, match=r"block\.1\.segment: another structure than block\.0, in the segment of 2"):
        lowered(model(2, tied=False, structures="BC"), segment(2))


def test_ends_form_no_segment() -> None:
    stages = model(2, tied=False)
    plan = plan_of(stages, KEPT, END.model_copy(update={"segment": 2}))
    with pytest.raises(UsageError, match=r"^plan: stages\.embed\.segment: 2, but only blocks form segments; use 1$"):
        lower(plan, stages)
