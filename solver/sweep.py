"""The frontier of memory and time: the fastest plan at each of many budgets, as a table and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from lazysched.errors import InfeasibleError, UsageError
from lazysched.schemas import Plan, Profile, Tier
from lazysched.solver.many import Answer, Request, answer_all
from lazysched.solver.what_if import engine_shares
from lazysched.units import format_bytes, format_seconds, parse_bytes

SWEPT: dict[str, Tier] = {"gpu-memory": "gpu", "host-memory": "host", "nvme": "nvme"}
MAX_POINTS = 200
COLUMNS: tuple[str, ...] = (
    "budget_bytes", "status", "step_s", "tokens_per_s", "gap", "micro_batch", "gpu_peak_bytes", "host_peak_bytes",
    "nvme_peak_bytes", "binds", "missing_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """A range of budgets of one tier.

    Attributes:
        flag: the option of ``solve`` that is swept, without its dashes.
        budgets: bytes, ascending.
    """

    flag: str
    budgets: tuple[int, ...]

    @property
    def tier(self) -> Tier:
        """Whose budget is swept."""
        return SWEPT[self.flag]


@dataclass(frozen=True)
class Point:
    """One budget of a sweep.

    Attributes:
        budget_bytes: of the swept tier.
        plan: the fastest plan known within it, without its profile; None where there is none.
        binds: engine, and tier whose memory keeps the step from being shorter; empty without a plan.
        missing_bytes: by which the swept budget would have to grow; None with a plan, or where growing it alone cannot
            help or was not worked out.
        status: ``optimal``, ``feasible``, ``infeasible`` or ``time limit``.
    """

    budget_bytes: int
    plan: Plan | None
    binds: str
    missing_bytes: int | None
    status: str


def parse_sweep(text: str) -> Sweep:
    """The sweep of ``gpu-memory=8GB:80GB:8GB``: from, to (included) and step.

    Raises:
        UsageError: another form, an unknown resource, an empty range, or too many points.
    """
    flag, equals, span = text.partition("=")
    flag = flag.strip().replace("_", "-")
    parts = span.split(":")
    if not equals or len(parts) != 3:
        raise UsageError(f"--sweep: {text!r} is no sweep; write for example gpu-memory=8GB:80GB:8GB")
    if flag not in SWEPT:
        raise UsageError(f"--sweep: {flag!r} cannot be swept; use one of {', '.join(SWEPT)}")
    start, stop, step = (parse_bytes(part, "--sweep") for part in parts)
    if step <= 0:
        raise UsageError(f"--sweep: {text!r} has a step of {step}; give a positive size")
    if start <= 0 and SWEPT[flag] != "nvme":  # that can be done without
        raise UsageError(f"--sweep: {text!r} starts at {start}, which is no budget; start at a positive size")
    if start > stop:
        raise UsageError(f"--sweep: {text!r} starts above its end; write the smaller size first")
    count = (stop - start) // step + 1
    if count > MAX_POINTS:
        raise UsageError(f"--sweep: {text!r} has {count} points, at most {MAX_POINTS} are solved; give a larger step")
    return Sweep(flag, tuple(range(start, stop + 1, step)))


def run_sweep(
    profile: Profile,
    sweep: Sweep,
    settings: Mapping[str, Any],
    report: Callable[[int], None] | None = None,
) -> list[Point]:
    """Solve for every budget, on all cores.

    A plan that fits a budget fits larger ones, so a point never has a slower plan than one before it.

    Args:
        profile: measurements.
        sweep: the budgets.
        settings: keyword arguments of ``solve``; the swept budget is put in.
        report: called with the number of points done.

    Raises:
        UsageError: a setting is wrong, or the profile lacks a figure.
    """
    name = f"{sweep.flag.replace('-', '_')}_bytes"
    requests = [Request(profile, {**settings, name: budget}) for budget in sweep.budgets]
    answers = answer_all(requests, report)
    plans: list[Plan | None] = []
    for found, budget in zip(answers, sweep.budgets, strict=True):
        plans.append(_no_slower(found.plan, plans[-1] if plans else None, sweep.tier, budget))
    return [_point(profile, sweep, index, found, plans) for index, found in enumerate(answers)]


def _no_slower(found: Plan | None, before: Plan | None, tier: Tier, budget: int) -> Plan | None:
    """``found``, or the plan of the smaller budget before it where that is as fast, under this budget and bound."""
    if before is None or (found is not None and _step_s(found) < _step_s(before)):
        return found
    budgets = {"budget_bytes": {**before.budget_bytes, tier: budget}}
    report = before.solver if found is None else found.solver
    assert report is not None
    step_s = _step_s(before)
    bound_s = min(report.bound_s, step_s) if found is not None else 0.0
    gap = 1 - bound_s / step_s
    # Another solve of the same plan proved it optimal only for its own, smaller budget.
    status = report.status if found is not None else "feasible"
    solver = report.model_copy(update={"objective_s": step_s, "bound_s": bound_s, "gap": gap, "status": status})
    return before.model_copy(update={**budgets, "solver": solver})


def _point(profile: Profile, sweep: Sweep, index: int, found: Answer, plans: Sequence[Plan | None]) -> Point:
    plan, budget = plans[index], sweep.budgets[index]
    if plan is None:
        status = "infeasible" if found.infeasible else "time limit"
        return Point(budget, None, "", found.missing_bytes.get(sweep.tier), status)
    assert plan.solver is not None
    return Point(budget, plan, _binds(profile, sweep, plan, plans[index + 1 :]), None, plan.solver.status)


def _binds(profile: Profile, sweep: Sweep, plan: Plan, larger: Sequence[Plan | None]) -> str:
    """The engine that most of the step follows, and the swept memory where a larger budget is proven to be faster."""
    assert plan.solver is not None
    engine = next(iter(engine_shares(plan, profile, _step_s(plan))))
    best_s = min((_step_s(other) for other in larger if other is not None), default=_step_s(plan))
    return f"{engine}, {sweep.tier}" if best_s < plan.solver.bound_s else engine


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
    return min(plans, key=_step_s)


def frontier_table(sweep: Sweep, points: Sequence[Point]) -> Table:
    """One row for each budget, within 80 columns; the CSV has more."""
    table = Table(title=f"{sweep.flag} and time", title_justify="left")
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
    assert plan.solver is not None
    peak = format_bytes(plan.predicted.peak_bytes.get(tier, 0))
    gap = f"{100 * plan.solver.gap:.1f} %"
    return format_seconds(_step_s(plan)), f"{_tokens_per_s(plan):,.0f}", peak, point.binds, point.status, gap


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


def _row(point: Point) -> dict[str, Any]:
    row: dict[str, Any] = {
        "budget_bytes": point.budget_bytes, "status": point.status, "binds": point.binds,
        "missing_bytes": point.missing_bytes,
    }  # fmt: skip
    plan = point.plan
    if plan is not None and plan.predicted is not None and plan.solver is not None:
        row |= {"step_s": _step_s(plan), "tokens_per_s": _tokens_per_s(plan), "gap": plan.solver.gap}
        row |= {f"{tier}_peak_bytes": size for tier, size in plan.predicted.peak_bytes.items()}
        row["micro_batch"] = plan.micro_batch
    return row


def _step_s(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_s


def _tokens_per_s(plan: Plan) -> float:
    return plan.batch_size * plan.seq_len / _step_s(plan)
