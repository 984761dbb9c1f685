"""Run: what a training run was and what it measured, for whoever looks at its folder later."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lazysched.schemas.base import Document
from lazysched.timeline import Interval, TimedSteps

RUN_FILE = "run.json"
"""Its name in the folder that a run writes."""
REPORT_FILE = "report.html"
"""Name of the page that is made of it there."""
REPORT_HEAD = "<!DOCTYPE html><!-- lazysched report -->"
"""How that page begins, by which ours are told from files of others."""


class Run(Document):
    """What a run was and what it measured. Its steps are in ``log.jsonl``, its plan in ``plan.json``."""

    version: Literal[1] = 1
    model: str
    """As it was named."""
    data: str
    eval_data: str | None = None
    hardware_id: str
    """Of the machine that ran."""
    settings: dict[str, str | int | float | bool | None]
    """What training was started with, by the names of ``train``."""
    log_sha256: str
    """Hash of the log that belongs to it: a later run in the same folder has its own log there until it ends."""
    num_restored: int = Field(default=0, ge=0)
    """Steps that an earlier process did, which a checkpoint brought."""
    measured_step_s: float | None = None
    """Median of this process after warm-up; null for fewer steps than that."""
    timed: TimedSteps | None = None
    """Waits of ``compute`` and bytes moved in a step; null where too few steps were timed."""
    timeline: list[Interval] = Field(default_factory=list)
    """Operation, engine, start and end in seconds, step: of the last two timed steps, where two follow each other."""
    peak_bytes: dict[str, int]
    """tier -> most bytes; on a CPU both tiers are one memory, named ``gpu+host``."""
    predicted_peak_bytes: dict[str, int]
    """What the plan predicts of the same tiers."""
    held_out_loss_before: float | None = None
    held_out_loss_after: float | None = None
    versions: dict[str, str]
