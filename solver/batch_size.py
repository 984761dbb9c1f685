"""The batch with the largest throughput: twice as many rows, again and again, until that gains next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lazysched.errors import InfeasibleError, TimeLimitError
from lazysched.schemas import Profile
from lazysched.solver.batches import max_accumulation
from lazysched.solver.measured import usable_micro_batches
from lazysched.solver.simulate import SIMULATED_STEPS, simulate_plan
from lazysched.solver.solution import Solution, report_with, sought_gap
from lazysched.solver.solve import solve
from lazysched.solver.what_if import over_budget

MIN_GAIN = 0.01
"""Share of the throughput that doubling the batch has to add to be worth it."""
MAX_ACCUMULATION = 64
"""Largest batch tried, in largest micro-batches."""


@dataclass(frozen=True)
class TriedBatch:
    """One batch that was tried.

    Attributes:
        batch_size: rows of a step.
        tokens_per_s: of the plan found; None where nothing was found.
        most_tokens_per_s: no plan of this batch does more; None where nothing was found.
        problem: why nothing was found, in one line.
    """

    batch_size: int
    tokens_per_s: float | None
    most_tokens_per_s: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class BestBatch:
    """What trying batches came to.

    Attributes:
        solution: of the batch chosen.
        tried: all batches, ascending.
        stopped: why no larger batch was tried, in one line.
    """

    solution: Solution
    tried: list[TriedBatch]
    stopped: str


def largest_throughput(
    profile: Profile, settings: Mapping[str, Any], report: Callable[[TriedBatch], None] | None = None
) -> BestBatch:
    """Solve for batches of doubling size, from the smallest profiled, while throughput grows and memory allows.

    Args:
        profile: measurements.
        settings: keyword arguments of ``solve`` but for the batch.
        report: called with each batch that was tried.

    Returns:
        the smallest batch whose plan is within ``MIN_GAIN`` of the most tokens a second that were found.

    Raises:
        UsageError: a setting is wrong, or the profile lacks a figure.
        InfeasibleError: not even the smallest batch fits.
        TimeLimitError: nothing was found in time.
        KeyboardInterrupt: Ctrl-C came before anything was found; after that it ends the search.
    """
    search, ladder = _Batches(profile, settings, report), _ladder(profile)
    stopped = next(filter(None, map(search.try_one, ladder)), "it is the largest that is tried")
    return BestBatch(search.best(), search.tried, stopped)


class _Batches:
    """What was found so far; the arguments are those of ``largest_throughput``."""

    def __init__(
        self, profile: Profile, settings: Mapping[str, Any], report: Callable[[TriedBatch], None] | None
    ) -> None:
        self.profile, self.settings, self.report = profile, settings, report
        self.found: dict[int, Solution] = {}
        self.tried: list[TriedBatch] = []

    def try_one(self, batch_size: int) -> str:
        """Solve for one batch and say why it is the last, or nothing where larger ones may be better."""
        try:
            solution = self._at_least_doubled(solve(self.profile, batch_size=batch_size, **self.settings))
        except (InfeasibleError, TimeLimitError) as error:
            self._tell(TriedBatch(batch_size, None, problem=str(error)))
            if not self.found:
                raise
            return "it does not fit" if isinstance(error, InfeasibleError) else "time was up before a plan was found"
        except KeyboardInterrupt:
            if not self.found:
                raise
            return "interrupted"
        self.found[batch_size] = solution
        self._tell(TriedBatch(batch_size, _tokens_per_s(solution), _most_tokens_per_s(solution)))
        return "interrupted" if solution.interrupted else self._why_enough(batch_size)

    def best(self) -> Solution:
        """The smallest batch that is about as good as the best."""
        most = max(map(_tokens_per_s, self.found.values()))
        enough = [size for size, solution in self.found.items() if _tokens_per_s(solution) * (1 + MIN_GAIN) > most]
        return self.found[min(enough)]

    def _tell(self, batch: TriedBatch) -> None:
        self.tried.append(batch)
        if self.report is not None:
            self.report(batch)

    def _at_least_doubled(self, solution: Solution) -> Solution:
        """``solution``, or the plan of half the rows with twice the micro-batches where that fits and is faster.

        What blocks keep doubles too, so that it only fits where memory has room.
        """
        report, rows = solution.plan.solver, solution.plan.batch_size
        half = self.found.get(rows // 2) if rows % 2 == 0 else None
        if half is None or 2 * half.plan.accumulation > max_accumulation(self.profile):
            return solution
        plan = half.plan.model_copy(update={"batch_size": rows, "accumulation": 2 * half.plan.accumulation})
        timeline = simulate_plan(plan, self.profile, steps=SIMULATED_STEPS)
        if timeline.step_s >= solution.timeline.step_s or over_budget(timeline, plan.budget_bytes, self.profile):
            return solution
        assert report is not None
        report = report_with(report, timeline.step_s, report.bound_s, sought_gap(self.settings.get("gap")))
        plan = plan.model_copy(update={"predicted": timeline.prediction(), "solver": report})
        return replace(solution, plan=plan, timeline=timeline)

    def _why_enough(self, largest: int) -> str:
        """Why ``largest`` is the last batch to try; nothing while doubling gains."""
        halves = [_tokens_per_s(solution) for size, solution in self.found.items() if 2 * size <= largest]
        rest = [solution for size, solution in self.found.items() if 2 * size > largest]
        if not halves or max(map(_tokens_per_s, rest)) >= max(halves) * (1 + MIN_GAIN):
            return ""
        gain = max(map(_tokens_per_s, rest)) / max(halves) - 1
        room = max(map(_most_tokens_per_s, rest)) / max(halves) - 1
        amount = f"only {100 * gain:.2g} % more" if gain > 0 else "no more"
        why = f"twice the rows make {amount} tokens a second"
        if room < MIN_GAIN:
            return why
        cut_short = any(solution.plan.solver and solution.plan.solver.status != "optimal" for solution in rest)
        flag = "a longer --time-limit" if cut_short else "a smaller --gap"
        return f"{why}; that is within the gap, {flag} may find up to {100 * room:.2g} % more"


def _ladder(profile: Profile) -> list[int]:
    """Batches to try: every profiled micro-batch and what doubling makes of it, ascending."""
    sizes = usable_micro_batches(profile)
    if not sizes:
        return [1]  # solving says which figure is missing
    accumulation = max_accumulation(profile)
    most = min(MAX_ACCUMULATION, accumulation) * sizes[-1]
    doubled = sorted({size << k for size in sizes for k in range(most.bit_length()) if size << k <= most})
    return [rows for rows in doubled if any(rows % size == 0 and rows // size <= accumulation for size in sizes)]


def _tokens_per_s(solution: Solution) -> float:
    plan = solution.plan
    return plan.batch_size * plan.seq_len / solution.timeline.step_s


def _most_tokens_per_s(solution: Solution) -> float:
    plan = solution.plan
    assert plan.solver is not None
    return plan.batch_size * plan.seq_len / plan.solver.bound_s
