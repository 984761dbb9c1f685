"""The line that a terminal shows while a model is profiled or a plan is searched."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lazysched import progress
from lazysched.progress import in_words, left_s, profile_shown, search_shown
from lazysched.solver import solve
from lazysched.solver.solution import Progress
from tests.solver.synthetic import tiny_profile


def test_a_search_tells_of_better_plans_and_bounds() -> None:
    told: list[Progress] = []
    solution = solve(
        tiny_profile(3), batch_size=1, gpu_memory_bytes=60 * 10**6, host_memory_bytes=10**9, report=told.append
    )
    best = [progress.best_s for progress in told if progress.best_s is not None]
    assert best == sorted(best, reverse=True)
    assert best[-1] == pytest.approx(solution.timeline.step_s, rel=0.01)
    assert any(progress.bound_s is not None for progress in told)
    assert all(p.bound_s <= p.best_s for p in told if p.bound_s is not None and p.best_s is not None)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_is_shown_it(is_terminal: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=is_terminal, width=100)
    with search_shown(30.0, console) as report:
        report(Progress(1.25, 1.0))
    assert ("step 1.25 s, at best 1 s" in written.getvalue()) == is_terminal
    assert bool(written.getvalue()) == is_terminal


def test_before_anything_is_known() -> None:
    assert in_words(Progress(None, None)) == "looking for a plan"


@pytest.mark.parametrize(("is_terminal", "left"), [(True, 20), (True, -1), (False, 20)])
def test_a_profile_tells_what_it_measures_and_what_is_left(
    is_terminal: bool, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=is_terminal, width=100)
    monkeypatch.setattr(progress, "left_s", lambda elapsed_s, at_s, done: left)
    with profile_shown(console) as report:
        report("blocks", 0.0)
        report("copies", 0.85)
    shown = written.getvalue()
    assert bool(shown) == is_terminal
    assert ("measuring copies" in shown) == is_terminal
    assert ("about 20 s left" in shown) == (is_terminal and left == 20)
    assert "about -1 s left" not in shown  # it takes longer than it looked: nothing is known


def test_what_is_left_follows_from_what_is_done() -> None:
    assert left_s(elapsed_s=10, at_s=10, done=0.25) == 30
    assert left_s(elapsed_s=25, at_s=10, done=0.25) == 15
    assert left_s(elapsed_s=70, at_s=10, done=0.25) <= 0  # later than it looked
