"""The batch with the largest throughput: twice as many rows, again and again, until that gains next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lazysched.errors import InfeasibleError, TimeLimitError
from lazysched.schemas import Profile
from lazysched.solver.measured import usable_micro_batches
from lazysched.solver.solution import Solution
from lazysched.solver.solve import solve

MIN_GAIN = 0.01
"""Share of the throughput that doubling the batch has to add to be worth another doubling."""
MAX_ACCUMULATION = 64
"""Largest batch tried, in largest micro-batches."""


@dataclass(frozen=True)
class TriedBatch:
    """One batch that was tried.

    Attributes:
        batch_size: rows of a step.
        tokens_per_s: of the plan found; None where nothing was found.
        problem: why nothing was found, in one line.
    """

    batch_size: int
    tokens_per_s: float | None
    problem: str | None = None


def largest_throughput(
    profile: Profile, settings: Mapping[str, Any], report: Callable[[TriedBatch], None] | None = None
) -> Solution:
    """Solve for batches of doubling size, from the smallest profiled, while throughput grows and memory allows.

    Args:
        profile: measurements.
        settings: keyword arguments of ``solve`` but for the batch.
        report: called with each batch that was tried.

    Returns:
        the solution of most tokens a second, of equals the smallest batch.

    Raises:
        UsageError: a setting is wrong, or the profile lacks a figure.
        InfeasibleError: not even the smallest batch fits.
        TimeLimitError: nothing was found in time.
    """
    found: dict[int, Solution] = {}
    for batch_size in _ladder(profile):
        try:
            found[batch_size] = solve(profile, batch_size=batch_size, **settings)
        except (InfeasibleError, TimeLimitError) as error:
            _tell(report, TriedBatch(batch_size, None, str(error)))
            if not found:
                raise
            break
        _tell(report, TriedBatch(batch_size, _tokens_per_s(found[batch_size])))
        halves = [_tokens_per_s(solution) for size, solution in found.items() if 2 * size <= batch_size]
        if halves and max(map(_tokens_per_s, found.values())) < max(halves) * (1 + MIN_GAIN):
            break
    return max(found.values(), key=_tokens_per_s)


def _ladder(profile: Profile) -> list[int]:
    """Batches to try: every profiled micro-batch and what doubling makes of it, ascending."""
    sizes = usable_micro_batches(profile)
    if not sizes:
        return [1]  # solving says which figure is missing
    most = MAX_ACCUMULATION * sizes[-1]
    return sorted({size << k for size in sizes for k in range(most.bit_length()) if size << k <= most})


def _tell(report: Callable[[TriedBatch], None] | None, tried: TriedBatch) -> None:
    if report is not None:
        report(tried)


def _tokens_per_s(solution: Solution) -> float:
    plan = solution.plan
    return plan.batch_size * plan.seq_len / solution.timeline.step_s
