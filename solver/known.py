"""What a search knows so far: plans found and bounds proved, by combination."""

from __future__ import annotations

import math
from collections.abc import Callable

from lazysched.solver.instance import Candidate
from lazysched.solver.plans import Found
from lazysched.solver.solution import Progress, Tried

ROUND = 4
"""Combinations that are explored against the same incumbent, so that the number of cores changes no plan."""


class Known:
    """The best plan of each combination, and a bound that none of its plans is below.

    Args:
        gap: share of the incumbent's step by which a plan must be faster to count.
        report: called whenever a faster plan is found or a bound raised.
    """

    def __init__(self, gap: float, report: Callable[[Progress], None] | None = None) -> None:
        self._gap, self._report = gap, report
        self.found: dict[Candidate, Found] = {}
        self.bounds: dict[Candidate, float] = {}
        """Seconds a step; infinite where nothing fits."""

    @property
    def best_s(self) -> float:
        """Step of the incumbent; infinite before the first."""
        return min((found.step_s for found in self.found.values()), default=math.inf)

    @property
    def bound_s(self) -> float:
        """No plan of any combination is faster."""
        return min(self.bounds.values(), default=0.0)

    def fastest(self) -> list[Found]:
        """Plans of all combinations, the fastest first."""
        return sorted(self.found.values(), key=lambda found: found.step_s)

    def may_improve(self, candidate: Candidate) -> bool:
        """Whether the candidate's bound allows a plan that beats the incumbent by more than the gap."""
        return self.bounds[candidate] < self.best_s * (1 - self._gap)

    def open(self, done: set[Candidate]) -> list[Candidate]:
        """Combinations that may improve the incumbent and are not ``done``, the lowest bound first."""
        left = [candidate for candidate in self.bounds if candidate not in done and self.may_improve(candidate)]
        return sorted(left, key=lambda candidate: self.bounds[candidate])

    def next_round(self, done: set[Candidate]) -> list[Candidate]:
        """As many of the open ones as are looked at together."""
        return self.open(done)[:ROUND]

    def keep(self, found: Found) -> None:
        """Take a plan in, if it is the best of its combination."""
        known = self.found.get(found.candidate)
        if known is None or found.step_s < known.step_s:
            self.found[found.candidate] = found
            self._tell()

    def raise_bound(self, candidate: Candidate, bound_s: float) -> None:
        """Take a bound in, if it says more than the one before."""
        self.bounds[candidate] = max(self.bounds[candidate], bound_s)
        self._tell()

    def tried(self) -> list[Tried]:
        """All combinations, the lowest bound first."""
        ordered = sorted(self.bounds.items(), key=lambda item: item[1])
        return [Tried(c, bound_s, self.found[c].step_s if c in self.found else None) for c, bound_s in ordered]

    def _tell(self) -> None:
        if self._report is None:
            return
        best_s = self.best_s if self.found else None
        bound_s = min(self.bounds.values(), default=None)
        self._report(Progress(best_s, bound_s if best_s is None or bound_s is None else min(best_s, bound_s)))
