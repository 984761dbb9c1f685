"""What a run measured, beside what its plan predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lazysched.schemas import Engine, Plan
from lazysched.schemas.run import Run
from lazysched.step_rows import StepRow
from lazysched.timeline import TimedSteps


@dataclass(frozen=True)
class TrainResult:
    """What a run measured, beside what its plan predicted."""

    output_dir: Path
    losses: list[float]
    num_skipped: int
    """Steps that changed nothing because their gradient was not finite."""
    measured_step_s: float | None
    """Median after warm-up; None for a run of fewer steps than that."""
    predicted_step_s: float | None
    timed: TimedSteps | None
    """Exposed and idle time and bytes moved in a step; None where too few steps were timed."""
    predicted_exposed_s: dict[Engine, float]
    """engine -> time in which ``compute`` waits for it, per step; empty where the plan predicts nothing."""
    predicted_moved_bytes: dict[Engine, int]
    """engine -> bytes per step."""
    peak_bytes: dict[str, int]
    """tier -> bytes; on a CPU both tiers are one memory, named ``gpu+host``. ``snapshot``, where there was one: host
    memory of the copy that checkpoints are written from, which no plan predicts."""
    predicted_peak_bytes: dict[str, int]
    held_out_loss_before: float | None
    held_out_loss_after: float | None


def recorded_result(folder: Path, record: Run, rows: Sequence[StepRow], plan: Plan | None) -> TrainResult:
    """What a run returned when it ended, from what its folder holds; without its plan nothing was predicted."""
    predicted = plan.predicted if plan else None
    return TrainResult(
        output_dir=folder, losses=[row.loss for row in rows], num_skipped=sum(row.skipped for row in rows),
        measured_step_s=record.measured_step_s, predicted_step_s=predicted.step_s if predicted else None,
        timed=record.timed, predicted_exposed_s=predicted.exposed_s if predicted else {},
        predicted_moved_bytes=predicted.moved_bytes if predicted else {}, peak_bytes=record.peak_bytes,
        predicted_peak_bytes=record.predicted_peak_bytes, held_out_loss_before=record.held_out_loss_before,
        held_out_loss_after=record.held_out_loss_after,
    )  # fmt: skip
