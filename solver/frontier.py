"""What a sweep found, as a table, as CSV and as pandas frames."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from lazysched.errors import InfeasibleError, UsageError
from lazysched.schemas import Plan, Tier
from lazysched.solver.sweep import Point, Sweep, step_of
from lazysched.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas as pd

COLUMNS: tuple[str, ...] = (
    "budget_bytes", "status", "step_s", "tokens_per_s", "gap", "micro_batch", "gpu_peak_bytes", "host_peak_bytes",
    "nvme_peak_bytes", "binds", "missing_bytes",
)  # fmt: skip
MEANINGS = {
    "feasible": "feasible: a faster plan may exist, by up to the gap; a longer --time-limit may find it",
    "time limit": "time limit: within --time-limit neither a plan nor a proof that none fits was found",
    "interrupted": "interrupted: Ctrl-C came first; a plan there is the best until then, or that of a smaller budget",
}
"""Status -> what it means, where that is not plain."""


def best_of(points: Sequence[Point]) -> Plan:
    """The fastest plan of a sweep, of equally fast ones that of the smallest budget.

    Raises:
        InfeasibleError: nothing fits at any budget.
    """
    plans = [point.plan for point in points if point.plan is not None]
    if not plans:
        last = points[-1]
        missing = "" if last.missing_bytes is None else f", which lacks {format_bytes(last.missing_bytes)}"
        raise InfeasibleError(
            f"no plan fits at any budget of the sweep, up to {format_bytes(last.budget_bytes)}{missing}; sweep higher"
        )
    return min(plans, key=step_of)


def frontier_table(sweep: Sweep, points: Sequence[Point]) -> Table:
    """One row for each budget, within 80 columns; the CSV has more."""
    statuses = {point.status for point in points}
    notes = [meaning for status, meaning in MEANINGS.items() if status in statuses]
    if any(point.binds.endswith("?") for point in points):
        notes.append(f"{sweep.tier}?: a larger budget was faster, but by less than the gap here")
    table = Table(
        title=f"{sweep.flag} and time", title_justify="left", caption="\n".join(notes) or None, caption_justify="left"
    )
    for column in ("budget", "step", "tokens/s", f"{sweep.tier} peak", "binds", "status", "gap"):
        table.add_column(column, no_wrap=True)
    for point in points:
        table.add_row(format_bytes(point.budget_bytes), *_cells(sweep.tier, point))
    return table


def _cells(tier: Tier, point: Point) -> tuple[str, ...]:
    plan = point.plan
    if plan is None:
        missing = "" if point.missing_bytes is None else f"lacks {format_bytes(point.missing_bytes)}"
        return "", "", "", missing, point.status, ""
    assert plan.predicted is not None
    known_gap = _gap(plan)
    peak = format_bytes(plan.predicted.peak_bytes.get(tier, 0))
    gap = "unknown" if known_gap is None else f"{100 * known_gap:.1f} %"
    return format_seconds(step_of(plan)), f"{_tokens_per_s(plan):,.0f}", peak, point.binds, point.status, gap


def save_frontier(path: Path, points: Sequence[Point]) -> None:
    """Write the points as CSV with the columns ``COLUMNS``: bytes, seconds, empty where there is no figure.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(_row(point) for point in points)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}); name a file you may write") from None


def frontier_frame(points: Sequence[Point]) -> pd.DataFrame:
    """The points with the columns of the CSV; index: ``budget_bytes``; bytes, seconds, NaN where there is no figure."""
    import pandas as pd

    rows = [dict.fromkeys(COLUMNS) | _row(point) for point in points]
    return pd.DataFrame(rows).set_index("budget_bytes").convert_dtypes()


def steps_frame(points: Sequence[Point]) -> pd.DataFrame:
    """Seconds of a step, for ``plots.draw_frontier``.

    Returns:
        index: budgets in GB (float64); columns: ``lazysched`` and every recipe (float64); NaN where
        nothing fits, or no plan or recipe was found in time.
    """
    import pandas as pd

    rows = [({} if p.plan is None else {"lazysched": step_of(p.plan)}) | p.recipes_s for p in points]
    names = dict.fromkeys(["lazysched", *(name for row in reversed(rows) for name in row)])
    index = pd.Index([point.budget_bytes / 1e9 for point in points], name="budget, GB")
    return pd.DataFrame(rows, index=index, columns=list(names), dtype=float)


def _gap(plan: Plan) -> float | None:
    """The plan's gap; None where no bound is known, as where Ctrl-C came first."""
    assert plan.solver is not None
    return plan.solver.gap if plan.solver.bound_s > 0 else None


def _row(point: Point) -> dict[str, Any]:
    row: dict[str, Any] = {
        "budget_bytes": point.budget_bytes, "status": point.status, "binds": point.binds,
        "missing_bytes": point.missing_bytes,
    }  # fmt: skip
    plan = point.plan
    if plan is not None and plan.predicted is not None and plan.solver is not None:
        row |= {"step_s": step_of(plan), "tokens_per_s": _tokens_per_s(plan), "gap": _gap(plan)}
        row |= {f"{tier}_peak_bytes": size for tier, size in plan.predicted.peak_bytes.items()}
        row["micro_batch"] = plan.micro_batch
    return row


def _tokens_per_s(plan: Plan) -> float:
    return plan.batch_size * plan.seq_len / step_of(plan)
