"""How a solve ended is reported as it was."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import highspy
import pulp
import pytest

from lazysched.solver import highs
from lazysched.solver.highs import solve_problem


def knapsack(num_items: int, least: float) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """Cheapest items that weigh at least ``least`` in two dimensions."""
    generator = random.Random(3)
    problem = pulp.LpProblem("knapsack", pulp.LpMinimize)
    items = [problem.add_variable(f"item_{i}", cat=pulp.LpBinary) for i in range(num_items)]
    problem += pulp.lpSum(generator.randint(50, 99) * item for item in items)
    for _ in range(8):
        problem += pulp.lpSum(generator.randint(50, 99) * item for item in items) >= least
    return problem, items


class TestOutcome:
    def test_optimum_by_hand(self) -> None:
        problem = pulp.LpProblem("three", pulp.LpMinimize)
        items = [problem.add_variable(name, cat=pulp.LpBinary) for name in "abc"]
        problem += 3 * items[0] + 2 * items[1] + 4 * items[2]
        problem += 5 * items[0] + 3 * items[1] + 7 * items[2] >= 8
        outcome = solve_problem(problem, gap=0.0, time_limit_s=10, seed=0)
        assert outcome.status == "optimal"
        assert outcome.objective == pytest.approx(5)
        assert [item.value() for item in items] == pytest.approx([1, 1, 0])

    def test_relaxation_bounds_it(self) -> None:
        problem, _ = knapsack(30, 900)
        relaxed = solve_problem(problem, gap=0.0, time_limit_s=10, seed=0, relaxed=True)
        exact = solve_problem(problem, gap=0.01, time_limit_s=10, seed=0)
        assert relaxed.bound <= exact.bound + 1e-6 <= exact.objective + 2e-6

    def test_infeasible(self) -> None:
        problem, _ = knapsack(3, 10_000)
        outcome = solve_problem(problem, gap=0.0, time_limit_s=10, seed=0)
        assert outcome.status == "infeasible"
        assert not outcome.has_solution

    def test_a_stop_by_the_clock_is_not_called_optimal(self) -> None:
        problem, items = knapsack(150, 5000)
        start = {item.name: 1.0 for item in items}
        outcome = solve_problem(problem, gap=0.0, time_limit_s=0.05, seed=0, start_values=start)
        assert outcome.status in ("feasible", "time_limit")
        assert outcome.bound < outcome.objective

    def test_a_start_is_never_lost(self) -> None:
        problem, items = knapsack(40, 1200)
        best = solve_problem(problem, gap=0.01, time_limit_s=10, seed=0)
        start = {item.name: float(round(item.value())) for item in items}
        again = solve_problem(problem, gap=0.5, time_limit_s=10, seed=0, start_values=start)
        assert again.objective <= best.objective + 1e-6


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    problem, _ = knapsack(5, 100)
    solve_problem(problem, gap=0.0, time_limit_s=10, seed=0)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


@pytest.mark.parametrize("status", ["kUnknown", "kSolveError", "kNotset"])
def test_numerical_trouble_proves_nothing(status: str) -> None:
    found = getattr(highspy.HighsModelStatus, status)
    model = SimpleNamespace(getModelStatus=lambda: found, getInfo=lambda: None)
    outcome = highs._outcome(SimpleNamespace(solverModel=model), relaxed=True)  # type: ignore[arg-type]
    assert (outcome.status, outcome.bound, outcome.has_solution) == ("unknown", -math.inf, False)
