"""A forward and its backward as the profiler runs them, and the memory that they take while they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lazysched.profiles.live_bytes import memory_meter


@dataclass(frozen=True)
class Pass:
    """A forward and the backward that uses up what it kept.

    Attributes:
        forward: returns what the backward needs.
        backward: takes that; None where nothing is trained in the stage or before it.
        kept_bytes: of what the forward leaves behind.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], Any] | None
    kept_bytes: Callable[[Any], int]

    def run(self) -> None:
        """Both."""
        kept = self.forward()
        if self.backward is not None:
            self.backward(kept)


def working_bytes_of(stage_pass: Pass, device: torch.device) -> tuple[int, int]:
    """Most bytes while the forward runs beyond what it keeps, and while the backward runs beyond what was there."""
    with memory_meter(device) as meter:
        before_bytes = meter.live_bytes()
        meter.reset_peak()
        kept = stage_pass.forward()
        forward_bytes = meter.peak_bytes() - before_bytes - stage_pass.kept_bytes(kept)
        if stage_pass.backward is None:
            return max(0, forward_bytes), 0
        before_bytes = meter.live_bytes()
        meter.reset_peak()
        stage_pass.backward(kept)
        backward_bytes = meter.peak_bytes() - before_bytes
    return max(0, forward_bytes), max(0, backward_bytes)
