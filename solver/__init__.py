"""Solver: mixed-integer program, fixed recipes, simulator, explanation of infeasibility. Never imports torch."""

from lazysched.solver.report import print_solution
from lazysched.solver.simulate import Timeline, simulate, simulate_plan
from lazysched.solver.solve import Solution, Tried, solve
from lazysched.timeline import Interval

__all__ = ["Interval", "Solution", "Timeline", "Tried", "print_solution", "simulate", "simulate_plan", "solve"]
