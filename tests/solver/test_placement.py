"""The rows of the placement program and the window replay against the simulator, which shares no code with them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lazysched.schemas import Profile, Rate, StateFormat, Update
from lazysched.solver.bounds import count_bound_s
from lazysched.solver.choice_batch import ChoiceBatch
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.measured import offload_limits
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.pins import parse_pins
from lazysched.solver.plans import Choices
from lazysched.solver.search import TIE, simplified
from lazysched.solver.window_replay import WindowReplay
from tests.solver.fixed_choices import PLENTY, drawn, fixed_period, replayed
from tests.solver.synthetic import tiny_profile

EXACT = Update()
EARLY = Update(clip_norm=None, check_finite=False)
MB = 1_000_000
FAST_CPU, SLOW_CPU = 100e6, 20e6
"""Parameters per second: an update of a block in fp32 takes less than its forward, or more than its backward."""
CANDIDATES = [
    Candidate(micro_batch, accumulation, depth)
    for depth in (1, 2)
    for micro_batch, accumulation in ((1, 1), (1, 2), (1, 5), (2, 3), (1, 3))
]


def cases(
    tied: bool, offload: bool, update: Update = EXACT, cpu_params_per_s: float = FAST_CPU, saved_bytes: int = 20 * MB
) -> list[tuple[Profile, Instance, Choices]]:
    generator = random.Random(7)
    profile = tiny_profile(
        6, micro_batches=(1, 2), tied=tied, cpu_params_per_s=cpu_params_per_s, saved_bytes=saved_bytes
    )
    result = []
    formats: Iterator[StateFormat] = itertools.cycle(("hybrid8", "fp32"))
    for candidate, state_format in zip(CANDIDATES, formats, strict=False):
        limit = offload_limits(profile, candidate.micro_batch)[-1] if offload else 0
        candidate = replace(candidate, offload_limit_bytes=limit)
        instance = Instance(profile, candidate, state_format, update)
        result += [(profile, instance, drawn(instance, generator)) for _ in range(4)]
    return result


class TestMemory:
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize(("update", "saved_bytes"), [(EXACT, 20 * MB), (EARLY, 20 * MB), (EARLY, 2 * MB)])
    def test_window_replay_has_the_peaks_of_the_program_to_the_byte(
        self, tied: bool, update: Update, saved_bytes: int
    ) -> None:
        """With little saved, an early update in fp32 needs most, beside what blocks before it keep."""
        for profile, instance, choices in cases(tied, offload=False, update=update, saved_bytes=saved_bytes):
            evaluation = WindowReplay(instance).evaluate(ChoiceBatch.of([choices]))
            timeline = replayed(profile, instance, choices)
            peaks = timeline.peak_bytes
            assert round(evaluation.moved_gb[0] * 1e9) == timeline.pinned_bytes
            assert round(evaluation.gpu_gb[0] * 1e9) == peaks["gpu"]
            assert round(evaluation.host_gb[0] * 1e9) == peaks["host"]

    def test_8bit_moments_take_two_bytes_and_their_scales(self) -> None:
        profile = tiny_profile(3)
        choices = Choices(("streamed",) * 3, (0, 0, 0), 3)
        formats: tuple[StateFormat, ...] = ("fp32", "hybrid8")
        timelines = [replayed(profile, Instance(profile, Candidate(1, 1), f, EXACT), choices) for f in formats]
        large, small = (timeline.peak_bytes["host"] for timeline in timelines)
        # 5 M parameters: two fp32 moments against one byte each and two fp32 scales a block of 256.
        assert large - small == pytest.approx(5_000_000 * (8 - 2 - 8 / 256), rel=1e-3)
        assert timelines[1].step_s < timelines[0].step_s

    def test_slots_for_offloading_count_in_full_even_if_smaller_ones_would_do(self) -> None:
        for profile, instance, choices in cases(False, offload=True):
            evaluation = WindowReplay(instance).evaluate(ChoiceBatch.of([choices]))
            peaks = replayed(profile, instance, choices).peak_bytes
            largest = max(instance.saves[i][o].offloaded_gb for i, o in enumerate(choices.saves))
            spare_gb = (instance.moving_slot_gb - largest) * (instance.candidate.prefetch_depth + 3)
            assert round((evaluation.gpu_gb[0] - spare_gb) * 1e9) == peaks["gpu"]
            assert round(evaluation.host_gb[0] * 1e9) == peaks["host"]

    @pytest.mark.parametrize(("update", "saved_bytes"), [(EXACT, 20 * MB), (EARLY, 2 * MB)])
    def test_rows_allow_exactly_what_fits(self, update: Update, saved_bytes: int) -> None:
        for _, instance, choices in cases(False, offload=True, update=update, saved_bytes=saved_bytes)[::4]:
            evaluation = WindowReplay(instance).evaluate(ChoiceBatch.of([choices]))
            gpu_gb, host_gb = float(evaluation.gpu_gb[0]), float(evaluation.host_gb[0])
            least = 2e-6  # GB, above the solver's tolerance
            assert fixed_period(instance, choices, Budgets(gpu_gb + least, host_gb + least)) is not None
            assert fixed_period(instance, choices, Budgets(gpu_gb - least, host_gb + least)) is None
            assert fixed_period(instance, choices, Budgets(gpu_gb + least, host_gb - least)) is None


class TestTime:
    @pytest.mark.parametrize("cpu_params_per_s", [FAST_CPU, SLOW_CPU])
    @pytest.mark.parametrize("update", [EXACT, EARLY], ids=["exact", "early"])
    def test_window_replay_agrees_with_the_simulator_when_nothing_is_offloaded(
        self, update: Update, cpu_params_per_s: float
    ) -> None:
        for profile, instance, choices in cases(False, offload=False, update=update, cpu_params_per_s=cpu_params_per_s):
            simulated_s = replayed(profile, instance, choices).step_s
            replay_s = WindowReplay(instance).evaluate(ChoiceBatch.of([choices])).step_s[0]
            assert replay_s == pytest.approx(simulated_s, rel=5e-3)

    @pytest.mark.parametrize("update", [EXACT, EARLY], ids=["exact", "early"])
    def test_updates_that_copies_slow_down_are_in_window_replay_and_program(self, update: Update) -> None:
        slowed = 0
        for plain, instance, choices in cases(False, offload=False, update=update, cpu_params_per_s=SLOW_CPU):
            beside = {f: Rate(per_s=rate.per_s and rate.per_s / 2) for f, rate in plain.update["cpu"].items()}
            profile = plain.model_copy(update={"update_beside_copies": beside})
            instance = Instance(profile, instance.candidate, instance.state_format, update)
            simulated_s = replayed(profile, instance, choices).step_s
            replay_s = WindowReplay(instance).evaluate(ChoiceBatch.of([choices])).step_s[0]
            assert replay_s == pytest.approx(simulated_s, rel=0.02 if update.waits_for_norm else 0.05)
            assert fixed_period(instance, choices, PLENTY) == pytest.approx(simulated_s, rel=0.05)
            slowed += simulated_s > 1.01 * replayed(plain, instance, choices).step_s
        assert slowed >= 3

    @pytest.mark.parametrize("cpu_params_per_s", [FAST_CPU, SLOW_CPU])
    @pytest.mark.parametrize("update", [EXACT, EARLY], ids=["exact", "early"])
    def test_program_is_never_far_off(self, update: Update, cpu_params_per_s: float) -> None:
        for profile, instance, choices in cases(False, offload=False, update=update, cpu_params_per_s=cpu_params_per_s)[
            ::3
        ]:
            period_s = fixed_period(instance, choices, PLENTY)
            assert period_s == pytest.approx(replayed(profile, instance, choices).step_s, rel=0.05)

    @pytest.mark.parametrize("cpu_params_per_s", [FAST_CPU, SLOW_CPU])
    @pytest.mark.parametrize("update", [EXACT, EARLY], ids=["exact", "early"])
    def test_bounds_are_below_every_plan(self, update: Update, cpu_params_per_s: float) -> None:
        for profile, instance, choices in cases(False, offload=True, update=update, cpu_params_per_s=cpu_params_per_s)[
            ::3
        ]:
            simulated_s = replayed(profile, instance, choices).step_s
            assert count_bound_s(instance, PLENTY, 2) <= simulated_s * (1 + 1e-9)
            assert instance.compute_bound_s <= simulated_s * (1 + 1e-9)

    @pytest.mark.parametrize(("accumulation", "lag"), [(2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (5, 2), (2, 3)])
    def test_each_micro_batch_waits_for_the_slot_that_it_takes(self, accumulation: int, lag: int) -> None:
        """Blocks by turns send all, longer than a forward takes, and their input alone: the copies of a window end late
        in the next one, whose last micro-batch waits longer than its first."""
        profile = tiny_profile(8, micro_batches=(1,), saved_bytes=14 * MB)
        candidate = Candidate(1, accumulation, 1, lag, offload_limits(profile, 1)[-1])
        instance = Instance(profile, candidate, "fp32", EXACT)
        sent = [(option.tier, option.rest_stays, option.variant.name) for option in instance.saves[0]]
        everything, input_alone = sent.index(("host", False, "all")), sent.index(("host", False, "input"))
        saves = tuple(everything if i % 2 == 0 else input_alone for i in range(8))
        choices = Choices(("gpu",) * 8, saves, 0)
        step_s = replayed(profile, instance, choices).step_s
        assert fixed_period(instance, choices, PLENTY) == pytest.approx(step_s, rel=1e-6)
        assert WindowReplay(instance).evaluate(ChoiceBatch.of([choices])).step_s[0] == pytest.approx(step_s, rel=1e-6)


class TestExactClipping:
    def test_no_update_starts_before_the_last_gradient_has_arrived(self) -> None:
        profile = tiny_profile(3)
        instance = Instance(profile, Candidate(1, 1), "fp32", EXACT)
        choices = Choices(("streamed",) * 3, (0, 0, 0), 3)
        frame = replayed(profile, instance, choices).to_frame().query("step == 3").set_index("op")
        updates = frame[frame.index.str.startswith("update/")]
        gradients = frame[frame.index.str.startswith("grads/")]
        assert updates.start_s.min() >= gradients.end_s.max()
        # 5 updates of 10 ms after the backward: the forward of block 0 waits for two of them and its upload.
        period_s = fixed_period(instance, choices, PLENTY)
        assert period_s == pytest.approx(replayed(profile, instance, choices).step_s, rel=0.02)


class TestSimplicity:
    def test_of_equally_fast_plans_one_that_moves_less_and_has_fewer_kinds_is_taken(self) -> None:
        profile = tiny_profile(6)
        instance = Instance(profile, Candidate(1, 1), "hybrid8", EXACT)
        mixed = Choices(("gpu", "resident", "gpu", "streamed", "gpu", "resident"), (0,) * 6, 0)
        replay = WindowReplay(instance)
        simple = simplified(replay, PLENTY, mixed)
        assert simple.states == ("gpu",) * 6
        steps = [replay.evaluate(ChoiceBatch.of([choices])).step_s[0] for choices in (mixed, simple)]
        assert steps[1] <= steps[0] * (1 + TIE)

    def test_it_keeps_the_budget_and_what_is_fixed_by_hand(self) -> None:
        profile = tiny_profile(6)
        pins = parse_pins(["block[1].state=host"], profile.stages)
        instance = Instance(profile, Candidate(1, 1), "hybrid8", EXACT, pins)
        mixed = Choices(("gpu", "resident", "gpu", "streamed", "gpu", "streamed"), (0,) * 6, 0)
        replay = WindowReplay(instance)
        assert simplified(replay, PLENTY, mixed).states[1] != "gpu"
        tight = Budgets(float(replay.evaluate(ChoiceBatch.of([mixed])).gpu_gb[0]), 10.0)
        within = simplified(replay, tight, mixed)
        assert replay.fits(ChoiceBatch.of([within]), tight)[0]

    def test_traffic_is_that_of_the_program(self) -> None:
        for profile, instance, choices in cases(False, offload=True):
            moved = replayed(profile, instance, choices).moved_bytes
            traffic_gb = float(WindowReplay(instance).traffic_gb(ChoiceBatch.of([choices]))[0])
            assert traffic_gb * 1e9 == pytest.approx(sum(moved.values()), rel=1e-3)
