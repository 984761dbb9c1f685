"""Memory of a run against its plan: peaks, and what is said when the GPU's does not suffice."""

from __future__ import annotations

import re
import traceback

import torch

from lazysched.errors import RunError
from lazysched.runtime import machine
from lazysched.runtime.arguments import choose_device
from lazysched.runtime.session import Session
from lazysched.schemas import Plan
from lazysched.units import format_bytes


class RunMemory:
    """Peaks of a run against the plan's, from before the run's memory is taken."""

    def __init__(self, device: torch.device, plan: Plan) -> None:
        self._device, self._plan = device, plan
        machine.reset_peaks(device)
        self._rss_before = machine.rss_bytes()

    def peaks(self, session: Session, snapshot_bytes: int = 0) -> dict[str, int]:
        """Most bytes so far, by tier; ``snapshot_bytes``: of the copy that checkpoints were written from."""
        snapshot = {"snapshot": snapshot_bytes} if snapshot_bytes else {}
        if self._device.type == "cuda":
            return {
                "gpu": torch.cuda.max_memory_reserved() + machine.context_bytes(self._device),
                "host": session.buffers.arena.total_bytes,
            } | snapshot
        return {"gpu+host": max(0, machine.peak_rss_bytes() - self._rss_before)} | snapshot

    def predicted(self) -> dict[str, int]:
        """What the plan predicts of the same tiers."""
        if self._plan.predicted is None:
            return {}
        peaks = self._plan.predicted.peak_bytes
        both = {"gpu": peaks.get("gpu", 0), "host": peaks.get("host", 0)}
        return both if self._device.type == "cuda" else {"gpu+host": sum(both.values())}


def out_of_memory(plan: Plan, error: Exception) -> RunError:
    """What was planned, what was found and what to do; lets go what the failed step still held.

    Torch's allocator keeps what it reserved after the session was closed, so its numbers are those of the failure.
    """
    traceback.clear_frames(error.__traceback__)
    total_bytes, free_bytes = machine.device_memory(choose_device(None))
    reserved_bytes = torch.cuda.memory_reserved()
    peak_bytes = plan.predicted.peak_bytes.get("gpu") if plan.predicted else None
    planned = "an unknown peak" if peak_bytes is None else f"a peak of {format_bytes(peak_bytes)}"
    if "gpu" in plan.budget_bytes:
        planned += f" within {format_bytes(plan.budget_bytes['gpu'])}"
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    return RunError(
        f"GPU memory: planned {planned}; found {format_bytes(reserved_bytes)} reserved, of which at most "
        f"{format_bytes(torch.cuda.max_memory_allocated())} in use, "
        f"{format_bytes(max(0, total_bytes - free_bytes - reserved_bytes))} taken by the driver and other processes, "
        f"and {format_bytes(free_bytes)} free when {asked[1] if asked else 'memory'} more was asked for; "
        f"solve again with a smaller --gpu-memory or --batch-size"
    )
