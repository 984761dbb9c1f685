"""Plans with files and segments are predicted: hand-solved cases, and memory by another walk for random plans."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazysched.lower import lower
from lazysched.schemas import Plan, Profile, Program, StagePlan, Tier, variant_key
from lazysched.solver import simulate
from lazysched.solver.simulate import Timeline
from tests.lowering.plans import plans
from tests.solver.synthetic import curve, tiny_profile

MB = 1_000_000
END = StagePlan(weights="gpu", state="gpu")


def with_files(profile: Profile) -> Profile:
    """Reads take 1 ms a MB, writes 2 ms."""
    links = {**profile.links, "nvme_read": curve(1e9), "nvme_write": curve(0.5e9)}
    return profile.model_copy(update={"links": links})


def plan_of(profile: Profile, choice: StagePlan, first: StagePlan | None = None) -> Plan:
    """One row a step; embedding and head on the GPU, all blocks alike, the first one apart if wanted."""
    stages = {stage.id: choice if stage.is_block else END for stage in profile.stages}
    return Plan(
        model_id=profile.model_id, hardware_id="h", compute_dtype="float32", batch_size=1, seq_len=16, micro_batch=1,
        accumulation=1, loss_chunk_tokens=16, budget_bytes={}, stages=stages | ({"block.0": first} if first else {}),
        variants={variant_key(s, v.name): v for s, by_size in profile.variants.items() for v in by_size[1]},
    )  # fmt: skip


def since_factor_ms(timeline: Timeline, step: int, *, factor_of: int) -> dict[str, tuple[float, float]]:
    """Operation of ``step`` -> start and end in ms since the factor of step ``factor_of`` reached the host."""
    frame = timeline.to_frame()
    zero_s = frame[(frame.step == factor_of) & (frame.op == "scale/copy")].end_s.item()
    rows = frame[frame.step == step]
    times = zip(rows.op, rows.start_s, rows.end_s, strict=True)
    return {op: (1000 * (start_s - zero_s), 1000 * (end_s - zero_s)) for op, start_s, end_s in times}


def near(start_ms: float, end_ms: float) -> object:
    """Within what the few operations on small tensors take."""
    return pytest.approx((start_ms, end_ms), abs=0.05)


def test_three_slots_pass_state_between_files_and_updates() -> None:
    """Each block: 8 MB of state read in 8 ms, updated in 10, written in 16; 4 MB of weights uploaded in 4."""
    profile = with_files(tiny_profile(num_blocks=4, vocabulary_params=10))
    choice = StagePlan(weights="gpu", state="nvme", saved_tiers={"rest": "gpu"})
    timeline = simulate(lower(plan_of(profile, choice), profile.stages), profile, micro_batch=1, steps=4)
    here = since_factor_ms(timeline, 2, factor_of=2)
    assert [here[f"update/block.{i}"] for i in range(4)] == [near(0, 10), near(10, 20), near(20, 30), near(34, 44)]
    assert [here[f"write/state/block.{i}"] for i in range(4)] == [
        near(10, 26), near(26, 42), near(42, 58), near(58, 74)
    ]  # fmt: skip
    assert here["read/state/block.3"] == near(26, 34)  # the first slot is written
    assert here["read/state/block.2"][1] < -50  # long before the norm
    # The next step: uploads end at 14, 24, 34 and 48, so the fourth forward waits 4 ms. It ends at 58, head and
    # embedding take 16, the backward 80, and 3 after the embedding's the first block's gradient is on the host.
    assert timeline.step_s == pytest.approx(0.157, abs=5e-5)
    assert timeline.moved_bytes["nvme_read"] == timeline.moved_bytes["nvme_write"] == 4 * 8 * MB
    assert timeline.peak_bytes["nvme"] == 4 * 8 * MB
    assert timeline.peak_bytes["host"] == pytest.approx(3 * 8 * MB + 4 * (4 + 4) * MB, abs=1000)
    assert timeline.pinned_bytes == pytest.approx(4 * (4 + 4) * MB, abs=1000)


def test_a_segment_runs_forward_again_and_its_weights_come_when_they_are_needed() -> None:
    """Three streamed blocks, two slots: 10 ms forward, 20 backward, 4 an upload, 10 an update."""
    profile = tiny_profile(num_blocks=3, vocabulary_params=10)
    choice = StagePlan(weights="host", state="host", saved_tiers={"rest": "gpu"}, segment=3)
    program = lower(plan_of(profile, choice), profile.stages)
    timeline = simulate(program, profile, micro_batch=1, steps=4)
    here = since_factor_ms(timeline, 2, factor_of=1)
    expected = {
        "load/block.0/forward": (10, 14), "forward/block.0/0": (14, 24), "load/block.1/forward": (20, 24),
        "forward/block.1/0": (24, 34), "load/block.2/forward": (30, 34), "forward/block.2/0": (34, 44),
        "loss/head/0": (44, 59), "load/block.0/recompute": (34, 38), "recompute/block.0/0": (59, 69),
        "load/block.1/recompute": (44, 48), "recompute/block.1/0": (69, 79),
        "load/block.2/recompute": (69, 73), "recompute/block.2/0": (79, 89), "backward/block.2/0": (89, 109),
        "load/block.0/backward": (109, 113), "backward/block.1/0": (109, 129), "backward/block.0/0": (129, 149),
    }  # fmt: skip
    assert {op: here[op] for op in expected} == {op: near(*times) for op, times in expected.items()}
    assert {op for op in here if op.startswith("load/")} == {op for op in expected if op.startswith("load/")}
    assert timeline.step_s == pytest.approx(0.153, abs=5e-5)
    # What three blocks save, two slots of weights and two of gradients, an input, two inner ones, a gradient and
    # one more; the backward's working set; the driver's tables of 24 MB that are page-locked.
    expected_bytes = (3 * 20 + 2 * 4 + 2 * 4 + 5 * 1 + 2) * MB + 24 * MB * 8 / 4096
    assert timeline.peak_bytes["gpu"] == pytest.approx(expected_bytes, abs=1000)


def lived_bytes(program: Program, tier: Tier) -> int:
    """Most bytes of ``tier``, with what a step makes alive from its first writer to its last reader."""
    made = {buffer.id for buffer in program.buffers.values() if buffer.alloc_at is not None}
    used: dict[str, list[int]] = {}
    for index, op in enumerate(program.ops.values()):
        for buffer_id in made & {*op.reads, *op.writes}:
            used.setdefault(buffer_id, []).append(index)
    buffers = [buffer for buffer in program.buffers.values() if buffer.tier == tier]
    lasting = sum(buffer.num_bytes for buffer in buffers if buffer.id not in made)
    return max(
        lasting
        + sum(b.num_bytes for b in buffers if b.id in used and used[b.id][0] <= index <= used[b.id][-1])
        + (op.working_bytes if tier == "gpu" else 0)
        for index, op in enumerate(program.ops.values())
    )  # fmt: skip


def read_bytes(plan: Plan, profile: Profile, program: Program) -> int:
    """What a step reads from files: state, weights for every upload, and what was saved there."""
    total, by_id = 0, {stage.id: stage for stage in profile.stages}
    for stage_id, choice in plan.stages.items():
        stage = by_id[stage_id]
        state = program.buffers[f"{choice.state}/state/{stage_id}"].num_bytes
        total += (choice.state == "nvme") * state
        if choice.weights == "nvme":
            uploads = [op for op in program.ops if op.startswith(f"load/{stage_id}/")]
            total += stage.weight_bytes * (1 + len(uploads))
        variant = plan.variants[variant_key(stage.structure, choice.save)]
        tiers = {"input": choice.input_tier} | choice.saved_tiers
        total += plan.accumulation * sum(size for group, size in variant.saved.items() if tiers[group] == "nvme")
    return total


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Profile]:
    profile = with_files(
        tiny_profile(num_blocks=draw(st.integers(1, 5)), vocabulary_params=1000, tied=draw(st.booleans()))
    )
    variants = {variant_key(s, v.name): v for s, by_size in profile.variants.items() for v in by_size[1]}
    plan = draw(
        plans(
            profile.stages, variants, micro_batch=1, accumulation=draw(st.integers(1, 3)), seq_len=16,
            clip_norm=draw(st.sampled_from([1.0, None])), formats=("fp32",), executable=False,
        )
    )  # fmt: skip
    return plan.model_copy(update={"host_memory": "pinned"}), profile


@settings(max_examples=100, deadline=None)
@given(cases())
def test_random_plans_run_and_are_accounted_for(case: tuple[Plan, Profile]) -> None:
    plan, profile = case
    program = lower(plan, profile.stages)
    timeline = simulate(program, profile, micro_batch=1)
    tiers: tuple[Tier, ...] = ("host", "nvme")
    for tier in tiers:
        assert timeline.peak_bytes[tier] == lived_bytes(program, tier)
    tables = round(timeline.pinned_bytes * 8 / 4096)
    assert timeline.peak_bytes["gpu"] == lived_bytes(program, "gpu") + tables + profile.context_bytes
    assert timeline.moved_bytes.get("nvme_read", 0) == read_bytes(plan, profile, program)
