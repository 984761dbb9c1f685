"""Plans with files: window replay and program against the simulator, to the byte and within a few percent."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lazysched.errors import InfeasibleError, UsageError
from lazysched.schemas import Curve, Profile, Update
from lazysched.solver import Solution, solve
from lazysched.solver.bounds import count_bound_s, least_missing_gb
from lazysched.solver.choice_batch import ChoiceBatch
from lazysched.solver.instance import Instance
from lazysched.solver.measured import offload_limits
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.options import EVERYTHING
from lazysched.solver.plans import Choices
from lazysched.solver.search import TIE
from lazysched.solver.window_replay import WindowReplay
from tests.solver.synthetic import tiny_profile
from tests.solver.test_placement import CANDIDATES, EARLY, EXACT, fixed_period, replayed

MB = 10**6
PLENTY = Budgets(10.0, 10.0, nvme_gb=10.0)
FAST, SLOW = 2e9, 0.2e9
"""Files, bytes/s; copies take 1e9."""


def with_files(profile: Profile, bytes_per_s: float) -> Profile:
    curve = Curve(points=[(1, bytes_per_s)])
    return profile.model_copy(update={"links": {**profile.links, "nvme_read": curve, "nvme_write": curve}})


def drawn(instance: Instance, generator: random.Random, alike: bool) -> Choices:
    """Random choices; ``alike``: every block the same."""
    states = [generator.choice(choices) for choices in instance.states]
    saves = [generator.randrange(len(options)) for options in instance.saves]
    if alike:
        states, saves = [states[0]] * len(states), [saves[0]] * len(saves)
    return Choices(tuple(states), tuple(saves), generator.randrange(len(instance.vocabulary_options)))


def cases(update: Update, bytes_per_s: float, *, alike: bool) -> Iterator[tuple[Profile, Instance, Choices]]:
    generator = random.Random(11)
    for tied in (False, True):
        profile = with_files(tiny_profile(6, micro_batches=(1, 2), tied=tied), bytes_per_s)
        for candidate in CANDIDATES:
            limit = offload_limits(profile, candidate.micro_batch)[-1]
            instance = Instance(
                profile, replace(candidate, offload_limit_bytes=limit), "hybrid8", update, (), EVERYTHING
            )
            assert instance.uses_files
            for _ in range(4):
                yield profile, instance, drawn(instance, generator, alike)


def test_window_replay_has_peaks_and_traffic_of_the_program() -> None:
    for profile, instance, choices in cases(EXACT, FAST, alike=False):
        evaluation = WindowReplay(instance).evaluate(ChoiceBatch.of([choices]))
        timeline = replayed(profile, instance, choices)
        largest = max(instance.saves[i][o].offloaded_gb for i, o in enumerate(choices.saves))
        spare_gb = (instance.moving_slot_gb - largest) * (
            instance.candidate.prefetch_depth + instance.candidate.d2h_lag + 2
        )
        assert round(evaluation.nvme_gb[0] * 1e9) == timeline.peak_bytes["nvme"]
        assert round(evaluation.host_gb[0] * 1e9) == timeline.peak_bytes["host"]
        assert round(evaluation.moved_gb[0] * 1e9) == timeline.pinned_bytes
        assert round((evaluation.gpu_gb[0] - spare_gb) * 1e9) == timeline.peak_bytes["gpu"]
        traffic_gb = float(WindowReplay(instance).traffic_gb(ChoiceBatch.of([choices]))[0])
        assert traffic_gb * 1e9 == pytest.approx(sum(timeline.moved_bytes.values()), rel=1e-3)


@pytest.mark.parametrize("update", [EXACT, EARLY], ids=["exact", "early"])
@pytest.mark.parametrize(("bytes_per_s", "tolerance"), [(FAST, 0.05), (SLOW, 0.25)])
def test_window_replay_and_program_are_never_far_off(update: Update, bytes_per_s: float, tolerance: float) -> None:
    """Random choices, sparse and dense; where files bind, neither sees every turn of their slots."""
    for alike in (True, False):
        for profile, instance, choices in list(cases(update, bytes_per_s, alike=alike))[::2]:
            simulated_s = replayed(profile, instance, choices).step_s
            replay_s = WindowReplay(instance).evaluate(ChoiceBatch.of([choices])).step_s[0]
            assert replay_s == pytest.approx(simulated_s, rel=tolerance)
            assert fixed_period(instance, choices, PLENTY) == pytest.approx(simulated_s, rel=tolerance)


def test_count_bounds_are_below_every_plan() -> None:
    for bytes_per_s in (FAST, SLOW):
        for profile, instance, choices in list(cases(EXACT, bytes_per_s, alike=False))[::3]:
            assert count_bound_s(instance, PLENTY, 2) <= replayed(profile, instance, choices).step_s * (1 + 1e-9)


def test_what_is_missing_of_files_is_bounded_too() -> None:
    instance = Instance(with_files(tiny_profile(6), FAST), CANDIDATES[0], "hybrid8", EXACT, (), EVERYTHING)
    tight = Budgets(0.04, 0.05)
    assert least_missing_gb(instance, tight, ()) == math.inf
    missing_gb = least_missing_gb(instance, tight, ("nvme",))
    assert 0 < missing_gb < 1
    assert least_missing_gb(instance, replace(tight, nvme_gb=0.005), ("nvme",)) == pytest.approx(missing_gb - 0.005)


def solved(profile: Profile, host_bytes: int, nvme_bytes: int, gpu_bytes: int = 75 * MB) -> Solution:
    return solve(
        profile, batch_size=1, gpu_memory_bytes=gpu_bytes, host_memory_bytes=host_bytes, nvme_bytes=nvme_bytes,
        executable_only=False,
    )  # fmt: skip


def test_files_make_up_for_a_host_that_is_too_small() -> None:
    profile, gpu_bytes = with_files(tiny_profile(6), FAST), 65 * MB
    with pytest.raises(InfeasibleError):
        solved(profile, 40 * MB, 0, gpu_bytes)
    solution = solved(profile, 40 * MB, 1000 * MB, gpu_bytes)
    peaks = solution.timeline.peak_bytes
    assert 0 < peaks["nvme"] <= 1000 * MB
    assert peaks["host"] <= 40 * MB
    less = solved(profile, 40 * MB, peaks["nvme"], gpu_bytes)
    assert less.timeline.peak_bytes["nvme"] <= peaks["nvme"]


def test_faster_files_are_never_slower_and_slow_ones_do_no_harm() -> None:
    rates = (SLOW, 1e9, FAST)
    steps = [solved(with_files(tiny_profile(6), rate), 40 * MB, 1000 * MB).timeline.step_s for rate in rates]
    assert steps[0] >= steps[1] * 0.99
    assert steps[1] >= steps[2] * 0.99
    roomy, without = (solved(with_files(tiny_profile(6), SLOW), 10**9, nvme) for nvme in (1000 * MB, 0))
    assert roomy.timeline.step_s <= without.timeline.step_s * (1 + TIE)


def test_the_runtime_gets_no_such_plan() -> None:
    with pytest.raises(UsageError, match=r"nvme_bytes: .*: the runtime does not execute files yet"):
        solve(with_files(tiny_profile(2), FAST), batch_size=1, nvme_bytes=10**9)
