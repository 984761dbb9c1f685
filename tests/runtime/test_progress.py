"""What a person sees of a run beside its numbers."""

from __future__ import annotations

import io

from rich.console import Console

from lazysched.runtime.loop import StepRow
from lazysched.runtime.progress import ProgressReport


def row(step: int, skipped: bool) -> StepRow:
    return StepRow(step, 1.0, 1.0, 1e-3, tokens=8, trained_tokens=4, step_s=0.5, skipped=skipped)


def test_lines_count_the_skipped_steps_that_they_leave_out() -> None:
    text = io.StringIO()
    with ProgressReport(Console(file=text, width=200), 6, None, logging_steps=2) as report:
        for step, skipped in enumerate([False, False, True, False, True, True]):
            report(row(step, skipped))
    first, second, third = text.getvalue().splitlines()
    assert "skipped" not in first
    assert second.endswith("1 skipped: gradient not finite")
    assert third.endswith("3 skipped: gradient not finite")
