"""The program with all decisions given is never above their simulation: bounds come from it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from lazysched.schemas import Profile, Rate, Update
from lazysched.solver import solve
from lazysched.solver.choice_batch import ChoiceBatch
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.measured import offload_limits
from lazysched.solver.options import EVERYTHING, EXECUTABLE, Scope
from lazysched.solver.plans import Choices
from lazysched.solver.window_replay import WindowReplay
from tests.solver.fixed_choices import PLENTY, drawn, fixed_period, replayed
from tests.solver.frozen_profiles import with_frozen, with_two_matrices
from tests.solver.synthetic import curve, timing, tiny_profile

EXACT, EARLY = Update(), Update(clip_norm=None, check_finite=False)
ROUNDING = 1e-4
"""Of a step: small terms that break ties, and what the simulator knows of besides, as copies of a step's batch."""


def above(
    profile: Profile,
    candidate: Candidate,
    choices: Choices | random.Random,
    update: Update = EXACT,
    scope: Scope = EXECUTABLE,
) -> float:
    """By which share of the step the program is above the simulation of ``choices``, or of any that are drawn."""
    instance = Instance(profile, candidate, "hybrid8", update, (), scope)
    if isinstance(choices, random.Random):
        choices = drawn(instance, choices)
    period_s = fixed_period(instance, choices, PLENTY)
    assert period_s is not None
    return period_s / replayed(profile, instance, choices).step_s - 1


def slowed(profile: Profile) -> Profile:
    """With updates that take 2.5 times as long beside copies both ways."""
    beside = {f: Rate(per_s=rate.per_s and rate.per_s / 2.5) for f, rate in profile.update["cpu"].items()}
    return profile.model_copy(update={"update_beside_copies": beside})


def streaming(num_blocks: int, *streamed: int) -> Choices:
    """These blocks stream, all else stays on the GPU."""
    states = tuple("streamed" if i in streamed else "gpu" for i in range(num_blocks))
    return Choices(states, (0,) * num_blocks, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("update", [EXACT, EARLY], ids=["exact", "early"])
@pytest.mark.parametrize("link_bytes_per_s", [60e6, 150e6, 600e6])
def test_copies_slow_no_update_down_that_they_cannot_be_beside(update: Update, link_bytes_per_s: float) -> None:
    generator = random.Random(3)
    profile = slowed(tiny_profile(4, link_bytes_per_s=link_bytes_per_s, cpu_params_per_s=30e6, micro_batches=(1, 2)))
    for accumulation in (1, 3):
        limit = offload_limits(profile, 1)[-1] if accumulation == 1 else 0
        for _ in range(4):
            candidate = Candidate(1, accumulation, 1, offload_limit_bytes=limit)
            assert above(profile, candidate, generator, update) <= ROUNDING


def test_what_is_said_to_be_optimal_is_no_slower_than_what_was_found_without_the_slowdown() -> None:
    plain = tiny_profile(4, link_bytes_per_s=150e6, cpu_params_per_s=30e6)
    settings: dict[str, Any] = {
        "batch_size": 1, "gpu_memory_bytes": 65_000_000, "host_memory_bytes": 300_000_000, "gap": 0.005,
        "max_grad_norm": None, "check_finite": False,
    }  # fmt: skip
    rival = solve(plain, **settings).plan
    solution = solve(slowed(plain), **settings)
    assert solution.plan.solver is not None
    found = [candidate.bound_s for candidate in solution.tried]
    assert min(found) <= solution.timeline.step_s * (1 + ROUNDING)
    instance_step_s = solve(slowed(plain), pins=pins_of(rival), **settings).timeline.step_s
    assert solution.plan.solver.bound_s <= instance_step_s * (1 + ROUNDING)


def pins_of(plan: Any) -> list[str]:
    """Where ``plan`` has weights and states."""
    return [
        f"{stage}.{field}={getattr(chosen, field)}"
        for stage, chosen in plan.stages.items()
        for field in ("weights", "state")
    ]


@pytest.mark.parametrize("accumulation", [3, 6])
@pytest.mark.parametrize("streamed", [(0, 12, 13), (0, 1, 12, 13)])
def test_an_upload_may_come_long_before_its_block(accumulation: int, streamed: tuple[int, ...]) -> None:
    """With three blocks or more that stream, the first is uploaded again, any time after the last one's backward."""
    profile = tiny_profile(14, link_bytes_per_s=10e6, cpu_params_per_s=1e12)
    for depth in (1, 2):
        assert above(profile, Candidate(1, accumulation, depth), streaming(14, *streamed)) <= ROUNDING


def test_the_last_fetch_holds_up_no_first_one() -> None:
    """Copies to the host are slow here, so that of two micro-batches the second comes back late."""
    profile = tiny_profile(5, link_bytes_per_s=100e6, cpu_params_per_s=1e9, micro_batches=(1, 2))
    links = {**profile.links, "d2h": curve(33e6), "d2h_both": curve(33e6)}
    profile = profile.model_copy(update={"links": links})
    for limit in offload_limits(profile, 1)[1:3]:
        for seed in range(4):
            candidate = Candidate(1, 2, 1, offload_limit_bytes=limit)
            own = drawn(Instance(profile, candidate, "hybrid8", EXACT), random.Random(seed))
            choices = replace(own, states=("gpu",) * 5, vocabulary=0)
            assert above(profile, candidate, choices) <= ROUNDING


@pytest.mark.parametrize("place", [0, 2, 3])
def test_with_segments_allowed_too_a_block_may_still_lie_in_its_slot(place: int) -> None:
    profile = tiny_profile(6, link_bytes_per_s=20e6, saved_bytes=5_000_000, cpu_params_per_s=1e9)
    scope = EVERYTHING.without_files()
    candidate = Candidate(1, 1, segments=scope.segments)
    own = Instance(profile, candidate, "hybrid8", EXACT, (), scope)
    for length in (1, 2):
        saves = [next(k for k, o in enumerate(options) if o.segment == length) for options in own.saves]
        choices = replace(streaming(6, place), saves=tuple(saves))
        assert above(profile, candidate, choices, scope=scope) <= ROUNDING


@pytest.mark.parametrize("trained", [["head.w"], ["block.4.w", "head.w"], ["block.0.w"]])
def test_where_little_is_trained_uploads_wait_for_less(trained: list[str]) -> None:
    """Nothing that waits for updates, no backward whose length says how early an upload may be, one direction busy."""
    generator = random.Random(5)
    plain = tiny_profile(5, link_bytes_per_s=100e6, cpu_params_per_s=1e9)
    links = {**plain.links, "h2d": curve(140e6), "d2h": curve(140e6)}
    profile = with_frozen(with_two_matrices(plain.model_copy(update={"links": links})), trained)
    for accumulation in (1, 2, 4):
        for _ in range(3):
            assert above(profile, Candidate(1, accumulation, 2), generator) <= ROUNDING


def with_slow_copies_to_the_host(profile: Profile, bytes_per_s: float) -> Profile:
    """The same whether the other direction is busy or not."""
    slow = curve(bytes_per_s)
    return profile.model_copy(update={"links": {**profile.links, "d2h": slow, "d2h_both": slow}})


@pytest.mark.parametrize("streamed", [1, 3])
def test_stages_that_the_gpu_updates_wait_for_no_gradient_on_its_way_to_the_host(streamed: int) -> None:
    """Copies to the host last longer than the backward; the first blocks compute beside the last of them."""
    profile = with_slow_copies_to_the_host(tiny_profile(4, link_bytes_per_s=700e6), 70e6)
    candidate = Candidate(1, 1)
    options = Instance(profile, candidate, "hybrid8", EXACT).vocabulary_options
    ends = next(k for k, o in enumerate(options) if (o.embed, o.head) == ("gpu", "resident"))
    choices = replace(streaming(4, streamed), vocabulary=ends)
    assert above(profile, candidate, choices) <= ROUNDING


def saving(profile: Profile, candidate: Candidate, kinds: str, *streamed: int) -> Choices:
    """Of each block all leaves (a), its input (i), or nothing (-); all but those streamed are on the GPU."""
    instance = Instance(profile, candidate, "hybrid8", EXACT)
    wanted = {"a": ("all", "host", False), "i": ("all", "host", True), "-": ("all", "gpu", False)}
    saves = [
        next(k for k, o in enumerate(options) if (o.variant.name, o.tier, o.rest_stays) == wanted[kind])
        for kind, options in zip(kinds, instance.saves, strict=True)
    ]
    return replace(streaming(len(kinds), *streamed), saves=tuple(saves))


@pytest.mark.parametrize("kinds", ["iiai-iii--", "aiiiii---", "aai-ai--"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_inputs_that_stay_leave_slots_for_those_that_leave(kinds: str, accumulation: int) -> None:
    """A hidden state takes a slot that was never used before one that is still being copied."""
    profile = tiny_profile(len(kinds), link_bytes_per_s=100e6, cpu_params_per_s=1e9)
    candidate = Candidate(1, accumulation, 2, offload_limit_bytes=offload_limits(profile, 1)[-1])
    assert above(profile, candidate, saving(profile, candidate, kinds)) <= ROUNDING


Moves = tuple[str, int, int, float, float, tuple[int, ...]]
"""Kinds of ``saving``, accumulation, prefetch depth, bytes/s to the GPU and to the host, blocks that stream."""
MOVES: dict[str, Moves] = {
    "a fetch finds its slot unused long before its window": ("a-", 5, 1, 20e6, 20e6, ()),
    "the first copy is long there when the last is made": ("-a", 3, 1, 300e6, 3e9, ()),
    "an upload is issued two windows ahead": ("aiaia", 5, 2, 95e6, 95e6, (1, 2, 3, 4)),
    "the upload of a block that does not stream holds up no fetch": ("a---", 5, 1, 50e6, 100e6, (2, 3)),
    "a window that fetches nothing waits for no upload after it": ("----", 3, 2, 8e6, 140e6, (0, 1, 2, 3)),
}


@pytest.mark.parametrize("moves", MOVES.values(), ids=MOVES)
def test_uploads_and_fetches_wait_for_no_more_than_in_the_program_of_operations(moves: Moves) -> None:
    kinds, accumulation, depth, to_gpu, to_host, streamed = moves
    plain = tiny_profile(len(kinds), link_bytes_per_s=to_gpu, cpu_params_per_s=1e9)
    profile = with_slow_copies_to_the_host(plain, to_host)
    candidate = Candidate(1, accumulation, depth, offload_limit_bytes=offload_limits(profile, 1)[-1])
    assert above(profile, candidate, saving(profile, candidate, kinds, *streamed)) <= ROUNDING


def test_inputs_that_queue_up_take_no_slot_of_what_is_made() -> None:
    """Copies of the first blocks' inputs last until long after later blocks, of which nothing leaves."""
    kinds = "iiii------"
    profile = with_slow_copies_to_the_host(tiny_profile(len(kinds), link_bytes_per_s=500e6, cpu_params_per_s=1e9), 18e6)
    candidate = Candidate(1, 5, 2, 2, offload_limit_bytes=1_000_000)
    assert above(profile, candidate, saving(profile, candidate, kinds)) <= ROUNDING


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_embedding_frees_no_slot_of_a_block(accumulation: int) -> None:
    """Frozen blocks are uploaded before the step that uses them begins."""
    plain = tiny_profile(5, link_bytes_per_s=100e6, cpu_params_per_s=1e9)
    (embed,) = plain.variants["embed"][1]
    slow = embed.model_copy(update={"forward": timing(0.03)})
    plain = plain.model_copy(update={"variants": {**plain.variants, "embed": {1: [slow]}}})
    profile = with_frozen(plain, ["block.4.w", "head.w"])
    assert above(profile, Candidate(1, accumulation), streaming(5, 0, 1, 2)) <= ROUNDING


@pytest.mark.parametrize("limit", [0, 1_000_000])
def test_what_may_leave_need_not_so_that_one_direction_is_busy_alone(limit: int) -> None:
    plain = tiny_profile(5, link_bytes_per_s=100e6, cpu_params_per_s=1e9)
    links = {**plain.links, "h2d": curve(140e6), "d2h": curve(140e6)}
    profile = with_frozen(plain.model_copy(update={"links": links}), ["head.w"])
    assert above(profile, Candidate(1, 1, offload_limit_bytes=limit), streaming(5, *range(5))) <= ROUNDING


@pytest.mark.parametrize("accumulation", [1, 3, 4])
def test_with_one_slot_for_what_leaves(accumulation: int) -> None:
    """Copies to the host take much longer than forwards, which wait for them and take turns with them."""
    generator = random.Random(6)
    profile = tiny_profile(6, link_bytes_per_s=100e6, saved_bytes=30_000_000)
    for depth in (1, 2):
        candidate = Candidate(1, accumulation, depth, 0, offload_limits(profile, 1)[-1])
        for _ in range(12):
            assert above(profile, candidate, generator) <= ROUNDING


@pytest.mark.parametrize("accumulation", [3, 5])
def test_with_one_slot_forwards_and_copies_take_turns(accumulation: int) -> None:
    """Rows and window replay see it: a copy takes 21 ms, a forward 10."""
    profile = tiny_profile(1)
    candidate = Candidate(1, accumulation, 2, 0, offload_limits(profile, 1)[-1])
    instance = Instance(profile, candidate, "hybrid8", EXACT)
    made = next(k for k, o in enumerate(instance.saves[0]) if o.leaves and not o.leaves_early)
    choices = Choices(("gpu",), (made,), 0)
    step_s = replayed(profile, instance, choices).step_s
    assert fixed_period(instance, choices, PLENTY) == pytest.approx(step_s, rel=1e-3)
    assert WindowReplay(instance).evaluate(ChoiceBatch.of([choices])).step_s[0] == pytest.approx(step_s, rel=1e-3)
