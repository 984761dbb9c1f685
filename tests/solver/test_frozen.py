"""Plans for models of which only some parameters are trained: program, window replay and simulator know what is not."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lazysched.errors import UsageError
from lazysched.lower import lower
from lazysched.plan_page import plan_page
from lazysched.plots import draw_decisions
from lazysched.schemas import Plan, Profile, StateFormat, Update
from lazysched.solver import simulate_plan, solve
from lazysched.solver.bounds import count_bound_s
from lazysched.solver.choice_batch import ChoiceBatch
from lazysched.solver.compare import compare
from lazysched.solver.decision_costs import base_of, stage_costs
from lazysched.solver.explain import explain
from lazysched.solver.explain_report import print_explanation
from lazysched.solver.instance import Instance
from lazysched.solver.measured import offload_limits
from lazysched.solver.plans import Choices
from lazysched.solver.report import print_solution
from lazysched.solver.window_replay import WindowReplay
from tests.solver.frozen_profiles import randomly_frozen, with_frozen, with_two_matrices
from tests.solver.random_instances import Scenario, broken_promises
from tests.solver.synthetic import tiny_profile
from tests.solver.test_placement import (
    CANDIDATES,
    EARLY,
    EXACT,
    FAST_CPU,
    PLENTY,
    SLOW_CPU,
    drawn,
    fixed_period,
    replayed,
)  # fmt: skip

GAP = 0.01


def cases(
    tied: bool, offload: bool, update: Update = EXACT, cpu_params_per_s: float = FAST_CPU
) -> list[tuple[Profile, Instance, Choices]]:
    generator = random.Random(11)
    whole = tiny_profile(6, micro_batches=(1, 2), tied=tied, cpu_params_per_s=cpu_params_per_s)
    formats: Iterator[StateFormat] = itertools.cycle(("hybrid8", "fp32"))
    result = []
    for candidate, state_format in zip(CANDIDATES, formats, strict=False):
        for _ in range(4):
            profile = randomly_frozen(whole, generator)
            limit = offload_limits(profile, candidate.micro_batch)[-1] if offload else 0
            instance = Instance(profile, replace(candidate, offload_limit_bytes=limit), state_format, update)
            result.append((profile, instance, drawn(instance, generator)))
    return result


@pytest.mark.parametrize("tied", [False, True])
def test_window_replay_has_the_peaks_of_the_program_to_the_byte(tied: bool) -> None:
    for profile, instance, choices in cases(tied, offload=False):
        evaluation = WindowReplay(instance).evaluate(ChoiceBatch.of([choices]))
        timeline = replayed(profile, instance, choices)
        assert round(evaluation.moved_gb[0] * 1e9) == timeline.pinned_bytes
        assert round(evaluation.gpu_gb[0] * 1e9) == timeline.peak_bytes["gpu"]
        assert round(evaluation.host_gb[0] * 1e9) == timeline.peak_bytes["host"]


@pytest.mark.parametrize("offload", [False, True])
def test_traffic_is_that_of_the_program(offload: bool) -> None:
    for profile, instance, choices in cases(False, offload=offload):
        moved = replayed(profile, instance, choices).moved_bytes
        traffic_gb = float(WindowReplay(instance).traffic_gb(ChoiceBatch.of([choices]))[0])
        assert traffic_gb * 1e9 == pytest.approx(sum(moved.values()), rel=1e-3)


@pytest.mark.parametrize("cpu_params_per_s", [FAST_CPU, SLOW_CPU])
@pytest.mark.parametrize("update", [EXACT, EARLY], ids=["exact", "early"])
def test_times_agree_with_the_simulator(update: Update, cpu_params_per_s: float) -> None:
    for profile, instance, choices in cases(False, offload=False, update=update, cpu_params_per_s=cpu_params_per_s):
        simulated_s = replayed(profile, instance, choices).step_s
        replay_s = WindowReplay(instance).evaluate(ChoiceBatch.of([choices])).step_s[0]
        assert replay_s == pytest.approx(simulated_s, rel=5e-3)
    for profile, instance, choices in cases(False, offload=False, update=update, cpu_params_per_s=cpu_params_per_s)[
        ::3
    ]:
        period_s = fixed_period(instance, choices, PLENTY)
        assert period_s == pytest.approx(replayed(profile, instance, choices).step_s, rel=0.05)


@pytest.mark.parametrize("update", [EXACT, EARLY], ids=["exact", "early"])
def test_bounds_are_below_every_plan(update: Update) -> None:
    for profile, instance, choices in cases(False, offload=True, update=update):
        simulated_s = replayed(profile, instance, choices).step_s
        assert count_bound_s(instance, PLENTY, 2) <= simulated_s * (1 + 1e-9)
        assert instance.compute_bound_s <= simulated_s * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_budgets_are_kept_and_no_recipe_is_faster(seed: int) -> None:
    scenario = Scenario.of_seed(seed)
    profile = randomly_frozen(scenario.profile(), random.Random(seed))
    solution = scenario.solved(profile, time_limit_s=0.1, gap=GAP)
    if solution is not None:
        assert broken_promises(solution, scenario) == []


def test_training_the_last_blocks_alone_has_no_backward_before_them() -> None:
    whole = with_two_matrices(tiny_profile(6))
    profile = with_frozen(whole, [name for stage in whole.stages[5:] for name in stage.params])
    plans = [solve(p, batch_size=1, gpu_memory_bytes=200_000_000, gap=GAP).plan for p in (whole, profile)]
    assert plans[1].trainable == profile.trainable
    ops = lower(plans[1], profile.stages).ops
    assert {op.stage for op in ops.values() if op.kind == "backward"} == {"block.4", "block.5"}
    assert {op.stage for op in ops.values() if op.kind == "update"} == {"block.4", "block.5", "head"}
    # Six forwards, two backwards in place of six, no backward of the embedding.
    predicted_s = [plan.predicted.step_s for plan in plans if plan.predicted]
    assert predicted_s[0] - predicted_s[1] == pytest.approx(4 * 0.02 + 0.001, rel=0.1)


def test_only_what_is_trained_has_state_and_moves_back() -> None:
    """Of 8 M parameters two blocks of 1 M are trained: fp32 moments of 8 bytes, gradients of 4."""
    whole = with_two_matrices(tiny_profile(6))
    names = [name for stage in whole.stages[2:4] for name in stage.params]
    pins = [f"{where}.state=host" for where in ("block[:]", "embed", "head")]
    plans = [
        solve(p, batch_size=1, optimizer_state="fp32", pins=pins, gap=GAP).plan
        for p in (whole, with_frozen(whole, names))
    ]
    found = [plan.predicted for plan in plans if plan.predicted]
    assert found[0].moved_bytes["d2h"] - found[1].moved_bytes["d2h"] == pytest.approx(6 * 4e6, rel=1e-3)
    assert found[0].peak_bytes["host"] - found[1].peak_bytes["host"] == pytest.approx(6 * 12e6, rel=1e-3)


def test_a_profile_of_other_parameters_trained_is_refused() -> None:
    whole = with_two_matrices(tiny_profile(2))
    plan = solve(with_frozen(whole, ["head.w"]), batch_size=1, gap=GAP).plan
    message = r"^profile: trainable: measured with everything trained, the plan trains \^head\\\.w\$; name another$"
    with pytest.raises(UsageError, match=message):
        simulate_plan(plan, whole)


def test_a_profile_that_trains_nothing_is_refused() -> None:
    profile = tiny_profile(2)
    stages = [stage.model_copy(update={"trainable": False}) for stage in profile.stages]
    with pytest.raises(UsageError, match=r"^profile: stages: no parameter is trained; profile again$"):
        solve(profile.model_copy(update={"stages": stages}), batch_size=1)


def test_what_a_plan_says_of_blocks_without_a_backward() -> None:
    """They keep nothing, and explaining the plan looks at no way for them to keep anything."""
    whole = with_two_matrices(tiny_profile(4))
    profile = with_frozen(whole, ["block.3.w", "head.w", "head.v"])
    plan = solve(profile, batch_size=1, gap=GAP).plan
    frame = plan.to_frame()
    assert list(frame.saved_bytes[["block.0", "block.1", "block.2"]]) == [0, 0, 0]
    assert frame.saved_bytes["block.3"] > 0
    assert list(frame.state_bytes[["embed", "block.0", "block.1", "block.2"]]) == [0, 0, 0, 0]
    base = base_of(plan, profile)
    costs = {stage: costs for costs in stage_costs(base) for stage in costs.stages}
    words = " ".join(alternative.words for alternative in costs["block.0"].alternatives)
    assert "saving" not in words
    assert "what it saves" not in words


def frozen_plan() -> tuple[Plan, Profile]:
    """Blocks 0 and 1 come before anything is trained, 2 is trained in part, 3 is frozen, the head is trained."""
    whole = with_two_matrices(tiny_profile(4))
    profile = with_frozen(whole, ["block.2.w", "head.w", "head.v"])
    return solve(profile, batch_size=1, gap=GAP).plan, profile


def shown(tell: Callable[[Console], None]) -> str:
    console = Console(width=150)
    with console.capture() as captured:
        tell(console)
    return captured.get()


def test_tables_of_a_solution_show_what_is_frozen() -> None:
    profile = frozen_plan()[1]
    solution = solve(profile, batch_size=1, gap=GAP)
    lines = shown(lambda console: print_solution(solution, profile, console)).splitlines()
    rows = {
        cells[1]: cells[3:6] for cells in ([cell.strip() for cell in line.split("│")] for line in lines) if cells[2:]
    }
    assert rows["embed"] == ["none: frozen", "", ""]
    assert rows["block.0 .. 1 (2)"] == ["none: frozen", "nothing", ""]
    assert rows["block.2"][0].endswith(", of a part")
    assert rows["block.3"][0] == "none: frozen"
    assert rows["block.3"][1] != "nothing"
    assert rows["head"][0].startswith("hybrid8 on ")


def test_an_explanation_says_what_is_frozen_and_offers_no_place_for_its_state() -> None:
    plan, profile = frozen_plan()
    explanation = explain(plan, profile, time_limit_s=0)
    text = shown(lambda console: print_explanation(explanation, console))
    assert re.search(r"block\.0\.\.1: weights .*, frozen: no gradients, no state, saves nothing\n", text)
    assert re.search(r"block\.2: weights .*, hybrid8 state of the trained part on \w+, saves ", text)
    assert re.search(r"block\.3: weights .*, frozen: no gradients, no state, saves (all|input) on", text)
    words = {costs.training: [a.words for a in costs.alternatives] for costs in explanation.stages}
    assert words["no backward"]
    assert words["frozen"]
    assert not any("state" in told for told in words["no backward"] + words["frozen"])
    assert any("state" in told for told in words["partly trained"])


def test_frames_and_comparisons_know_no_state_of_what_is_frozen() -> None:
    plan, _ = frozen_plan()
    frame = plan.to_frame()
    assert [frame.state[stage] == "" for stage in plan.stages] == [True, True, True, False, True, False]
    assert [frame.state_format[stage] == "" for stage in plan.stages] == [True, True, True, False, True, False]
    assert [frame.save[f"block.{i}"] == "" for i in range(4)] == [True, True, False, False]
    assert [frame.input_tier[f"block.{i}"] == "" for i in range(4)] == [True, True, False, False]
    figure, axes = plt.subplots()
    draw_decisions(axes, frame)
    legend = axes.get_legend()
    assert legend is not None
    assert "save " not in [text.get_text() for text in legend.get_texts()]
    plt.close(figure)
    moved = {
        stage: choice.model_copy(update={"weights": "gpu", "state": "gpu"}) for stage, choice in plan.stages.items()
    }
    away = {
        stage: choice.model_copy(update={"weights": "gpu", "state": "host"}) for stage, choice in plan.stages.items()
    }
    differences = compare(*(plan.model_copy(update={"stages": stages}) for stages in (moved, away))).stages
    assert [(found.where, found.field) for found in differences] == [
        ("block.2", "optimizer state"),
        ("head", "optimizer state"),
    ]


def test_a_page_draws_a_plan_that_has_no_backward_in_blocks() -> None:
    profile = with_frozen(with_two_matrices(tiny_profile(3)), ["head.w"])
    assert "</svg>" in plan_page(solve(profile, batch_size=1, gap=GAP).plan)
