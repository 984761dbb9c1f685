"""A run's figures in the place of a profile's: the simulator then takes the run's durations, and nothing else moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazysched.errors import UsageError
from lazysched.lower import lower
from lazysched.profiles.refine import load_recording, refine
from lazysched.schemas import Curve, Plan, Profile, Program, Recording, TimedOp, Timing
from lazysched.schemas.recording import RECORDING_FILE
from lazysched.solver import simulate, solve
from lazysched.timeline import both_ways
from tests.solver.synthetic import tiny_profile

MB = 1_000_000
SLOWER = 3.0


def timed(cost: tuple[str, ...], median_s: float, num_bytes: int = 0, num_params: int = 0, repeats: int = 6) -> TimedOp:
    duration = Timing(median_s=median_s, spread_s=0.1 * median_s, repeats=repeats)
    return TimedOp(cost=cost, num_bytes=num_bytes, num_params=num_params, duration=duration)


def recording(profile: Profile, *durations: TimedOp, both: bool = False, micro_batch: int = 1) -> Recording:
    shared = {field: getattr(profile, field) for field in ("model_id", "hardware_id", "compute_dtype", "seq_len")}
    return Recording(
        **shared, loss_chunk_tokens=profile.loss_chunk_tokens, micro_batch=micro_batch, both_ways=both, steps=[3, 4],
        durations=list(durations),
    )  # fmt: skip


PROFILE = tiny_profile(micro_batches=(1, 2))


def test_a_variant_that_ran_takes_the_runs_timing_at_that_micro_batch_alone() -> None:
    refined = refine(PROFILE, recording(PROFILE, timed(("variant", "block", "input", "backward"), 0.5), micro_batch=2))
    kept, changed = refined.variants["block"][2]
    backward = changed.backward
    assert (backward.median_s, backward.spread_s, backward.repeats) == (0.5, pytest.approx(0.05), 6)
    assert changed.forward == PROFILE.variants["block"][2][1].forward
    assert kept == PROFILE.variants["block"][2][0]
    assert refined.variants["block"][1] == PROFILE.variants["block"][1]
    assert refined.notes == {
        "refined.variants.block.2.input.backward": "6 repeats in 2 steps of a run, micro-batches of 2 rows"
    }
    assert (refined.links, refined.update) == (PROFILE.links, PROFILE.update)


def test_a_size_that_was_moved_gets_its_rate_and_distant_points_stay() -> None:
    links = {**PROFILE.links, "h2d": Curve(points=[(MB, 1e9), (4 * MB, 2e9), (16 * MB, 3e9)])}
    profile = PROFILE.model_copy(update={"links": links})
    seen = [timed(("link", "h2d"), 0.01, num_bytes=5 * MB), timed(("link", "h2d"), 1e-5, num_bytes=100)]
    refined = refine(profile, recording(profile, *seen))
    assert refined.links["h2d"].points == [(100, 1e7), (MB, 1e9), (5 * MB, 5e8), (16 * MB, 3e9)]
    assert refined.links["h2d_both"] == profile.links["h2d_both"]


def test_where_both_ways_were_busy_their_curve_is_refined() -> None:
    refined = refine(PROFILE, recording(PROFILE, timed(("link", "d2h"), 0.01, num_bytes=5 * MB), both=True))
    assert refined.links["d2h_both"].points[-1] == (5 * MB, 5e8)
    assert refined.links["d2h"] == PROFILE.links["d2h"]


def test_copies_too_short_to_time_say_nothing() -> None:
    refined = refine(PROFILE, recording(PROFILE, timed(("link", "h2d"), 0.0, num_bytes=100)))
    assert refined == PROFILE


def test_an_update_rate_is_that_of_all_stages_together() -> None:
    updates = [
        timed(("update", "cpu", "fp32"), 0.1, num_params=1000, repeats=6),
        timed(("update", "cpu", "fp32"), 0.4, num_params=8000, repeats=2),
    ]
    refined = refine(PROFILE, recording(PROFILE, *updates))
    rate = refined.update["cpu"]["fp32"]
    assert rate.per_s == pytest.approx((6 * 1000 + 2 * 8000) / (6 * 0.1 + 2 * 0.4))
    assert (rate.spread, rate.repeats) == (pytest.approx(0.1), 8)
    assert refined.update["gpu"] == PROFILE.update["gpu"]
    assert refined.update["cpu"]["hybrid8"] == PROFILE.update["cpu"]["hybrid8"]


@pytest.mark.parametrize("gpu_bytes", [50 * MB, 900 * MB])
def test_a_plan_simulated_again_takes_what_its_operations_took(gpu_bytes: int) -> None:
    """Everything slower by one factor, so that the step is too."""
    solution = solve(PROFILE, batch_size=2, gpu_memory_bytes=gpu_bytes, host_memory_bytes=1000 * MB, time_limit_s=5)
    plan = solution.plan
    program = lower(plan, PROFILE.stages)
    refined = refine(PROFILE, slower(plan, program))
    before, after = (simulate(program, p, micro_batch=plan.micro_batch) for p in (PROFILE, refined))
    assert after.step_s == pytest.approx(SLOWER * before.step_s)


def slower(plan: Plan, program: Program) -> Recording:
    """A run that took ``SLOWER`` times what the simulator thinks."""
    timeline = simulate(program, PROFILE, micro_batch=plan.micro_batch)
    durations = {}
    for interval in timeline.intervals:
        op = program.ops[interval.op]
        key = (op.cost, op.num_bytes, op.num_params)
        durations[key] = timed(op.cost, SLOWER * interval.duration_s, op.num_bytes, op.num_params)
    costly = [op for op in durations.values() if op.cost]
    return recording(PROFILE, *costly, both=both_ways(program), micro_batch=plan.micro_batch)


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_id", "another"), ("hardware_id", "another"), ("compute_dtype", "bfloat16"), ("seq_len", 99),
     ("loss_chunk_tokens", 99)],
)  # fmt: skip
def test_a_run_of_something_else_is_refused(field: str, value: object) -> None:
    other = recording(PROFILE).model_copy(update={field: value})
    with pytest.raises(UsageError, match=f"from_run: {field}: the run had {value}, the profile has"):
        refine(PROFILE, other)


@pytest.mark.parametrize(
    ("op", "named"),
    [
        (timed(("variant", "block", "half", "forward"), 1.0), r"variants\.block\.1\.half"),
        (timed(("variant", "strange", "all", "forward"), 1.0), r"variants\.strange\.1\.all"),
        (timed(("link", "nvme_read"), 1.0, num_bytes=5), r"links\.nvme_read"),
        (timed(("update", "cpu", "int4"), 1.0, num_params=5), r"update\.cpu\.int4"),
        (timed(("magic",), 1.0), r"cost \('magic',\)"),
    ],
)
def test_what_the_profile_does_not_have_is_refused(op: TimedOp, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        refine(PROFILE, recording(PROFILE, op))


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        load_recording(tmp_path / "absent")
    with pytest.raises(UsageError, match=f"has no {RECORDING_FILE}"):
        load_recording(tmp_path)
    recording(PROFILE).save(tmp_path / RECORDING_FILE)
    assert load_recording(tmp_path) == recording(PROFILE)
    with pytest.raises(UsageError, match="is a recording, not a profile"):
        Profile.load(tmp_path / RECORDING_FILE)
    PROFILE.save(tmp_path / RECORDING_FILE)
    with pytest.raises(UsageError, match="is a profile, not a recording"):
        load_recording(tmp_path)
