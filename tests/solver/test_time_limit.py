"""The time limit: when time is up, each part of the search is skipped or cut short, and there is still a plan."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lazysched.errors import InfeasibleError
from lazysched.schemas import Profile, StateFormat, Tier, Update
from lazysched.solver import (
    Solution,
    explore,
    infeasible,
    judge,
    known,
    last_resort,
    outer_search,
    recipes,
    remedies,
    solve,
    stopwatch,
)
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.milp import PlacementProgram
from lazysched.solver.options import EXECUTABLE
from lazysched.solver.plans import Choices, Found
from lazysched.solver.recipe_rules import rules_within
from lazysched.solver.search import improve, simplified
from lazysched.solver.simulate import Timeline
from lazysched.solver.space import Budget, Settings, Space
from lazysched.solver.window_replay import WindowReplay
from tests.solver.synthetic import tiny_profile
from tests.solver.test_file_plans import FAST, with_files

MB = 10**6
RULES = rules_within(EXECUTABLE)
LIMIT_S = 100.0
GPU_BYTES = 50 * MB
PROFILE = tiny_profile(3, micro_batches=(1, 2))
PARTS = {
    "best_of_rule": recipes, "count_bound_s": outer_search, "explore": explore, "polished": outer_search,
    "solve": PlacementProgram, "lower_bound_s": PlacementProgram,
    "simulate": judge,
}  # fmt: skip


class Clock:
    """Time stands still but for what a part is made to take; ``calls`` counts the calls of each part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.calls = 0.0, Counter[str]()
        self.takes_s: dict[str, float] = {}
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(stopwatch, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        for name, owner in PARTS.items():
            self._count(owner, name)

    def _count(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            found = original(*args, **kwargs)
            self.now_s += self.takes_s.get(name, 0.0)
            return found

        self.monkeypatch.setattr(owner, name, counted)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def solved(gpu_bytes: int = GPU_BYTES) -> Solution:
    solution = solve(
        PROFILE, batch_size=2, gpu_memory_bytes=gpu_bytes, host_memory_bytes=1000 * MB, time_limit_s=LIMIT_S, gap=0.0
    )
    report = solution.plan.solver
    assert report is not None
    assert 0 < report.bound_s <= report.objective_s == solution.timeline.step_s
    assert solution.timeline.peak_bytes["gpu"] <= gpu_bytes
    return solution


def test_with_time_for_everything_everything_is_done(clock: Clock) -> None:
    solution = solved()
    assert clock.calls["best_of_rule"] == len(solution.recipes) > 2
    assert clock.calls["count_bound_s"] > 1
    assert min(clock.calls[name] for name in PARTS) > 0


def test_after_half_of_the_time_no_further_recipe_is_tried_if_there_is_a_plan(clock: Clock) -> None:
    clock.takes_s = {"best_of_rule": LIMIT_S * 0.3}
    solution = solved()
    tried = clock.calls["best_of_rule"]
    assert 0 < tried < 5
    # What the time did not suffice for is not said to fit nowhere.
    assert [recipe.plan is not None for recipe in solution.recipes][-1]
    assert len(solution.recipes) <= tried
    assert clock.calls["explore"] > 0


@pytest.mark.parametrize("slow", ["best_of_rule", "count_bound_s", "explore"])
def test_nothing_is_begun_when_time_is_up(clock: Clock, slow: str) -> None:
    clock.takes_s = {slow: LIMIT_S}
    solved()
    parts = list(PARTS)
    assert clock.calls[slow] == 1 or slow == "best_of_rule"  # recipes go on until one of them fits
    assert clock.calls["count_bound_s"] >= 1
    later = parts[max(2, parts.index(slow) + 1) : parts.index("lower_bound_s")]
    assert {name: clock.calls[name] for name in later} == dict.fromkeys(later, 0)


def test_a_slow_program_is_the_last(clock: Clock) -> None:
    clock.takes_s = {"solve": LIMIT_S}
    solved()
    assert clock.calls["solve"] == 1


def test_a_slow_simulation_is_the_last(clock: Clock) -> None:
    clock.takes_s = {"simulate": LIMIT_S}
    solution = solved()
    assert clock.calls["simulate"] == 1
    # Nothing is said of recipes that were not simulated, unless they fit nowhere.
    assert all(recipe.timeline in (None, solution.timeline) for recipe in solution.recipes)
    clock.takes_s = {}
    assert sum(recipe.timeline is not None for recipe in solved().recipes) > 1


def test_finalists_are_simulated_until_one_fits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock.takes_s = {"simulate": LIMIT_S}
    real, asked = judge.Judge.over_budget, []

    def over_budget(self: judge.Judge, timeline: Timeline) -> dict[Budget, int]:
        asked.append(timeline)
        return {"gpu": 1} if len(asked) < 3 else real(self, timeline)

    monkeypatch.setattr(judge.Judge, "over_budget", over_budget)
    solved()
    assert clock.calls["simulate"] == 3


def test_one_plan_is_simulated_after_an_interrupt(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_search.Search, "_explore", interrupted)
    solution = solved()
    assert solution.interrupted
    assert clock.calls["simulate"] == 1


def test_an_interrupt_keeps_what_the_search_of_executed_plans_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_search.Search, "_explore", interrupted)
    profile = with_files(PROFILE, FAST)
    assert solve(
        profile, batch_size=2, nvme_bytes=1000 * MB, gpu_memory_bytes=GPU_BYTES, executable_only=False
    ).interrupted


def test_the_fastest_that_was_simulated_is_taken_after_an_interrupt(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated: list[int] = []

    def last_round(own: judge.Judge, winner: judge.Judged, _: object) -> None:
        faster = replace(winner.timeline, step_s=winner.timeline.step_s / 2)
        with monkeypatch.context() as patch:
            patch.setattr(judge, "simulate", lambda *_args, **_kwargs: faster)
            own.simulated(replace(winner.found, candidate=replace(winner.found.candidate, d2h_lag=3)))
        simulated.append(clock.calls["simulate"])
        interrupted()

    monkeypatch.setattr(outer_search, "improved", last_round)
    solution = solved()
    assert solution.interrupted
    assert solution.plan.d2h_lag == 3
    assert [clock.calls["simulate"]] == simulated
    assert len(solution.recipes) > 1


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_nothing_is_simulated_twice(clock: Clock) -> None:
    update = Update(clip_norm=1.0, check_finite=True)
    budget: dict[Tier, int] = {"gpu": GPU_BYTES, "host": 1000 * MB, "nvme": 0}
    scope = EXECUTABLE.without_files()
    space = Space(Settings(PROFILE, 2, budget, ("pinned",), update, "hybrid8", (), scope, LIMIT_S, 0.01, 0))
    found = Found(Candidate(1, 2), Choices(("streamed",) * 3, (0,) * 3, 0), 1.0)
    own = judge.Judge(space)
    assert own.simulated(found) is own.simulated(replace(found, step_s=1.0 + 2**-52))
    assert clock.calls["simulate"] == 1


def test_without_time_and_recipes_a_plan_that_fits_is_found(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock.takes_s = {"best_of_rule": LIMIT_S}
    monkeypatch.setattr(recipes, "_best_of_instance", lambda *_: None)
    solution = solved()
    assert not [recipe for recipe in solution.recipes if recipe.plan is not None]
    assert clock.calls["best_of_rule"] == 1
    assert solution.plan.accumulation == 1  # of what fits, the step of fewest operations


def test_where_no_bound_is_finite_nothing_is_tried(clock: Clock) -> None:
    with pytest.raises(InfeasibleError):
        solve(PROFILE, batch_size=2, gpu_memory_bytes=5 * MB, host_memory_bytes=1000 * MB, time_limit_s=LIMIT_S)
    assert clock.calls["count_bound_s"] > 0
    assert clock.calls["best_of_rule"] == clock.calls["explore"] == 0


def test_where_highs_gives_up_counting_the_bound_is_that_of_the_compute(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.takes_s = {"best_of_rule": LIMIT_S}
    monkeypatch.setattr(outer_search, "count_bound_s", lambda *_: -math.inf)
    report = solved().plan.solver
    assert report is not None
    assert 0 < report.bound_s <= report.objective_s


def test_a_proof_is_given_up_unless_a_gap_was_asked_for(clock: Clock) -> None:
    """Relaxations take 5 s and prove nothing here; the search before them takes none."""

    def relaxations(gap: float | None) -> int:
        clock.calls.clear()
        with clock.monkeypatch.context() as patch:
            patch.setattr(known.Known, "may_improve", lambda *_: True)
            for part in ("_explore", "_raise_bounds"):
                patch.setattr(outer_search.Search, part, lambda *_: None)
            clock.takes_s = {"lower_bound_s": 5.0}
            solve(PROFILE, batch_size=2, gpu_memory_bytes=GPU_BYTES, time_limit_s=LIMIT_S, gap=gap)
        return clock.calls["lower_bound_s"]

    assert relaxations(None) == 1
    assert relaxations(0.01) > 5


def test_a_bound_holds_for_the_whole_budget_though_less_of_it_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_bytes = 60 * MB
    whole = solved(gpu_bytes).plan.solver
    real, tightened = outer_search.Search._winner, []

    def tightening(search: outer_search.Search) -> Any:
        if tightened:
            return real(search)
        tightened.append(True)
        search.space.withheld_bytes["gpu"] += 10 * MB
        return None

    monkeypatch.setattr(outer_search.Search, "_winner", tightening)
    less = solved(gpu_bytes).plan.solver
    assert whole is not None
    assert less is not None
    small_terms = 2e-5  # that break ties in the program's objective, as a share of the step
    assert less.objective_s > whole.objective_s * (1 + 2 * small_terms)
    assert less.bound_s <= whole.objective_s * (1 + small_terms)


def test_remedies_share_as_much_time_as_the_search_had(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descent finds anything here, and every program runs to its limit."""
    real = infeasible.solve_problem

    def slow(*args: Any, time_limit_s: float, **kwargs: Any) -> Any:
        clock.now_s += time_limit_s
        return real(*args, time_limit_s=LIMIT_S, **kwargs)

    def refused(time_limit_s: float) -> tuple[InfeasibleError, float]:
        begun_s = clock.now_s
        budgets = {"gpu_memory_bytes": 20 * MB, "host_memory_bytes": 20 * MB}
        with pytest.raises(InfeasibleError) as refused:
            solve(PROFILE, batch_size=8, optimizer_state="fp32", time_limit_s=time_limit_s, **budgets)
        return refused.value, clock.now_s - begun_s

    monkeypatch.setattr(infeasible, "solve_problem", slow)
    monkeypatch.setattr(infeasible, "nearest", lambda *_: None)
    monkeypatch.setattr(infeasible, "_TIME_LIMIT_S", 50.0)
    error, took_s = refused(1.0)
    assert took_s <= last_resort.LEAST_S + 0.1
    assert error.missing_bytes == {}
    assert str(error).endswith(
        "memory; not worked out in the time: more gpu memory, more memory of both; a longer --time-limit may name more"
    )
    error, took_s = refused(1000.0)
    assert took_s > last_resort.LEAST_S
    assert error.missing_bytes
    assert "not worked out" not in str(error)


def test_only_what_comes_into_question_is_told_as_not_worked_out() -> None:
    def not_worked_out(profile: Profile, batch_size: int, state_format: StateFormat) -> list[str]:
        budget: dict[Tier, int] = {"gpu": MB, "host": MB, "nvme": 0}
        scope = EXECUTABLE.without_files()
        space = Space(
            Settings(profile, batch_size, budget, ("pinned",), Update(), state_format, (), scope, LIMIT_S, 0.01, 0)
        )
        question = infeasible.Question(profile, batch_size, budget, state_format, scope, space.make_instance, 0)
        return remedies.remedies(question.within(0.0)).not_worked_out

    memory = ["more gpu memory", "more host memory", "more memory of both"]
    assert not_worked_out(PROFILE, 1, "hybrid8") == memory
    everything = [*memory, "files", "a smaller batch", "a smaller optimizer state"]
    assert not_worked_out(with_files(PROFILE, FAST), 2, "fp32") == everything


def test_descent_stops_where_it_is() -> None:
    instance, budgets = Instance(PROFILE, Candidate(1, 2), "hybrid8", Update()), Budgets(GPU_BYTES / 1e9, 1.0)
    replay, start = WindowReplay(instance), Choices(("gpu",) * 3, (0,) * 3, 0)
    assert improve(replay, budgets, start, seed=0, max_rounds=9) != start
    assert improve(replay, budgets, start, seed=0, max_rounds=9, has_time=lambda: False) == start
    streamed = replace(start, states=("streamed",) * 3)
    assert simplified(replay, Budgets(1.0, 1.0), streamed) != streamed
    assert simplified(replay, Budgets(1.0, 1.0), streamed, has_time=lambda: False) == streamed
