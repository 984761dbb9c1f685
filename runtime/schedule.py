"""Learning rates over a run, as transformers' Trainer has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

SchedulerType = Literal["linear", "cosine", "constant"]


@dataclass(frozen=True)
class LearningRateSchedule:
    """Warm-up from zero, then linear or cosine decay to zero, or constant.

    Attributes:
        peak: learning rate after the warm-up.
        kind: what follows the warm-up.
        num_steps: of the whole run.
        warmup_ratio: share of the run that warms up, rounded up to whole steps.
    """

    peak: float
    kind: SchedulerType
    num_steps: int
    warmup_ratio: float

    def rate(self, step: int) -> float:
        """Learning rate of ``step``, counted from 0."""
        warmup = math.ceil(self.num_steps * self.warmup_ratio)
        if step < warmup:
            return self.peak * step / max(1, warmup)
        progress = (step - warmup) / max(1, self.num_steps - warmup)
        if self.kind == "linear":
            return self.peak * max(0.0, 1.0 - progress)
        return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress)) if self.kind == "cosine" else self.peak
