"""The judge of what the search finds: plans are lowered and simulated, and the fastest that fits wins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lazysched.lower import lower
from lazysched.schemas import Plan
from lazysched.solver.plans import Found, make_plan
from lazysched.solver.simulate import SIMULATED_STEPS, Timeline, simulate
from lazysched.solver.space import Budget, Space


@dataclass(frozen=True)
class Judged:
    """Choices with the plan that they make and its simulation."""

    found: Found
    plan: Plan
    timeline: Timeline


class Judge:
    """Simulates what is found in ``space``, each thing once."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._judged: dict[Found, Judged] = {}

    def simulated(self, found: Found) -> Judged:
        """The plan of ``found``, without a prediction, and its simulation."""
        if found not in self._judged:
            settings = self.space.settings
            instance = self.space.instance(found.candidate)
            plan = make_plan(instance, found.choices, budget_bytes=settings.budget_bytes)
            program = lower(plan, settings.profile.stages)
            timeline = simulate(program, settings.profile, micro_batch=plan.micro_batch, steps=SIMULATED_STEPS)
            self._judged[found] = Judged(found, plan, timeline)
        return self._judged[found]

    def fastest(self, finalists: Iterable[Found]) -> tuple[Judged | None, dict[Budget, int]]:
        """The fastest that fits, and by how much the first one that does not exceeds each budget."""
        best: Judged | None = None
        excess: dict[Budget, int] = {}
        for found in finalists:
            judged = self.simulated(found)
            over = self.over_budget(judged.timeline)
            if over:
                excess = excess or over
            elif best is None or judged.timeline.step_s < best.timeline.step_s:
                best = judged
        return best, excess

    def over_budget(self, timeline: Timeline) -> dict[Budget, int]:
        """Budget -> bytes by which a plan exceeds it; what it keeps is absent."""
        settings = self.space.settings
        budget, limit_bytes = settings.budget_bytes, settings.profile.pin_limit_bytes
        over: dict[Budget, int] = {
            "gpu": timeline.peak_bytes["gpu"] - budget["gpu"],
            "host": timeline.peak_bytes["host"] - budget["host"],
            "nvme": timeline.peak_bytes["nvme"] - budget["nvme"],
            "pinned": 0 if limit_bytes is None else timeline.pinned_bytes - limit_bytes,
        }
        return {name: size for name, size in over.items() if size > 0}
