"""Solver: mixed-integer program, fixed recipes, simulator, explanation of infeasibility. Never imports torch."""

from lazysched.solver.plan_frame import equal_runs, plan_frame
from lazysched.solver.report import print_solution
from lazysched.solver.simulate import Timeline, simulate, simulate_plan
from lazysched.solver.solution import Solution, Tried
from lazysched.solver.solve import solve
from lazysched.solver.steady_step import memory_frame, steady_frame
from lazysched.timeline import Interval

__all__ = [
    "Interval", "Solution", "Timeline", "Tried", "equal_runs", "memory_frame", "plan_frame", "print_solution",
    "simulate", "simulate_plan", "solve", "steady_frame",
]  # fmt: skip
