"""What a person sees of a run beside its numbers."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from lazysched.runtime.progress import ProgressReport
from lazysched.step_rows import StepRow


def row(step: int, skipped: bool = False) -> StepRow:
    return StepRow(step, 1.0, 1.25, 1e-3, tokens=800, trained_tokens=4, step_s=0.5, skipped=skipped)


def test_lines_count_the_skipped_steps_that_they_leave_out() -> None:
    text = io.StringIO()
    with ProgressReport(Console(file=text, width=200), 6, None, logging_steps=2) as report:
        for step, skipped in enumerate([False, False, True, False, True, True]):
            report(row(step, skipped))
    first, second, third = text.getvalue().splitlines()
    assert "skipped" not in first
    assert "1 skipped: gradient not finite" in second
    assert "3 skipped: gradient not finite" in third


def ticks(*moments_s: float) -> Iterator[float]:
    yield from moments_s


def test_plain_lines_hold_all_and_no_control_characters() -> None:
    """The pace counts from the first step, which warms up, and includes what lies between steps."""
    text = io.StringIO()
    moments = ticks(100.0, 110.0, 140.0, 141.0)
    with ProgressReport(Console(file=text, width=40), 1000, 0.4, 1, clock=lambda: next(moments)) as report:
        for step in (10, 11, 12):
            report(row(step))
        report(row(999))
    numbers = "loss 1.0000, norm 1.25, lr 1.00e-03, 1,600 tokens/s, 500 ms (plan 400 ms)"
    assert text.getvalue().splitlines() == [
        f"step 11/1000 {numbers}",
        f"step 12/1000 {numbers}, 2:44:40 left",
        f"step 13/1000 {numbers}, 5:29:00 left",
        f"step 1000/1000 {numbers}",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_all_in_two_lines(width: int) -> None:
    text = io.StringIO()
    moments = ticks(0.0, 3600.0)
    console = Console(file=text, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    with ProgressReport(console, 20_000, 12.3, 1, num_done=9998, clock=lambda: next(moments)) as report:
        report(row(9998))
        report(row(9999))
        report.tell("a line between")
    bar, numbers = text.getvalue().rstrip("\x1b[?25h\n").splitlines()[-2:]
    assert "10000/20000 500 ms (plan 12.3 s), 416 days, 16:00:00 left" in bar
    assert "loss 1.0000, norm 1.25, lr 1.00e-03, 1,600 tokens/s" in numbers
    assert "a line between" in text.getvalue()
