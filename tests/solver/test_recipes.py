"""Each recipe obeys its rule and is the fastest that does, against trying everything by window replay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from lazysched.schemas import Plan, StagePlan, Update
from lazysched.solver import simulate_plan, solve
from lazysched.solver.choice_batch import ChoiceBatch
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.measured import offload_limits
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.options import EVERYTHING, EXECUTABLE, RESIDENT, STATE_CHOICES, STREAMED
from lazysched.solver.plans import Choices
from lazysched.solver.recipe_choices import COARSE
from lazysched.solver.recipe_rules import RULES, rules_within
from lazysched.solver.recipes import best_of_rule, candidates_of_rule
from lazysched.solver.search import TIE
from lazysched.solver.simulate import SIMULATED_STEPS
from lazysched.solver.window_replay import WindowReplay
from tests.solver.synthetic import tiny_profile
from tests.solver.test_file_plans import FAST, with_files

MB = 1_000_000
PREFETCH_DEPTHS, D2H_LAGS = (1, 2), (0, 1, 2)
HOLDS: dict[str, Callable[[StagePlan], bool]] = {
    "keep all activations": lambda s: s.save == "all" and s.input_tier == "gpu",
    "checkpoint every block": lambda s: s.save == "input" and s.input_tier == "gpu",
    "checkpoint every block, inputs on host": lambda s: s.save == "input" and s.input_tier == "host",
    "one variant for all blocks": lambda s: s.input_tier == "gpu",
    "everything streamed, inputs kept": lambda s: (
        (s.save, s.weights, s.state, s.input_tier) == ("input", "host", "host", "gpu")
    ),
    "everything streamed, inputs anywhere": lambda s: (s.save, s.weights, s.state) == ("input", "host", "host"),
}


def blocks(plan: Plan) -> list[StagePlan]:
    return [choice for stage_id, choice in plan.stages.items() if stage_id.startswith("block.")]


@pytest.mark.parametrize("gpu_mb", [45, 70, 300])
def test_every_block_of_a_recipe_obeys_its_rule(gpu_mb: int) -> None:
    found = solve(
        tiny_profile(4, micro_batches=(1, 2)), batch_size=2, gpu_memory_bytes=gpu_mb * MB, host_memory_bytes=200 * MB,
        time_limit_s=20,
    )  # fmt: skip
    assert [recipe.name for recipe in found.recipes] == [rule.name for rule in rules_within(EXECUTABLE)] == list(HOLDS)
    fitting = [recipe for recipe in found.recipes if recipe.plan is not None]
    assert fitting
    for recipe in fitting:
        assert recipe.plan is not None
        assert all(map(HOLDS[recipe.name], blocks(recipe.plan))), recipe.name
        assert len({stage.save for stage in blocks(recipe.plan)}) == 1
        if "streamed" in recipe.name:
            assert {choice.state for choice in recipe.plan.stages.values()} == {"host"}


def every_choice(instance: Instance) -> Iterator[Choices]:
    """First some blocks on the GPU, then some with resident weights, the rest streamed; one save option for all."""
    length = instance.num_blocks
    for on_gpu, resident in itertools.product(range(length + 1), repeat=2):
        if on_gpu + resident > length:
            continue
        counts = (on_gpu, resident, length - on_gpu - resident)
        states = tuple(s for s, count in zip(STATE_CHOICES[:3], counts, strict=True) for _ in range(count))
        for save, kind in itertools.product(range(len(instance.saves[0])), range(len(instance.vocabulary_options))):
            yield Choices(states, (save,) * length, kind)


@pytest.mark.parametrize("gpu_gb", [0.045, 0.06, 0.08, 0.2])
@pytest.mark.parametrize("cpu_params_per_s", [100e6, 20e6])
def test_one_variant_gets_its_best_residency_and_depth(gpu_gb: float, cpu_params_per_s: float) -> None:
    profile = tiny_profile(5, cpu_params_per_s=cpu_params_per_s)
    rule, budgets = next(r for r in RULES if r.saves == "one" and r.segment == 1), Budgets(gpu_gb, 1.0)
    limits = {1: offload_limits(profile, 1)}
    candidates = candidates_of_rule(rule, {1: 1}, limits, ("pinned",), PREFETCH_DEPTHS, D2H_LAGS, 5)
    assert candidates == [Candidate(1, 1, depth, lag) for lag in D2H_LAGS for depth in PREFETCH_DEPTHS]
    instances = [Instance(profile, candidate, "hybrid8", Update()) for candidate in candidates]
    best_s = []
    for instance in instances:
        evaluation = WindowReplay(instance).evaluate(ChoiceBatch.of(list(every_choice(instance))))
        best_s += list(evaluation.step_s[evaluation.fits(budgets)])
    found = best_of_rule(rule, instances, lambda _: budgets)
    assert found is not None
    assert found.step_s == pytest.approx(min(best_s))


def test_a_recipe_gets_its_best_lag() -> None:
    """None that the solver searches would be faster, on slow links."""
    profile = tiny_profile(
        6, block_params=300_000, vocabulary_params=100_000, saved_bytes=MB, link_bytes_per_s=6e7, cpu_params_per_s=3e8
    )
    solution = solve(profile, batch_size=2, gpu_memory_bytes=1000 * MB, host_memory_bytes=1000 * MB, time_limit_s=60)
    recipe = next(r for r in solution.recipes if r.name == "checkpoint every block, inputs on host")
    assert recipe.plan is not None
    assert recipe.timeline is not None
    steps = [
        simulate_plan(recipe.plan.model_copy(update={"d2h_lag": lag, "profile": profile}), steps=SIMULATED_STEPS).step_s
        for lag in D2H_LAGS
    ]
    assert recipe.timeline.step_s == pytest.approx(min(steps), rel=1e-9)


@pytest.mark.parametrize(("gpu_gb", "host_gb"), [(0.04, 0.06), (0.05, 0.04)])
def test_a_recipe_has_in_files_what_is_best_there(gpu_gb: float, host_gb: float) -> None:
    """Against all splits: first blocks on the GPU, then resident weights, then the host, the last in files."""
    profile = with_files(tiny_profile(4), FAST)
    rule, budgets = next(r for r in RULES if r.name == "checkpoint every block"), Budgets(gpu_gb, host_gb, nvme_gb=1.0)
    instance = Instance(profile, Candidate(1, 1), "hybrid8", Update(), (), replace(EVERYTHING, segments=(1,)))
    found = best_of_rule(rule, [instance], lambda _: budgets)
    assert found is not None
    assert WindowReplay(instance).memory(ChoiceBatch.of([found.choices])).nvme_gb[0] > 0
    save = found.choices.saves
    rows = [
        Choices(states, save, kind)
        for states in itertools.product(STATE_CHOICES, repeat=4)
        for kind in range(len(instance.vocabulary_options))
        if list(states) == sorted(states, key=("gpu", *RESIDENT, *STREAMED).index)
    ]
    evaluation = WindowReplay(instance).evaluate(ChoiceBatch.of(rows))
    assert found.step_s == pytest.approx(min(evaluation.step_s[evaluation.fits(budgets)]), rel=TIE)


def test_inputs_may_be_split_between_gpu_and_host() -> None:
    """With room for two of four inputs beside the slots, two go to the host."""
    profile = tiny_profile(4)
    rule = next(rule for rule in rules_within(EXECUTABLE) if len(rule.tiers) > 1)
    limits = {1: offload_limits(profile, 1)}
    candidates = candidates_of_rule(rule, {1: 1}, limits, ("pinned",), PREFETCH_DEPTHS, D2H_LAGS, 4)
    instances = [Instance(profile, candidate, "hybrid8", Update()) for candidate in candidates]
    moving = instances[1]
    options = [k for k, o in enumerate(moving.saves[0]) if o.variant.name == "input" and o.tier == "host"]
    all_away = Choices(("streamed",) * 4, (options[0],) * 4, 4)
    least_gb = float(WindowReplay(moving).memory(ChoiceBatch.of([all_away])).gpu_gb[0])
    found = best_of_rule(rule, instances[1:2], lambda _: Budgets(least_gb + 0.002, 1.0))
    assert found is not None
    assert found.choices.saves.count(options[0]) >= 2
    assert WindowReplay(moving).memory(ChoiceBatch.of([found.choices])).gpu_gb[0] <= least_gb + 0.002 + 1e-9


@pytest.mark.parametrize("gpu_gb", [0.3, 0.305, 0.31, 0.315])
def test_of_many_blocks_the_best_number_is_found_between_those_tried_at_first(gpu_gb: float) -> None:
    num_blocks = 2 * COARSE + 6
    profile, rule = tiny_profile(num_blocks, cpu_params_per_s=20e6), RULES[1]
    instance, budgets = Instance(profile, Candidate(1, 1), "hybrid8", Update()), Budgets(gpu_gb, 10.0)
    save = next(k for k, option in enumerate(instance.saves[0]) if option.variant.name == "input")
    every = [
        Choices(("gpu",) * n + ("streamed",) * (num_blocks - n), (save,) * num_blocks, kind)
        for n in range(num_blocks + 1)
        for kind in range(len(instance.vocabulary_options))
    ]
    evaluation = WindowReplay(instance).evaluate(ChoiceBatch.of(every))
    found = best_of_rule(rule, [instance], lambda _: budgets)
    assert found is not None
    assert found.step_s <= min(evaluation.step_s[evaluation.fits(budgets)]) * (1 + 1e-9)
