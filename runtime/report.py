"""The end of a run for a person: what was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from lazysched.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lazysched.runtime.train_result import TrainResult

NOT_MEASURED = "not measured"


Row = tuple[str, str, str]
"""What, predicted, measured."""


def comparison_rows(result: TrainResult) -> list[Row]:
    """Predicted and measured: step time, what ``compute`` waits for, bytes moved, peak memory of each tier.

    Among them skipped steps.
    """
    rows = [("step time", _time(result.predicted_step_s), _time(result.measured_step_s)), *_timed_rows(result)]
    if result.num_skipped:
        rows.append(("skipped steps", "", f"{result.num_skipped}, gradient not finite"))
    for tier, num_bytes in result.peak_bytes.items():
        planned = result.predicted_peak_bytes.get(tier)
        included = ", snapshot included" if tier == "gpu+host" and "snapshot" in result.peak_bytes else ""
        rows.append(
            (f"{tier} memory{included}", "-" if planned is None else format_bytes(planned), format_bytes(num_bytes))
        )
    return rows


def comparison_table(result: TrainResult, title: str) -> Table:
    """The rows of a run for a terminal; below them held-out loss before and after."""
    table = Table("", "predicted", "measured", title=title)
    for row in comparison_rows(result):
        table.add_row(*row)
    if result.held_out_loss_before is not None:
        table.add_section()
        table.add_row("", "before", "after")
        table.add_row("held-out loss", _loss(result.held_out_loss_before), _loss(result.held_out_loss_after))
    return table


def _timed_rows(result: TrainResult) -> Iterator[Row]:
    """What takes a timeline to know: waiting by engine, all idle time of ``compute``, bytes by engine."""
    timed, predicted_s, predicted_bytes = result.timed, result.predicted_exposed_s, result.predicted_moved_bytes
    is_predicted = result.predicted_step_s is not None
    for engine in predicted_s | (timed.exposed_s if timed else {}):
        measured = _time(timed.exposed_s.get(engine, 0.0)) if timed else NOT_MEASURED
        planned = _time(predicted_s.get(engine, 0.0) if is_predicted else None)
        yield f"compute waits for {engine}", planned, measured
    idle_s = sum(predicted_s.values()) if is_predicted else None
    yield "compute idle", _time(idle_s), _time(timed.idle_s) if timed else NOT_MEASURED
    for engine in predicted_bytes | (timed.moved_bytes if timed else {}):
        moved = format_bytes(timed.moved_bytes.get(engine, 0)) if timed else NOT_MEASURED
        planned = format_bytes(predicted_bytes.get(engine, 0)) if is_predicted else "-"
        yield f"{engine} moves", planned, moved


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
