"""``solve`` against brute force, by hand, and in what must always hold."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lazysched.errors import InfeasibleError, UsageError
from lazysched.layout import mapping_bytes
from lazysched.lower import lower
from lazysched.schemas import Curve, Profile, Rate, StateFormat, Timing, Update
from lazysched.solver import Solution, print_solution, simulate, simulate_plan, solve
from lazysched.solver.bounds import count_bound_s
from lazysched.solver.infeasible import MARGIN_BYTES
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.measured import offload_limits
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.options import STATE_CHOICES
from lazysched.solver.plans import Choices, make_plan
from tests.solver.synthetic import CARD, FAST, SHAPE_3B, SHAPE_7B, Shape, large_profile, timing, tiny_profile

GAP = 0.01
MB = 1_000_000


EXACT, EARLY = Update(), Update(clip_norm=None, check_finite=False)


def solved(
    profile: Profile, gpu_bytes: int, host_bytes: int = 1000 * MB, batch_size: int = 1, update: Update = EXACT,
    optimizer_state: StateFormat = "hybrid8",
) -> Solution:  # fmt: skip
    return solve(
        profile, batch_size=batch_size, gpu_memory_bytes=gpu_bytes, host_memory_bytes=host_bytes, gap=GAP,
        time_limit_s=20, max_grad_norm=update.clip_norm, check_finite=update.check_finite,
        optimizer_state=optimizer_state,
    )  # fmt: skip


@cache
def every_plan(
    num_blocks: int, tied: bool, update: Update = EXACT, cpu_params_per_s: float = 100e6
) -> list[tuple[float, int, int]]:
    """(step time, GPU peak, host peak) of every plan there is for a batch of one row."""
    profile = tiny_profile(num_blocks, tied=tied, cpu_params_per_s=cpu_params_per_s)
    result = []
    for depth, lag in itertools.product((1, 2), (0, 1)):  # the first needs least memory
        instance = Instance(profile, Candidate(1, 1, depth, lag, offload_limits(profile, 1)[-1]), "hybrid8", update)
        for states in itertools.product(STATE_CHOICES[:3], repeat=num_blocks):
            for saves in itertools.product(*(range(len(options)) for options in instance.saves)):
                for vocabulary in range(len(instance.vocabulary_options)):
                    plan = make_plan(instance, Choices(states, saves, vocabulary), budget_bytes={})
                    timeline = simulate(lower(plan, profile.stages), profile, micro_batch=1, steps=4)
                    result.append((timeline.step_s, timeline.peak_bytes["gpu"], timeline.peak_bytes["host"]))
    return result


def test_masks_and_positions_of_packed_rows_are_in_the_peak() -> None:
    flat = tiny_profile(micro_batches=(2,))
    packed = flat.model_copy(update={"packing": True, "argument_bytes": {2: 3 * MB}})
    plans = [solved(profile, 1000 * MB, batch_size=6).plan for profile in (flat, packed)]
    assert [(plan.packing, plan.argument_bytes) for plan in plans] == [(False, 0), (True, 3 * MB)]
    assert plans[0].stages == plans[1].stages
    peaks = [plan.predicted.peak_bytes for plan in plans if plan.predicted]
    positions_bytes = 8 * 6 * flat.seq_len
    # Three micro-batches, each with arguments of its own.
    expected = 3 * 3 * MB + positions_bytes + mapping_bytes(positions_bytes)
    assert peaks[1]["gpu"] - peaks[0]["gpu"] == pytest.approx(expected, abs=1)
    assert peaks[1]["host"] - peaks[0]["host"] == positions_bytes
    constants = [Instance(p, Candidate(2, 3), "hybrid8", EXACT).gpu_constant_gb for p in (flat, packed)]
    assert constants[1] - constants[0] == pytest.approx((3 * 3 * MB + positions_bytes) / 1e9)


class TestBruteForce:
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize(("update", "cpu_params_per_s"), [(EXACT, 100e6), (EXACT, 20e6), (EARLY, 20e6)])
    def test_no_plan_is_faster_by_more_than_the_gap(self, tied: bool, update: Update, cpu_params_per_s: float) -> None:
        everything = every_plan(2, tied, update, cpu_params_per_s)
        profile = tiny_profile(2, tied=tied, cpu_params_per_s=cpu_params_per_s)
        candidates = [Candidate(1, 1, 1, 0, limit) for limit in offload_limits(profile, 1)]
        instances = [Instance(profile, candidate, "hybrid8", update) for candidate in candidates]
        least = min(gpu for _, gpu, _ in everything)
        for gpu_bytes in (least, least + 5 * MB, least + 15 * MB, least + 30 * MB, least + 100 * MB):
            best_s = min(step for step, gpu, _ in everything if gpu <= gpu_bytes)
            budgets = Budgets(instances[0].usable_gpu_gb(gpu_bytes), 1.0)
            assert min(count_bound_s(i, budgets, 2) for i in instances) <= best_s * (1 + 1e-9), f"budget {gpu_bytes}"
            found_s = solved(profile, gpu_bytes, update=update).timeline.step_s
            assert found_s <= best_s * (1 + GAP), f"budget {gpu_bytes}"

    def test_with_a_tight_host(self) -> None:
        everything = every_plan(2, tied=False)
        for gpu_bytes, host_bytes in ((60 * MB, 40 * MB), (50 * MB, 50 * MB), (90 * MB, 20 * MB)):
            fitting = [step for step, gpu, host in everything if gpu <= gpu_bytes and host <= host_bytes]
            if not fitting:
                with pytest.raises(InfeasibleError):
                    solved(tiny_profile(2), gpu_bytes, host_bytes)
                continue
            assert solved(tiny_profile(2), gpu_bytes, host_bytes).timeline.step_s <= min(fitting) * (1 + GAP)

    @pytest.mark.parametrize(("gpu_mb", "step_s"), [(40, 0.4634), (50, 0.4367), (60, 0.4111)])
    def test_one_slot_for_what_leaves_makes_room(self, gpu_mb: int, step_s: float) -> None:
        """With two, no plan fits 40 MB, and those that fit 50 and 60 take 0.4634 and 0.4367 s."""
        profile = tiny_profile(3, link_bytes_per_s=300e6)
        solution = solved(profile, gpu_mb * MB, batch_size=3)
        assert solution.plan.d2h_lag == 0
        assert solution.timeline.step_s == pytest.approx(step_s, rel=1e-3)
        assert min(tried.bound_s for tried in solution.tried) <= solution.timeline.step_s * (1 + 1e-4)
        with_two = simulate_plan(solution.plan.model_copy(update={"d2h_lag": 1}), steps=4)
        assert with_two.peak_bytes["gpu"] > gpu_mb * MB

    @pytest.mark.slow
    def test_three_blocks(self) -> None:
        everything = every_plan(3, tied=False)
        least = min(gpu for _, gpu, _ in everything)
        for gpu_bytes in range(least, least + 120 * MB, 10 * MB):
            best_s = min(step for step, gpu, _ in everything if gpu <= gpu_bytes)
            assert solved(tiny_profile(3), gpu_bytes).timeline.step_s <= best_s * (1 + GAP)


class TestByHand:
    def test_with_plenty_of_memory_nothing_waits_and_nothing_is_recomputed(self) -> None:
        solution = solved(tiny_profile(3), 1000 * MB)
        assert {solution.plan.stages[f"block.{i}"].save for i in range(3)} == {"all"}
        # embedding 1 + 1, blocks 3 * (10 + 20), head 15 ms; updates and norms on the GPU take microseconds
        assert solution.timeline.step_s == pytest.approx(0.107, rel=0.01)
        assert sum(solution.timeline.exposed_s.values()) == pytest.approx(0, abs=1e-4)

    def test_memory_for_one_more_kept_block_keeps_one_more(self) -> None:
        # Slow link: nothing can leave; all states on the GPU, so that only the saved tensors compete for the rest.
        profile = tiny_profile(3, link_bytes_per_s=1e7, saved_bytes=200 * MB)
        full = solved(profile, 2000 * MB).timeline.peak_bytes["gpu"]
        for kept in (1, 2, 3):
            solution = solved(profile, full - (3 - kept) * 200 * MB, host_bytes=2000 * MB)
            assert sum(solution.plan.stages[f"block.{i}"].save == "all" for i in range(3)) == kept

    def test_updates_run_beside_the_backward_where_no_update_waits_for_the_norm(self) -> None:
        # All states on the host, whose updates of 1 + 3 + 1 times 25 ms are longer than the backward of 3 * 20 ms.
        profile = tiny_profile(3, cpu_params_per_s=20e6)
        least = min(gpu for _, gpu, _ in every_plan(2, tied=False))
        exact, early = (solved(profile, least + 8 * MB, update=update) for update in (EXACT, EARLY))
        assert early.plan.stages["block.2"].state == "host"
        ops = {interval.op: interval for interval in early.timeline.intervals if interval.step == 2}
        assert ops["update/block.2"].start_s < ops["backward/embed/0"].start_s
        ops = {interval.op: interval for interval in exact.timeline.intervals if interval.step == 2}
        assert ops["update/block.2"].start_s >= ops["totals"].end_s
        assert early.timeline.step_s < exact.timeline.step_s

    def test_accumulation_is_micro_batches_per_batch(self) -> None:
        plan = solved(tiny_profile(2, micro_batches=(1, 2, 4)), 1000 * MB, batch_size=4).plan
        assert plan.micro_batch * plan.accumulation == 4

    def test_a_longer_forward_for_a_shorter_backward_pays_where_updates_on_the_host_bind(self) -> None:
        """T = backward + updates: what a variant adds to the forward hides beside the updates."""
        profile = tiny_profile(4, link_bytes_per_s=1e10, cpu_params_per_s=40e6)
        most = profile.variants["block"][1][0]
        forward_s, backward_s = most.forward.seconds * 1.45, most.backward.seconds * 0.8
        odd = {"name": "odd", "forward": timing(forward_s), "backward": timing(backward_s)}
        both = {1: [*profile.variants["block"][1], most.model_copy(update=odd)]}
        other = profile.model_copy(update={"variants": {**profile.variants, "block": both}})
        assert forward_s + backward_s > most.forward.seconds + most.backward.seconds
        pins = [f"{stage}.state=host" for stage in ("embed", "block[0:4]", "head")]
        steps = [
            solve(p, batch_size=1, gpu_memory_bytes=1000 * MB, host_memory_bytes=1000 * MB, pins=pins).timeline.step_s
            for p in (profile, other)
        ]
        assert steps[1] < steps[0] * 0.97


class TestAlways:
    @settings(max_examples=8, deadline=None)
    @given(extra=st.integers(0, 120), host=st.integers(60, 200), batch=st.sampled_from([1, 2, 4]))
    def test_simulation_of_the_plan_keeps_the_budgets(self, extra: int, host: int, batch: int) -> None:
        profile = tiny_profile(4, micro_batches=(1, 2))
        try:
            solution = solved(profile, (40 + extra) * MB, host * MB, batch)
        except InfeasibleError:
            return
        plan = solution.plan
        again = simulate(lower(plan, profile.stages), profile, micro_batch=plan.micro_batch, steps=4)
        assert again.peak_bytes["gpu"] <= (40 + extra) * MB
        assert again.peak_bytes["host"] <= host * MB
        assert plan.predicted == again.prediction()
        assert all(r.timeline is None or again.step_s <= r.timeline.step_s for r in solution.recipes)

    def test_more_memory_is_never_slower(self) -> None:
        profile = tiny_profile(4)
        steps = [solved(profile, size * MB).timeline.step_s for size in (42, 50, 65, 80, 100, 130, 180)]
        for less, more in itertools.pairwise(steps):
            assert more <= less * (1 + GAP)

    def test_same_seed_same_plan(self) -> None:
        profile = tiny_profile(4)
        first, second = (solved(profile, 70 * MB).plan for _ in range(2))
        assert first.stages == second.stages

    @pytest.mark.parametrize(
        ("shape", "machine", "batch_size", "gpu_bytes"),
        [(SHAPE_3B, FAST, 32, 20_000 * MB), (SHAPE_7B, CARD, 16, 24_000 * MB)],
    )
    def test_large_models_beat_every_recipe(self, shape, machine, batch_size, gpu_bytes) -> None:  # type: ignore[no-untyped-def]
        profile = large_profile(shape, machine, 32, micro_batches=(4, 8))
        solution = solved(profile, gpu_bytes, 200_000 * MB, batch_size)
        report = solution.plan.solver
        assert report is not None
        assert report.bound_s <= report.objective_s
        fitting = [r.timeline.step_s for r in solution.recipes if r.timeline is not None]
        assert fitting
        assert solution.timeline.step_s < min(fitting)
        assert solution.timeline.peak_bytes["gpu"] <= gpu_bytes


class TestInfeasible:
    def test_says_which_budget_and_how_much(self) -> None:
        least = min(gpu for _, gpu, _ in every_plan(2, tied=False))
        with pytest.raises(
            InfeasibleError, match=r"no plan fits .* of gpu and 1 GB of host memory: \+3\.\d+ MB gpu"
        ) as e:
            solved(tiny_profile(2), least - 3 * MB)
        assert set(e.value.missing_bytes) == {"gpu"}
        assert 3 * MB <= e.value.missing_bytes["gpu"] <= 3 * MB + 2 * MARGIN_BYTES

    @settings(max_examples=6, deadline=None)
    @given(gpu=st.integers(5, 60), host=st.integers(1, 60))
    def test_adding_what_is_missing_makes_it_feasible(self, gpu: int, host: int) -> None:
        profile = tiny_profile(3)
        try:
            solved(profile, gpu * MB, host * MB)
        except InfeasibleError as error:
            for tier, size in error.missing_bytes.items():
                more = {"gpu": gpu * MB, "host": host * MB}
                more[tier] += size
                solved(profile, more["gpu"], more["host"])

    def test_the_whole_batch_at_once_may_need_least(self) -> None:
        """Accumulation costs an fp32 accumulator, here more than the larger working set."""
        wide = large_profile(Shape(4096, 16384, 512, 32000, tied=False), FAST, 2, micro_batches=(1, 2, 4))
        small = {"working_forward_bytes": MB, "working_backward_bytes": MB, "saved": {"input": 2560}}
        variants = {
            structure: {
                size: [variant.model_copy(update=small if variant.name == "input" else {}) for variant in found]
                for size, found in by_size.items()
            }
            for structure, by_size in wide.variants.items()
        }
        wide = wide.model_copy(update={"variants": variants})
        alone = {structure: {4: by_size[4]} for structure, by_size in variants.items()}
        missing = []
        for profile in (wide, wide.model_copy(update={"variants": alone})):
            with pytest.raises(InfeasibleError) as error:
                solve(profile, batch_size=4, gpu_memory_bytes=10**9, host_memory_bytes=10**12)
            missing.append(error.value.missing_bytes["gpu"])
        assert missing[0] <= missing[1] * 1.005


class TestRefusals:
    def test_nvme(self) -> None:
        with pytest.raises(UsageError, match="nvme_bytes: 5: the runtime does not execute files yet; use 0"):
            solve(tiny_profile(), batch_size=1, nvme_bytes=5)

    def test_batch_that_no_micro_batch_divides(self) -> None:
        with pytest.raises(UsageError, match=r"batch_size: 3 is no multiple of a profiled micro-batch \(2, 4\)"):
            solve(tiny_profile(micro_batches=(2, 4)), batch_size=3)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"batch_size": 0}, "batch_size: 0"),
            ({"batch_size": 1, "gpu_memory_bytes": -1}, "gpu_memory: -1 bytes"),
            ({"batch_size": 1, "time_limit_s": 0}, "time_limit_s: 0"),
            ({"batch_size": 1, "gap": 1.5}, "gap: 1.5"),
            ({"batch_size": 1, "optimizer_state": "int4"}, "optimizer_state: 'int4' is not known; use fp32 or hybrid8"),
            ({"batch_size": 1, "max_grad_norm": float("inf")}, "max_grad_norm: inf is not a positive number; give 0"),
            ({"batch_size": 1, "check_finite": False}, "check_finite: clipping to max_grad_norm 1.0 waits"),
        ],
    )
    def test_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            solve(tiny_profile(), **arguments)

    def test_null_figures_are_named(self) -> None:
        profile = tiny_profile()
        links = {**profile.links, "d2h": Curve(reason="no GPU")}
        with pytest.raises(UsageError, match=r"links\.d2h: not measured \(no GPU\)"):
            solve(profile.model_copy(update={"links": links}), batch_size=1)
        with pytest.raises(UsageError, match=r"free_bytes\.gpu: null; give --gpu-memory"):
            solve(profile.model_copy(update={"free_bytes": {"gpu": None}}), batch_size=1)
        update = {
            **profile.update,
            "cpu": {"fp32": profile.update["cpu"]["fp32"], "hybrid8": Rate(per_s=None, reason="x")},
        }
        with pytest.raises(UsageError, match=r"update\.cpu\.hybrid8: not measured \(x\); profile again"):
            solve(profile.model_copy(update={"update": update}), batch_size=1)
        solve(profile.model_copy(update={"update": update}), batch_size=1, optimizer_state="fp32")
        broken = [
            v.model_copy(update={"forward": Timing(median_s=None, reason="oom")}) for v in profile.variants["head"][1]
        ]
        variants = {**profile.variants, "head": {1: broken}}
        with pytest.raises(UsageError, match=r"variants\.head\.1\.all: not measured \(oom\)"):
            solve(profile.model_copy(update={"variants": variants}), batch_size=1)


class TestSurroundings:
    def test_report_shows_plan_prediction_and_recipes(self) -> None:
        profile = tiny_profile(4)
        console = Console(width=140)
        with console.capture() as capture:
            print_solution(solved(profile, 60 * MB), profile, console)
        text = capture.get()
        for expected in (
            "block.",
            "tokens/s",
            "gpu peak",
            "of 60 MB",
            "checkpoint every block",
            "lower bound",
            "hybrid8 on",
        ):
            assert expected in text

    def test_recipes_that_do_not_fit_stand_below_those_that_do(self) -> None:
        """At 80 columns, a line each but for the longest name."""
        profile = tiny_profile(4)
        console = Console(width=80, record=True)
        print_solution(solved(profile, 60 * MB), profile, console)
        lines = [line.rstrip() for line in console.export_text().splitlines()]
        assert "do not fit: keep all activations" in lines
        first = next(i for i, line in enumerate(lines) if line.startswith("┃ recipe"))
        rows = [
            line.strip("│ ").split(" │ ") for line in lines[first + 2 : lines.index(lines[-1], first)] if "│" in line
        ]
        assert [row[0].strip() for row in rows] == [
            "this plan", "checkpoint every block", "checkpoint every block, inputs on host",
            "one variant for all blocks", "everything streamed, inputs kept", "everything streamed, inputs anywhere",
        ]  # fmt: skip
        assert all(row[-1].endswith("%") for row in rows[1:])

    def test_imports_no_torch(self) -> None:
        code = "import sys, lazysched.solver; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True)
