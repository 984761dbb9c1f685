"""Plans with files: window replay and program against the simulator, to the byte and within a few percent."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lazysched.schemas import Curve, Profile, Update
from lazysched.solver.instance import Candidate, Instance, offload_limits
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.plans import Choices
from lazysched.solver.window_replay import ChoiceBatch, WindowReplay
from tests.solver.synthetic import tiny_profile
from tests.solver.test_placement import CANDIDATES, EARLY, EXACT, fixed_period, replayed

TIERS = ("gpu", "host", "nvme")
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
            instance = Instance(profile, replace(candidate, offload_limit_bytes=limit), "hybrid8", update, (), TIERS)
            assert instance.uses_files
            for _ in range(4):
                yield profile, instance, drawn(instance, generator, alike)


def test_window_replay_has_the_peaks_of_the_program_to_the_byte() -> None:
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


@pytest.mark.parametrize("bytes_per_s", [FAST, SLOW])
@pytest.mark.parametrize("update", [EXACT, EARLY], ids=["exact", "early"])
def test_report(update: Update, bytes_per_s: float) -> None:
    worst = []
    for alike in (True, False):
        for profile, instance, choices in cases(update, bytes_per_s, alike=alike):
            simulated_s = replayed(profile, instance, choices).step_s
            replay_s = WindowReplay(instance).evaluate(ChoiceBatch.of([choices])).step_s[0]
            period_s = fixed_period(instance, choices, PLENTY)
            worst.append((replay_s / simulated_s - 1, (period_s or 9e9) / simulated_s - 1, alike, instance.candidate, choices))
    worst.sort(key=lambda w: w[0])
    for w in worst[:4] + worst[-4:]:
        print("replay", w)
    worst.sort(key=lambda w: w[1])
    for w in worst[:4] + worst[-4:]:
        print("program", w)
