"""The end of a run for a person: what was predicted beside what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from lazysched.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lazysched.runtime.train import TrainResult


def comparison_table(result: TrainResult, title: str) -> Table:
    """Step time and peak memory of each tier, predicted and measured; skipped steps; held-out loss before and after."""
    table = Table("", "predicted", "measured", title=title)
    table.add_row("step time", _time(result.predicted_step_s), _time(result.measured_step_s))
    if result.num_skipped:
        table.add_row("skipped steps", "", f"{result.num_skipped}, gradient not finite")
    for tier, num_bytes in result.peak_bytes.items():
        planned = result.predicted_peak_bytes.get(tier)
        table.add_row(f"{tier} memory", "-" if planned is None else format_bytes(planned), format_bytes(num_bytes))
    if result.held_out_loss_before is not None:
        table.add_section()
        table.add_row("", "before", "after")
        table.add_row("held-out loss", _loss(result.held_out_loss_before), _loss(result.held_out_loss_after))
    return table


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
