"""The space of the outer search: its points, the coefficients of each, and what memory there is for it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal

from lazysched.schemas import HostMemory, Profile, StateFormat, Tier, Update
from lazysched.solver.batches import accumulations
from lazysched.solver.explore import FIRST_DEPTH, FIRST_LAG
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.measured import offload_limits
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.options import Scope
from lazysched.solver.pins import Pin
from lazysched.solver.plans import Found, transferred

Budget = Literal["gpu", "host", "nvme", "pinned"]
"""What limits a plan: memory of the tiers, and how much of the host's can be page-locked."""


@dataclass(frozen=True)
class Settings:
    """The arguments of ``solve``, checked."""

    profile: Profile
    batch_size: int
    budget_bytes: dict[Tier, int]
    host_memories: tuple[HostMemory, ...]
    update: Update
    state_format: StateFormat
    pins: tuple[Pin, ...]
    scope: Scope
    time_limit_s: float
    gap: float
    seed: int
    proves_to_the_end: bool = False


class Space:
    """Candidates with their instances and budgets.

    Attributes:
        settings: what was asked.
        accumulations: micro-batch -> accumulation.
        limits: micro-batch -> sizes in bytes that a block may send to the host, ascending, from 0 on.
        withheld_bytes: budget -> what is kept back of it, because the simulation needs more than the memory rows say.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.accumulations = accumulations(settings.profile, settings.batch_size)
        self.limits = {size: offload_limits(settings.profile, size) for size in self.accumulations}
        self.withheld_bytes: dict[Budget, int] = {"gpu": 0, "host": 0, "nvme": 0, "pinned": 0}
        self._instances: dict[Candidate, Instance] = {}

    def combinations(self) -> list[Candidate]:
        """Every point that what is fixed by hand allows, with the first depth and lag."""
        listed = [
            Candidate(size, accumulation, FIRST_DEPTH, FIRST_LAG, limit, memory, self.settings.scope.segments)
            for size, accumulation in self.accumulations.items()
            for limit, memory in itertools.product(self.limits[size], self.settings.host_memories)
        ]
        return [candidate for candidate in listed if self.instance(candidate).has_options]

    def instance(self, candidate: Candidate) -> Instance:
        """The coefficients of a candidate, made once."""
        if candidate not in self._instances:
            settings = self.settings
            self._instances[candidate] = self.make_instance(
                candidate, settings.state_format, settings.scope, settings.pins
            )
        return self._instances[candidate]

    def transferred(self, found: Found, theirs: Instance) -> Found | None:
        """What was found among the options of another instance, in this space; None where it has other options."""
        candidate = replace(found.candidate, segments=self.settings.scope.segments)
        choices = transferred(found.choices, theirs, self.instance(candidate))
        return None if choices is None else replace(found, candidate=candidate, choices=choices)

    def make_instance(
        self, candidate: Candidate, state_format: StateFormat, scope: Scope, pins: tuple[Pin, ...]
    ) -> Instance:
        """The coefficients of a candidate with state in any format, things anywhere in ``scope``, and any pins."""
        return Instance(self.settings.profile, candidate, state_format, self.settings.update, pins, scope)

    def budgets(self, instance: Instance) -> Budgets:
        """What the buffers of an instance may fill."""
        budget, withheld = self.settings.budget_bytes, self.withheld_bytes
        return Budgets(
            instance.usable_gpu_gb(budget["gpu"] - withheld["gpu"]),
            (budget["host"] - withheld["host"]) / 1e9,
            (self._pin_limit_bytes(instance.candidate) - withheld["pinned"]) / 1e9,
            (budget["nvme"] - withheld["nvme"]) / 1e9,
        )

    def _pin_limit_bytes(self, candidate: Candidate) -> float:
        """Most bytes that copies may read and write on the host; infinite where they need not be page-locked."""
        limit_bytes = self.settings.profile.pin_limit_bytes
        return math.inf if limit_bytes is None or candidate.host_memory == "pageable" else limit_bytes
