"""The judge of what the search finds: plans are lowered and simulated, and the fastest that fits wins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lazysched.lower import lower
from lazysched.schemas import Plan
from lazysched.solver.instance import Candidate
from lazysched.solver.plans import Choices, Found, make_plan
from lazysched.solver.simulate import SIMULATED_STEPS, Timeline, simulate
from lazysched.solver.space import Budget, Space
from lazysched.solver.stopwatch import always


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
        self._judged: dict[tuple[Candidate, Choices], Judged] = {}

    def simulated(self, found: Found) -> Judged:
        """The plan of ``found``, without a prediction, and its simulation."""
        key = found.candidate, found.choices  # two replays of them may differ in the last bit of the step
        if key not in self._judged:
            settings = self.space.settings
            instance = self.space.instance(found.candidate)
            plan = make_plan(instance, found.choices, budget_bytes=settings.budget_bytes)
            program = lower(plan, settings.profile.stages)
            timeline = simulate(program, settings.profile, micro_batch=plan.micro_batch, steps=SIMULATED_STEPS)
            self._judged[key] = Judged(found, plan, timeline)
        return self._judged[key]

    def has_simulated(self, found: Found) -> bool:
        """Whether the simulation of ``found`` is known already."""
        return (found.candidate, found.choices) in self._judged

    def all_simulated(self) -> list[Found]:
        """Everything whose simulation is known."""
        return [judged.found for judged in self._judged.values()]

    def fastest(
        self, finalists: Iterable[Found], has_time: Callable[[], bool] = always
    ) -> tuple[Judged | None, dict[Budget, int]]:
        """The fastest that fits, and by how much the first one that does not exceeds each budget.

        Args:
            finalists: the most promising first.
            has_time: asked before each simulation that is not known yet; only the first plan that fits does without.
        """
        best: Judged | None = None
        excess: dict[Budget, int] = {}
        for found in finalists:
            if best is not None and not self.has_simulated(found) and not has_time():
                continue
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
