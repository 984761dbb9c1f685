"""A plan as a table, checked against its program, its prediction, and by hand."""

from __future__ import annotations

import pytest

from lazysched.lower import lower
from lazysched.schemas import Plan, Profile
from lazysched.solver import equal_runs, simulate_plan, solve
from lazysched.solver.plan_frame import plan_frame
from tests.solver.synthetic import tiny_profile

MB = 1_000_000
PROFILE = tiny_profile(4, micro_batches=(1, 2))
DECISIONS = ["weights", "state", "state_format", "save", "saved_tiers", "segment", "input_tier"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two micro-batches; every block keeps all but block 1, which keeps its input, and block 2 does so on the host."""
    solved = solve(PROFILE, batch_size=4, gpu_memory_bytes=1000 * MB, host_memory_bytes=1000 * MB, time_limit_s=3).plan
    if solved.micro_batch != 2:
        solved = solved.model_copy(update={"micro_batch": 2, "accumulation": 2})
    stages = dict(solved.stages)
    variants = {variant.name: variant for variant in PROFILE.variants["block"][2]}
    for number, (save, tier) in enumerate([("all", "gpu"), ("input", "gpu"), ("all", "host"), ("all", "gpu")]):
        groups = {"rest": tier} if save == "all" else {}
        update = {
            "weights": "host", "state": "host", "save": save, "saved_tiers": groups, "input_tier": tier,
        }  # fmt: skip
        stages[f"block.{number}"] = stages[f"block.{number}"].model_copy(update=update)
    ends = {f"{end}:all": PROFILE.variants[end][2][0] for end in ("embed", "head")}
    blocks = {f"block:{name}": variant for name, variant in variants.items()}
    return solved.model_copy(update={"stages": stages, "variants": ends | blocks})


def test_decisions_stand_as_in_the_plan(plan: Plan) -> None:
    frame = plan.to_frame()
    assert frame.index.tolist() == ["embed", "block.0", "block.1", "block.2", "block.3", "head"]
    assert frame.loc["block.1":"block.2", ["save", "saved_tiers", "input_tier"]].to_numpy().tolist() == [
        ["input", "", "gpu"],
        ["all", "host", "host"],
    ]
    for stage_id, choice in plan.stages.items():
        row = frame.loc[stage_id]
        assert (row.weights, row.state, row.state_format, row.segment) == (
            choice.weights, choice.state, choice.state_format, choice.segment,
        )  # fmt: skip


def test_bytes_and_seconds_are_those_of_a_step(plan: Plan) -> None:
    frame = plan.to_frame()
    # 1 MB of input and 20 MB of the rest a row, four rows a step.
    assert frame["saved_bytes"].tolist() == [0, 84 * MB, 4 * MB, 84 * MB, 84 * MB, 0]
    assert (frame.saved_gpu_bytes["block.2"], frame.saved_host_bytes["block.2"]) == (0, 84 * MB)
    # 10 ms a row more than the backward that has all.
    assert frame.recompute_s.tolist() == pytest.approx([0, 0, 0.04, 0, 0, 0])
    assert frame.weight_bytes.tolist() == [stage.weight_bytes for stage in PROFILE.stages]
    # Weights of 4 MB for each pass, but the last two blocks are still in their slots when the backward begins.
    assert frame.h2d_bytes["block.0":"block.3"].tolist() == [8 * MB, 8 * MB, (4 + 84) * MB, 4 * MB]
    # Gradients, and what is saved on the host.
    assert frame.d2h_bytes["block.0":"block.3"].tolist() == [4 * MB, 4 * MB, (4 + 84) * MB, 4 * MB]


def test_sums_are_those_of_the_simulator(plan: Plan) -> None:
    frame, timeline = plan.to_frame(), simulate_plan(plan)
    program = lower(plan, PROFILE.stages)
    of_no_stage = sum(op.num_bytes for op in program.ops.values() if op.engine == "h2d" and op.stage is None)
    assert frame.h2d_bytes.sum() + of_no_stage == timeline.moved_bytes["h2d"]
    assert frame.compute_s.sum() == pytest.approx(timeline.step_s - sum(timeline.exposed_s.values()))


def test_without_a_profile_there_are_decisions_alone(plan: Plan) -> None:
    frame = plan.model_copy(update={"profile": None}).to_frame()
    assert frame.columns.tolist() == DECISIONS
    assert frame.save.tolist() == plan.to_frame().save.tolist()


def test_another_profile_gives_other_costs(plan: Plan) -> None:
    slow = PROFILE.variants["block"][2]
    slower = [
        v.model_copy(update={"backward": v.backward.model_copy(update={"median_s": 3 * v.backward.seconds})})
        for v in slow
    ]
    machine: Profile = PROFILE.model_copy(
        update={"variants": {**PROFILE.variants, "block": {**PROFILE.variants["block"], 2: slower}}}
    )
    assert plan_frame(plan, machine).recompute_s["block.1"] == pytest.approx(3 * 0.04)


def test_of_a_segment_only_the_first_block_keeps_its_input(plan: Plan) -> None:
    """Such plans are not lowered yet; what they keep is the table's own reckoning."""
    from lazysched.solver.plan_frame import _saved, _with_inputs

    of_two = {"segment": 2, "save": "input", "saved_tiers": {}, "input_tier": "gpu"}
    stages = {
        stage_id: choice.model_copy(update=of_two) if stage_id.startswith("block.") else choice
        for stage_id, choice in plan.stages.items()
    }
    segmented = plan.model_copy(update={"stages": stages})
    kept = [_saved(segmented, stage, first)["saved_bytes"] for stage, first in _with_inputs(segmented, PROFILE)]
    assert kept == [0, 4 * MB, 0, 4 * MB, 0, 0]


def test_equal_neighbours_become_one_row(plan: Plan) -> None:
    runs = equal_runs(plan.to_frame()[["weights", "save"]])
    assert runs[runs.save == "input"].stages.tolist() == ["block.1"]
    assert "block.2 … block.3" in runs.stages.tolist()
