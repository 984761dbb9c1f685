"""Plans with segments: window replay and program against the simulator, and the search against all choices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lazysched.errors import InfeasibleError
from lazysched.schemas import Curve, Profile, StateFormat, Update
from lazysched.solver import Solution, solve
from lazysched.solver.bounds import count_bound_s
from lazysched.solver.choice_batch import ChoiceBatch
from lazysched.solver.decision_costs import base_of, stage_costs
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.measured import offload_limits
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.milp import PlacementProgram
from lazysched.solver.options import EVERYTHING, LENGTHS, SaveOption
from lazysched.solver.pins import parse_pins
from lazysched.solver.plans import Choices, make_plan
from lazysched.solver.window_replay import WindowReplay
from tests.solver.synthetic import tiny_profile
from tests.solver.test_placement import CANDIDATES, EARLY, EXACT, PLENTY, fixed_period, replayed

MB = 10**6
SCOPE = EVERYTHING.without_files()
NUM_BLOCKS = 9
"""Two segments of four or four of two, and a block that is in none."""


def slower_links(profile: Profile, factor: float) -> Profile:
    slowed = {
        name: Curve(points=[(size, rate / factor) for size, rate in curve.points])
        for name, curve in profile.links.items()
        if name != "gpu"
    }
    return profile.model_copy(update={"links": {**profile.links, **slowed}})


def instance_of(
    profile: Profile, candidate: Candidate, update: Update = EXACT, state_format: StateFormat = "hybrid8"
) -> Instance:
    return Instance(profile, replace(candidate, segments=LENGTHS), state_format, update, (), SCOPE)


def drawn_saves(instance: Instance, generator: random.Random) -> Iterator[int]:
    saved = 0
    while saved < instance.num_blocks:
        options = instance.saves[saved]
        length = generator.choice(sorted({o.segment for o in options if o.place == 0}))
        place = generator.choice([k for k, o in enumerate(options) if (o.segment, o.place) == (length, 0)])
        yield from [place] * length
        saved += length


def drawn(instance: Instance, generator: random.Random, alike: bool) -> Choices:
    """Random choices; ``alike``: every block has the same state."""
    states = [generator.choice(own) for own in instance.states]
    if alike:
        states = [states[0]] * len(states)
    vocabulary = generator.randrange(len(instance.vocabulary_options))
    return Choices(tuple(states), tuple(drawn_saves(instance, generator)), vocabulary)


def cases(
    update: Update, slowdown: float, state_format: StateFormat = "hybrid8", saved_bytes: int = 20 * MB
) -> Iterator[tuple[Profile, Instance, Choices]]:
    """Random segments; in every second case all blocks have the same state."""
    generator = random.Random(5)
    for tied in (False, True):
        profile = slower_links(
            tiny_profile(NUM_BLOCKS, micro_batches=(1, 2), tied=tied, saved_bytes=saved_bytes), slowdown
        )
        for candidate in CANDIDATES:
            for limit in offload_limits(profile, candidate.micro_batch)[:2]:
                instance = instance_of(profile, replace(candidate, offload_limit_bytes=limit), update, state_format)
                assert instance.has_segments
                for alike in (False, True):
                    yield profile, instance, drawn(instance, generator, alike)


@pytest.mark.parametrize(("update", "state_format", "saved_bytes"), [(EXACT, "hybrid8", 20 * MB), (EARLY, "fp32", MB)])
def test_window_replay_has_peaks_and_traffic_of_the_program(
    update: Update, state_format: StateFormat, saved_bytes: int
) -> None:
    for profile, instance, choices in cases(update, 1, state_format, saved_bytes):
        replay, batch = WindowReplay(instance), ChoiceBatch.of([choices])
        assert replay.whole(batch)[0]
        memory, timeline = replay.memory(batch), replayed(profile, instance, choices)
        options = [own[k] for own, k in zip(instance.saves, choices.saves, strict=True)]
        alone = max((o.offloaded_gb for o in options if o.segment == 1), default=0)
        candidate = instance.candidate
        # Slots for what comes and goes are counted in full, whether or not a block alone uses them; inputs that
        # leave have slots among the hidden states.
        leaving = (candidate.d2h_lag + 1) * max(o.offloaded_gb for o in options)
        spare_gb = (candidate.prefetch_depth + candidate.d2h_lag + 2) * instance.moving_slot_gb
        spare_gb -= (candidate.prefetch_depth + 1) * alone + leaving
        assert round((memory.gpu_gb[0] - spare_gb) * 1e9) == timeline.peak_bytes["gpu"]
        assert round(memory.host_gb[0] * 1e9) == timeline.peak_bytes["host"]
        assert round(memory.moved_gb[0] * 1e9) == timeline.pinned_bytes
        # Tokens and what a step reports are not counted.
        traffic_bytes = float(replay.traffic_gb(batch)[0]) * 1e9
        assert traffic_bytes == pytest.approx(sum(timeline.moved_bytes.values()), rel=1e-3, abs=3000)


@pytest.mark.parametrize("update", [EXACT, EARLY], ids=["exact", "early"])
@pytest.mark.parametrize(
    ("slowdown", "replay_tolerance", "program_tolerance"), [(1, 1e-4, 1e-4), (2.5, 1e-4, 0.01), (6, 0.02, 0.08)]
)
def test_window_replay_and_program_agree_with_the_simulator(
    update: Update, slowdown: float, replay_tolerance: float, program_tolerance: float
) -> None:
    """Uploads that bind leave the program with the first and the last of a segment alone."""
    for profile, instance, choices in list(cases(update, slowdown))[::3]:
        simulated_s = replayed(profile, instance, choices).step_s
        replay_s = WindowReplay(instance).evaluate(ChoiceBatch.of([choices])).step_s[0]
        assert replay_s == pytest.approx(simulated_s, rel=replay_tolerance)
        assert fixed_period(instance, choices, PLENTY) == pytest.approx(simulated_s, rel=program_tolerance)
        assert count_bound_s(instance, PLENTY, 2) <= simulated_s * (1 + 1e-9)


def few_blocks_on_slow_links(seed: int) -> tuple[Profile, Instance, Choices]:
    """Two to six blocks, so that segments end anywhere among those that still lie in slots; uploads bind."""
    draw = random.Random(seed)
    profile = tiny_profile(
        draw.randint(2, 6), micro_batches=(1, 2), block_params=draw.randint(3, 30) * 100_000,
        vocabulary_params=draw.randint(1, 10) * 100_000, saved_bytes=draw.choice((1, 2, 5, 30)) * MB,
        tied=draw.random() < 0.4, link_bytes_per_s=10 ** draw.uniform(7.2, 8.5),
        cpu_params_per_s=10 ** draw.uniform(7, 9.5),
    )  # fmt: skip
    micro_batch, accumulation = draw.choice((1, 2)), draw.choice((1, 1, 2, 3))
    lag, depth = draw.choice((0, 1)), draw.choice((1, 2))
    limit = draw.choice(offload_limits(profile, micro_batch)[:2])
    state_format: StateFormat = draw.choice(("hybrid8", "fp32"))
    candidate = Candidate(micro_batch, accumulation, depth, lag, offload_limit_bytes=limit)
    instance = instance_of(profile, candidate, draw.choice((EXACT, EXACT, EARLY)), state_format)
    states = [draw.choice(own) for own in instance.states]
    if draw.random() < 0.5:
        states = [draw.choice(("streamed", "gpu")) for _ in states]
    saves = tuple(drawn_saves(instance, draw))
    return profile, instance, Choices(tuple(states), saves, draw.randrange(len(instance.vocabulary_options)))


@pytest.mark.parametrize("seed", [24, 99, 131, 169, 197, 361, 385, 1585, *range(2000, 2040)])
def test_uploads_and_fetches_of_segments_wait_for_no_more_than_in_the_simulator(seed: int) -> None:
    """The program, and with it a bound, was above by up to 28 % where blocks of a segment still lay in their slots, and
    by 10 % where the first of several micro-batches is fetched for it."""
    profile, instance, choices = few_blocks_on_slow_links(seed)
    period_s = fixed_period(instance, choices, PLENTY)
    assert period_s is not None
    assert period_s <= replayed(profile, instance, choices).step_s * (1 + 1e-3)


@pytest.mark.parametrize("num_blocks", [3, 7, 11])
def test_the_last_blocks_may_be_in_no_segment(num_blocks: int) -> None:
    """The third last of 4k + 3 has the place of the first in a segment of four that is not there."""
    solution = solve(
        tiny_profile(num_blocks), batch_size=1, gpu_memory_bytes=10**8, host_memory_bytes=6 * 10**8,
        executable_only=False, time_limit_s=5,
    )  # fmt: skip
    assert solution.plan.predicted is not None


def test_pins_may_leave_no_segment_to_change() -> None:
    solution = solve(
        tiny_profile(2), batch_size=1, gpu_memory_bytes=6 * 10**7, host_memory_bytes=5 * 10**8,
        executable_only=False, time_limit_s=5, pins=["block[0].input_tier=host", "block[1].input_tier=gpu"],
    )  # fmt: skip
    assert [solution.plan.stages[f"block.{i}"].input_tier for i in range(2)] == ["host", "gpu"]


def test_rows_allow_exactly_what_fits() -> None:
    for _, instance, choices in list(cases(EXACT, 1))[::9]:
        memory = WindowReplay(instance).memory(ChoiceBatch.of([choices]))
        gpu_gb, host_gb = float(memory.gpu_gb[0]), float(memory.host_gb[0])
        least = 2e-6  # GB, above the solver's tolerance
        assert fixed_period(instance, choices, Budgets(gpu_gb + least, host_gb + least)) is not None
        assert fixed_period(instance, choices, Budgets(gpu_gb - least, host_gb + least)) is None


def whole_choices(instance: Instance) -> Iterator[tuple[int, ...]]:
    """Every way to save of four blocks."""

    def of_length(block: int, length: int) -> list[int]:
        return [k for k, o in enumerate(instance.saves[block]) if o.segment == length]

    pairs = [
        [*((k, k) for k in of_length(first, 2)), *itertools.product(of_length(first, 1), of_length(first + 1, 1))]
        for first in (0, 2)
    ]
    yield from ((k,) * 4 for k in of_length(0, 4))
    yield from (one + two for one, two in itertools.product(*pairs))


def solved(profile: Profile, gpu_bytes: int, host_bytes: int, **arguments: object) -> Solution:
    return solve(
        profile, batch_size=1, gpu_memory_bytes=gpu_bytes, host_memory_bytes=host_bytes, executable_only=False,
        gap=1e-4, **arguments,
    )  # type: ignore[arg-type] # fmt: skip


@pytest.mark.parametrize("gpu_mb", [28, 31, 34, 40])
def test_the_search_finds_the_fastest_of_all_choices(gpu_mb: int) -> None:
    """Four blocks whose inputs cannot leave: the host holds their states, and no more."""
    profile = tiny_profile(4, saved_bytes=1_500_000)
    host_bytes = 70 * MB
    best_s = float("inf")
    for depth, lag, limit in itertools.product((1, 2), (0, 1), offload_limits(profile, 1)):
        instance = instance_of(profile, Candidate(1, 1, depth, lag, limit))
        states = list(itertools.product(*instance.states))
        every = [
            Choices(state, saves, kind)
            for saves in whole_choices(instance)
            for state in states
            for kind in range(len(instance.vocabulary_options))
        ]
        evaluation = WindowReplay(instance).evaluate(ChoiceBatch.of(every))
        fits = evaluation.fits(Budgets(instance.usable_gpu_gb(gpu_mb * MB), host_bytes / 1e9))
        best_s = min(best_s, float(evaluation.step_s[fits].min(initial=float("inf"))))
    if best_s == float("inf"):
        with pytest.raises(InfeasibleError):
            solved(profile, gpu_mb * MB, host_bytes)
        return
    solution = solved(profile, gpu_mb * MB, host_bytes)
    assert solution.timeline.step_s <= best_s * (1 + 1e-3)
    assert solution.timeline.peak_bytes["gpu"] <= gpu_mb * MB


def test_segments_are_chosen_where_inputs_do_not_fit() -> None:
    profile = tiny_profile(8, saved_bytes=1_500_000)
    budgets = (34 * MB, 160 * MB)
    pins = ["block.input_tier=gpu"]
    with pytest.raises(InfeasibleError):
        solve(profile, batch_size=1, gpu_memory_bytes=budgets[0], host_memory_bytes=budgets[1], pins=pins)
    solution = solve(
        profile, batch_size=1, gpu_memory_bytes=budgets[0], host_memory_bytes=budgets[1], pins=pins,
        executable_only=False,
    )  # fmt: skip
    assert {choice.segment for choice in solution.plan.stages.values()} > {1}
    assert solution.timeline.peak_bytes["gpu"] <= budgets[0]


def test_a_relaxation_is_rounded_to_whole_segments() -> None:
    profile = tiny_profile(NUM_BLOCKS)
    for limit in offload_limits(profile, 1):
        instance = instance_of(profile, Candidate(1, 1, offload_limit_bytes=limit))
        for gpu_gb in (0.03, 0.035, 0.04, 0.05):
            program = PlacementProgram(instance, Budgets(gpu_gb, 10.0))
            if program.lower_bound_s(10.0) < float("inf"):
                assert WindowReplay(instance).whole(ChoiceBatch.of([program.rounded()]))[0]


def begins(option: SaveOption) -> bool:
    return option.segment > 1 and option.place == 0


def test_what_is_fixed_of_one_block_holds_for_the_segments_that_it_could_be_in() -> None:
    profile = tiny_profile(8)
    pins = parse_pins(["block[5].save=all", "block[2].input_tier=host"], profile.stages)
    candidate = Candidate(1, 1, offload_limit_bytes=offload_limits(profile, 1)[-1], segments=LENGTHS)
    instance = Instance(profile, candidate, "hybrid8", EXACT, pins, SCOPE)
    kinds = [{(o.segment, o.variant.name, o.tier) for o in own if begins(o)} for own in instance.saves]
    # Block 2 sends its input away, so that it can only begin a segment; block 5 keeps all, also when made anew.
    assert {kind[0] for kind in kinds[0]} == {2}
    assert {(length, tier) for length, _, tier in kinds[2]} == {(2, "host")}
    assert {name for _, name, _ in kinds[4]} == {"all"}
    assert {length for length, _, _ in kinds[4]} == {2, 4}
    plan = make_plan(
        instance, Choices(("gpu",) * 8, tuple(drawn_saves(instance, random.Random(1))), 0), budget_bytes={}
    )
    assert (plan.stages["block.5"].save, plan.stages["block.2"].input_tier) == ("all", "host")


def test_explain_says_what_sharing_a_checkpoint_costs() -> None:
    profile = tiny_profile(4, saved_bytes=1_500_000)
    instance = instance_of(profile, Candidate(1, 1))
    pairs = [k for k, o in enumerate(instance.saves[0]) if (o.segment, o.variant.name) == (2, "input")]
    alone = [k for k, o in enumerate(instance.saves[0]) if (o.segment, o.variant.name) == (1, "input")]
    plan = make_plan(instance, Choices(("gpu",) * 4, (pairs[0],) * 2 + (alone[0],) * 2, 0), budget_bytes={})
    costs = stage_costs(base_of(plan, profile))
    found = [other for entry in costs for other in entry.alternatives if other.words.startswith("keeping the input of")]
    assert [other.words for other in found] == ["keeping the input of each of block.0..1"]
    # One forward of 10 ms is not run again, and one more input of 1 MB waits.
    assert found[0].step_s == pytest.approx(-0.01, rel=1e-3)
    assert found[0].peak_bytes["gpu"] == MB
