"""What must hold of any solution, on random small models, machines and budgets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazysched.schemas import Profile
from lazysched.solver import Solution
from tests.solver.random_instances import Scenario, broken_promises, scaled, with_two_structures
from tests.solver.synthetic import tiny_profile

GAP = 0.01
SHORT_S = 0.1
"""Wherever the search stops, budgets are kept and no recipe is faster."""
LONG_S = 20.0
"""Enough to close the gap of instances as small as these, which take about two seconds."""
SEEDS = st.integers(0, 10**6)


def check_promises(seed: int) -> None:
    scenario = Scenario.of_seed(seed)
    solution = scenario.solved(time_limit_s=SHORT_S, gap=GAP)
    if solution is not None:
        assert broken_promises(solution, scenario) == []


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_budgets_are_kept_and_no_recipe_is_faster(seed: int) -> None:
    check_promises(seed)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(2))
def test_promises_on_two_hundred_instances(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        check_promises(seed)


def check_never_slower(scenario: Scenario, better: Scenario) -> None:
    """``better`` may be slower by the gap that its solution reports, and its bound must hold for both."""
    worse, found = (s.solved(time_limit_s=LONG_S, gap=GAP) for s in (scenario, better))
    if worse is None:
        return
    assert found is not None, "what fits a budget fits a larger one"
    report = found.plan.solver
    assert report is not None
    assert found.timeline.step_s <= worse.timeline.step_s / (1 - max(GAP, report.gap)) * (1 + 1e-9)


BETTER = ("gpu_bytes", "host_bytes", "link_bytes_per_s", "cpu_params_per_s")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=SEEDS, what=st.sampled_from(BETTER), factor=st.sampled_from((1.1, 1.5, 3.0)))
def test_more_memory_bandwidth_or_processor_is_never_slower(seed: int, what: str, factor: float) -> None:
    scenario = Scenario.of_seed(seed)
    check_never_slower(scenario, scenario.more(**{what: factor}))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=SEEDS, what=st.sampled_from(BETTER), factor=st.sampled_from((1.1, 1.5, 3.0)))
def test_more_is_never_slower_on_many(seed: int, what: str, factor: float) -> None:
    scenario = Scenario.of_seed(seed)
    check_never_slower(scenario, scenario.more(**{what: factor}))


def solved(scenario: Scenario, profile: Profile) -> Solution | None:
    return scenario.solved(profile, time_limit_s=LONG_S, gap=GAP)


def assert_within_the_gap(one: Solution | None, other: Solution | None, factor: float = 1.0) -> None:
    """Of ``one`` and ``other``, which takes ``factor`` times as long, neither beats the other's bound."""
    assert (one is None) == (other is None)
    if one is None or other is None:
        return
    assert one.plan.solver is not None
    assert other.plan.solver is not None
    for found, bound_s in (
        (one.timeline.step_s * factor, other.plan.solver.bound_s),
        (other.timeline.step_s, one.plan.solver.bound_s * factor),
    ):
        assert bound_s <= found * (1 + 1e-6)
        assert found <= bound_s / (1 - max(GAP, one.plan.solver.gap, other.plan.solver.gap)) * (1 + 1e-6)


@settings(max_examples=5, deadline=None)
@given(seed=SEEDS, factor=st.sampled_from((0.1, 7.0)))
def test_scaling_all_times_scales_the_answer(seed: int, factor: float) -> None:
    scenario = Scenario.of_seed(seed)
    profile = scenario.profile()
    assert_within_the_gap(solved(scenario, profile), solved(scenario, scaled(profile, factor)), factor)


def with_blocks_permuted(profile: Profile) -> Profile:
    """Blocks of one structure in reverse among the places of that structure; lists of variants backwards."""
    stages = list(profile.stages)
    for structure in {stage.structure for stage in stages if stage.is_block}:
        places = [k for k, stage in enumerate(stages) if stage.structure == structure]
        for k, stage in zip(places, [stages[k] for k in reversed(places)], strict=True):
            stages[k] = stage.model_copy(update={"id": profile.stages[k].id})
    variants = {
        structure: {size: listed[::-1] for size, listed in by_size.items()}
        for structure, by_size in reversed(profile.variants.items())
    }
    return profile.model_copy(update={"stages": stages, "variants": variants})


@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
def test_permuting_equal_blocks_changes_nothing(seed: int) -> None:
    scenario = Scenario.of_seed(seed)
    profile = scenario.profile()
    assert_within_the_gap(solved(scenario, profile), solved(scenario, with_blocks_permuted(profile)))


def test_permutation_keeps_what_stands_where() -> None:
    profile = with_two_structures(tiny_profile(4))
    permuted = with_blocks_permuted(profile)
    assert [(s.id, s.structure) for s in permuted.stages] == [(s.id, s.structure) for s in profile.stages]
    assert [list(s.params) for s in permuted.stages] != [list(s.params) for s in profile.stages]
