"""HiGHS inside this process, through PuLP, with a warm start, Ctrl-C and an honest account of how a solve ended.

Four traps are handled here. A wall-clock stop with an incumbent is reported by PuLP as ``Optimal``: the status comes
from HiGHS itself. ``pulp.HiGHS`` has no warm start: it is set between building and running. Another number of threads
within one process silently yields no solution: the scheduler is reset before every solve. HiGHS does not notice
Ctrl-C: its callbacks ask for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import highspy
import pulp

from lazysched.solver.interrupts import INTERRUPTS

NUM_THREADS = 2
"""One fixed number, so that a plan does not depend on the machine that solves it."""

WITH_A_START = dict.fromkeys(
    ("mip_heuristic_run_rins", "mip_heuristic_run_rens", "mip_heuristic_run_root_reduced_cost"), False
)
"""Programs within the program that look for solutions: a start from the descent is as good, and they took most of a
solve's time (28 blocks, middle memory: 3.9 of 4.6 s)."""

Status = Literal["optimal", "feasible", "infeasible", "time_limit", "unknown"]


@dataclass(frozen=True)
class Outcome:
    """How a solve ended.

    Attributes:
        status: ``optimal`` within the gap, ``feasible`` when stopped with a solution, ``infeasible``, or ``time_limit``
            without any.
        objective: of the solution; infinite without one.
        bound: no solution is better.
    """

    status: Status
    objective: float
    bound: float

    @property
    def has_solution(self) -> bool:
        """Whether the variables hold a solution."""
        return self.status in ("optimal", "feasible")


class _WarmHighs(pulp.HiGHS):  # PuLP has no types
    """``pulp.HiGHS`` that starts from given values of some variables."""

    start_values: Mapping[str, float] = {}

    def createAndConfigureSolver(self, lp: Any) -> None:
        with _silent_stdout():
            super().createAndConfigureSolver(lp)

    def callSolver(self, lp: Any) -> None:
        if self.start_values:
            known = [variable for variable in lp.variables() if variable.name in self.start_values]
            values = [self.start_values[variable.name] for variable in known]
            lp.solverModel.setSolution(len(known), [variable.index for variable in known], values)
        for callback in ("cbMipInterrupt", "cbSimplexInterrupt", "cbIpmInterrupt"):
            getattr(lp.solverModel, callback).subscribe(_stop_if_interrupted)
        lp.solverModel.run()


def _stop_if_interrupted(event: Any) -> None:
    """HiGHS asks this many times a second whether to go on."""
    if INTERRUPTS.pending:
        event.interrupt()


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """Drop what C code prints: HiGHS shows a banner as it is made, before any option can be set."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(null)
        os.close(kept)


GAVE_UP = (
    highspy.HighsModelStatus.kUnknown, highspy.HighsModelStatus.kSolveError, highspy.HighsModelStatus.kNotset,
)  # fmt: skip
"""Numerical trouble, or stopped before anything was known: nothing to rely on."""


def solve_problem(
    problem: pulp.LpProblem,
    *,
    gap: float,
    time_limit_s: float,
    seed: int,
    start_values: Mapping[str, float] | None = None,
    relaxed: bool = False,
) -> Outcome:
    """Solve ``problem`` to a relative ``gap``; its variables hold the solution afterwards.

    Args:
        problem: to be minimised.
        gap: (objective - bound) / objective at which to stop.
        time_limit_s: wall-clock seconds.
        seed: of HiGHS' random choices.
        start_values: variable name -> value, for the binaries of a known solution.
        relaxed: with True, integrality is dropped: a quick lower bound.

    Raises:
        KeyboardInterrupt: Ctrl-C came; the variables hold nothing then.
    """
    highspy.Highs.resetGlobalScheduler(True)
    solver = _WarmHighs(
        mip=not relaxed, msg=False, gapRel=gap, timeLimit=max(time_limit_s, 0.01), threads=NUM_THREADS,
        random_seed=seed, log_to_console=False, **(WITH_A_START if start_values else {}),
    )  # fmt: skip
    solver.start_values = start_values or {}
    with INTERRUPTS.held_back():
        problem.solve(solver)
    return _outcome(problem, relaxed)


def _outcome(problem: pulp.LpProblem, relaxed: bool) -> Outcome:
    model = problem.solverModel
    assert model is not None
    status, info = model.getModelStatus(), model.getInfo()
    infeasible = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)
    if status in infeasible:
        return Outcome("infeasible", math.inf, math.inf)
    if status == highspy.HighsModelStatus.kOptimal:
        objective = float(info.objective_function_value)
        return Outcome("optimal", objective, objective if relaxed else float(info.mip_dual_bound))
    if status in GAVE_UP:
        return Outcome("unknown", math.inf, -math.inf)
    assert status == highspy.HighsModelStatus.kTimeLimit, f"HiGHS ended with {status}"
    bound = -math.inf if relaxed else float(info.mip_dual_bound)
    if problem.sol_status == pulp.LpSolutionIntegerFeasible and not relaxed:
        return Outcome("feasible", float(info.objective_function_value), bound)
    return Outcome("time_limit", math.inf, bound)
