"""A run that has nothing left to do: it is told from one that goes on by what its folder records."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lazysched.errors import UNREADABLE_JSON, UsageError
from lazysched.runtime.folders import missing_entries
from lazysched.runtime.resuming import Checkpoint
from lazysched.runtime.train_result import TrainResult, recorded_result
from lazysched.runtime.training_state import Value
from lazysched.schemas import Plan
from lazysched.schemas.run import RUN_FILE
from lazysched.schemas.run import Run as RunRecord
from lazysched.step_rows import LOG_FILE, StepRow, rows_of


@dataclass(frozen=True)
class FinishedRun:
    """A run whose folder holds its result and the record of it, which stay as they are.

    Attributes:
        folder: of the result.
        record: what the run was and measured.
        rows: one a step.
        plan: that it ran.
    """

    folder: Path
    record: RunRecord
    rows: list[StepRow]
    plan: Plan

    def to_end(self) -> TrainResult:
        """What the run measured when it ran; nothing is done."""
        return recorded_result(self.folder, self.record, self.rows, self.plan)


def finished_run(
    folder: Path, start: Checkpoint, num_steps: int, asked: Mapping[str, Value], *, is_newest: bool
) -> FinishedRun | None:
    """The run in ``folder`` if it is the one of the checkpoint and has ended; None where something is left to do.

    Args:
        folder: of the result.
        start: the checkpoint to go on from.
        num_steps: that are asked for.
        asked: settings by the names of the record. With others than the finished run's, steps after the checkpoint
            are trained again.
        is_newest: whether the checkpoint was looked for and not named: steps after one that was named are asked for.
    """
    try:
        record, plan = RunRecord.load(folder / RUN_FILE), Plan.load(folder / "plan.json")
        log = (folder / LOG_FILE).read_text(encoding="utf-8")
        rows = rows_of(log)
    except (UsageError, *UNREADABLE_JSON):
        return None  # what is missing or damaged is written anew
    is_recorded = hashlib.sha256(log.encode()).hexdigest() == record.log_sha256 and not missing_entries(folder)
    is_this_one = log.startswith(start.history.jsonl()) and len(rows) == num_steps
    repeats = is_newest and all(record.settings.get(name) == value for name, value in asked.items())
    if is_recorded and is_this_one and (start.state.step == num_steps or repeats):
        return FinishedRun(folder, record, rows, plan)
    return None
