"""Many sets of choices at once, as arrays, and what each of them costs.

Arrays: N choices, L blocks; times in seconds, sizes in GB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lazysched.solver import options
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.options import STATE_CHOICES
from lazysched.solver.plans import Choices

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
GPU, RESIDENT, STREAMED, NVME = map(STATE_CHOICES.index, ("gpu", "resident", "streamed", "nvme"))
ANY_STREAMED = [STATE_CHOICES.index(choice) for choice in options.STREAMED]


@dataclass(frozen=True)
class ChoiceBatch:
    """N sets of choices: ``saves`` and ``states`` are N x L, ``vocabulary`` has length N."""

    saves: Ints
    states: Ints
    vocabulary: Ints

    @classmethod
    def of(cls, choices: list[Choices]) -> ChoiceBatch:
        """Stack choices."""
        return cls(
            np.array([c.saves for c in choices], dtype=np.int64),
            np.array([[STATE_CHOICES.index(s) for s in c.states] for c in choices], dtype=np.int64),
            np.array([c.vocabulary for c in choices], dtype=np.int64),
        )

    def rows(self, which: Ints | Bools) -> ChoiceBatch:
        """Some of the sets, by index or mask."""
        return ChoiceBatch(self.saves[which], self.states[which], self.vocabulary[which])

    def choices(self, index: int) -> Choices:
        """One set of choices."""
        return Choices(
            tuple(STATE_CHOICES[s] for s in self.states[index]),
            tuple(int(o) for o in self.saves[index]),
            int(self.vocabulary[index]),
        )


@dataclass(frozen=True)
class Memory:
    """Peak GB of N choices on GPU and host, what of the host's copies read and write, and in files."""

    gpu_gb: Floats
    host_gb: Floats
    moved_gb: Floats
    nvme_gb: Floats

    def rows(self, which: Bools) -> Memory:
        """That of some of the choices."""
        return Memory(self.gpu_gb[which], self.host_gb[which], self.moved_gb[which], self.nvme_gb[which])

    def over_gb(self, budgets: Budgets) -> Floats:
        """By how much ``budgets`` are exceeded, all together."""
        over: Floats = sum((np.maximum(used - limit, 0) for used, limit in self._pairs(budgets)), 0 * self.gpu_gb)
        return over

    def fits(self, budgets: Budgets) -> Bools:
        """Which choices are within ``budgets``."""
        fits: Bools = np.all([used <= limit + 1e-9 for used, limit in self._pairs(budgets)], axis=0)
        return fits

    def _pairs(self, budgets: Budgets) -> list[tuple[Floats, float]]:
        return [
            (self.gpu_gb, budgets.gpu_gb), (self.host_gb, budgets.host_gb), (self.moved_gb, budgets.moved_gb),
            (self.nvme_gb, budgets.nvme_gb),
        ]  # fmt: skip


@dataclass(frozen=True)
class Evaluation(Memory):
    """What each of N choices costs."""

    step_s: Floats
