"""Solver: mixed-integer program, fixed recipes, simulator, explanation of infeasibility. Never imports torch."""

from lazysched.solver.frontier import frontier_frame, steps_frame
from lazysched.solver.many import Answer, Request, answer_all
from lazysched.solver.plan_frame import equal_runs, plan_frame
from lazysched.solver.report import print_solution
from lazysched.solver.simulate import Timeline, simulate, simulate_plan
from lazysched.solver.solution import Solution, Tried
from lazysched.solver.solve import solve
from lazysched.solver.steady_step import memory_frame, steady_frame
from lazysched.solver.sweep import Point, Sweep, run_sweep
from lazysched.timeline import Interval

__all__ = [
    "Answer", "Interval", "Point", "Request", "Solution", "Sweep", "Timeline", "Tried", "answer_all", "equal_runs",
    "frontier_frame", "memory_frame", "plan_frame", "print_solution", "run_sweep", "simulate", "simulate_plan", "solve",
    "steady_frame", "steps_frame",
]  # fmt: skip
