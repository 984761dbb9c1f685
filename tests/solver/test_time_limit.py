"""The time limit: when time is up, each part of the search is skipped or cut short, and there is still a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lazysched.errors import InfeasibleError
from lazysched.schemas import Update
from lazysched.solver import Solution, explore, outer_search, recipes, solve, stopwatch
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.milp import PlacementProgram
from lazysched.solver.options import EXECUTABLE
from lazysched.solver.plans import Choices
from lazysched.solver.recipe_rules import rules_within
from lazysched.solver.search import improve, simplified
from lazysched.solver.window_replay import WindowReplay
from tests.solver.synthetic import tiny_profile

MB = 10**6
RULES = rules_within(EXECUTABLE)
LIMIT_S = 100.0
GPU_BYTES = 50 * MB
PROFILE = tiny_profile(3, micro_batches=(1, 2))
PARTS = {
    "best_of_rule": recipes, "count_bound_s": outer_search, "explore": explore, "polished": outer_search,
    "solve": PlacementProgram, "lower_bound_s": PlacementProgram,
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


def solved() -> Solution:
    solution = solve(
        PROFILE, batch_size=2, gpu_memory_bytes=GPU_BYTES, host_memory_bytes=1000 * MB, time_limit_s=LIMIT_S, gap=0.0
    )
    report = solution.plan.solver
    assert report is not None
    assert 0 < report.bound_s <= report.objective_s == solution.timeline.step_s
    assert solution.timeline.peak_bytes["gpu"] <= GPU_BYTES
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


def test_without_time_and_recipes_a_plan_that_fits_is_found(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock.takes_s = {"best_of_rule": LIMIT_S}
    monkeypatch.setattr(recipes, "_best_of_instance", lambda *_: None)
    assert not [recipe for recipe in solved().recipes if recipe.plan is not None]
    assert clock.calls["best_of_rule"] == 1


def test_where_no_bound_is_finite_nothing_is_tried(clock: Clock) -> None:
    with pytest.raises(InfeasibleError):
        solve(PROFILE, batch_size=2, gpu_memory_bytes=5 * MB, host_memory_bytes=1000 * MB, time_limit_s=LIMIT_S)
    assert clock.calls["count_bound_s"] > 0
    assert clock.calls["best_of_rule"] == clock.calls["explore"] == 0


def test_a_proof_is_given_up_unless_a_gap_was_asked_for(clock: Clock) -> None:
    """Relaxations take 5 s and prove nothing here; the search before them takes none."""

    def relaxations(gap: float | None) -> int:
        clock.calls.clear()
        with clock.monkeypatch.context() as patch:
            patch.setattr(outer_search.Search, "_may_improve", lambda *_: True)
            patch.setattr(outer_search.Search, "_explore", outer_search.Search._vary)
            clock.takes_s = {"lower_bound_s": 5.0}
            solve(PROFILE, batch_size=2, gpu_memory_bytes=GPU_BYTES, time_limit_s=LIMIT_S, gap=gap)
        return clock.calls["lower_bound_s"]

    assert relaxations(None) == 1
    assert relaxations(0.01) > 5


def test_a_bound_holds_for_the_whole_budget_though_less_of_it_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = solved().plan.solver
    real, tightened = outer_search.Search._winner, []

    def tightening(search: outer_search.Search) -> Any:
        if tightened:
            return real(search)
        tightened.append(True)
        search.space.withheld_bytes["gpu"] += 10 * MB
        return None

    monkeypatch.setattr(outer_search.Search, "_winner", tightening)
    less = solved().plan.solver
    assert whole is not None
    assert less is not None
    small_terms = 2e-5  # that break ties in the program's objective, as a share of the step
    assert less.objective_s > whole.objective_s * (1 + 2 * small_terms)
    assert less.bound_s <= whole.objective_s * (1 + small_terms)


def test_descent_stops_where_it_is() -> None:
    instance, budgets = Instance(PROFILE, Candidate(1, 2), "hybrid8", Update()), Budgets(GPU_BYTES / 1e9, 1.0)
    replay, start = WindowReplay(instance), Choices(("gpu",) * 3, (0,) * 3, 0)
    assert improve(replay, budgets, start, seed=0, max_rounds=9) != start
    assert improve(replay, budgets, start, seed=0, max_rounds=9, has_time=lambda: False) == start
    streamed = replace(start, states=("streamed",) * 3)
    assert simplified(replay, Budgets(1.0, 1.0), streamed) != streamed
    assert simplified(replay, Budgets(1.0, 1.0), streamed, has_time=lambda: False) == streamed
