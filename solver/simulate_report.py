"""A simulated plan in words: its figures, whether it fits, and whether the prediction that it carries still holds."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from lazysched.schemas import Engine, Plan, Prediction, Profile, Schema, Tier
from lazysched.solver.decision_costs import base_of
from lazysched.solver.simulate import Timeline
from lazysched.solver.what_if import over_budget
from lazysched.solver.words import sizes_in_words
from lazysched.solver.wrapping import print_wrapped
from lazysched.timeline import intervals_by_step
from lazysched.units import format_bytes, format_seconds

STALE_SHARE = 1e-6
"""A stored figure that differs by more than this share of itself from the simulated one is stale."""


class Simulation(Schema):
    """What simulating a plan says of a steady step."""

    step_s: float
    tokens_per_s: float
    exposed_s: dict[Engine, float]
    """Engine -> time in which ``compute`` waits for it."""
    busy_s: dict[Engine, float]
    """Engine -> time in which it works."""
    moved_bytes: dict[Engine, int]
    peak_bytes: dict[Tier, int]
    budget_bytes: dict[Tier, int]
    over_bytes: dict[str, int]
    """Tier, or ``page-locked`` -> bytes by which the plan exceeds what there is; empty where it fits."""
    stored_step_s: float | None
    """Step time that the plan carries; null where it carries none."""
    stale: list[str]
    """Fields of the prediction that the plan carries, but another profile or an edit made wrong."""


def simulation(plan: Plan, profile: Profile, timeline: Timeline) -> Simulation:
    """The figures of ``timeline``, which simulates ``plan`` on the machine of ``profile``."""
    return Simulation(
        step_s=timeline.step_s,
        tokens_per_s=plan.batch_size * plan.seq_len / timeline.step_s if timeline.step_s > 0 else 0.0,
        exposed_s=timeline.exposed_s,
        busy_s=_busy_s(timeline),
        moved_bytes=timeline.moved_bytes,
        peak_bytes=timeline.peak_bytes,
        budget_bytes=plan.budget_bytes,
        over_bytes=over_budget(timeline, plan.budget_bytes, profile),
        stored_step_s=None if plan.predicted is None else plan.predicted.step_s,
        stale=stale_fields(plan.predicted, timeline) if plan.predicted is not None else [],
    )


def up_to_date(plan: Plan) -> Prediction | None:
    """The prediction of the plan as it stands: simulated where it carries its profile, otherwise the stored one."""
    return plan.predicted if plan.profile is None else base_of(plan, plan.profile).timeline.prediction()


def stale_fields(stored: Prediction, timeline: Timeline) -> list[str]:
    """Fields of ``stored`` that the simulation does not bear out."""
    return [name for name in Prediction.model_fields if not _equal(getattr(stored, name), getattr(timeline, name))]


def _equal(stored: object, seen: object) -> bool:
    if isinstance(stored, dict) and isinstance(seen, dict):
        return all(_equal(stored.get(key, 0), seen.get(key, 0)) for key in stored | seen)
    assert isinstance(stored, int | float)
    assert isinstance(seen, int | float)
    return math.isclose(stored, seen, rel_tol=STALE_SHARE, abs_tol=1e-9)


def _busy_s(timeline: Timeline) -> dict[Engine, float]:
    by_step = intervals_by_step(timeline.intervals)
    busy_s: dict[Engine, float] = {}
    for interval in by_step[max(by_step)].values():
        busy_s[interval.engine] = busy_s.get(interval.engine, 0.0) + interval.duration_s
    return busy_s


def print_simulation(found: Simulation, console: Console, *, other_profile: bool) -> None:
    """Print the figures and, below them, what is wrong with the plan.

    Args:
        found: what was simulated.
        console: where to print.
        other_profile: whether the profile is another than the one the plan was solved from.
    """
    table = Table(title="Simulated step", title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("step", f"{format_seconds(found.step_s)}, {found.tokens_per_s:,.0f} tokens/s")
    for engine, seconds in found.busy_s.items():
        waits_s = found.exposed_s.get(engine, 0.0)
        waited = f", compute waits {format_seconds(waits_s)} for it" if waits_s > 0 else ""
        moved = f", {format_bytes(found.moved_bytes[engine])}" if engine in found.moved_bytes else ""
        table.add_row(engine, f"works {format_seconds(seconds)} ({_share(seconds, found.step_s)}){moved}{waited}")
    for tier, peak in found.peak_bytes.items():
        budget = found.budget_bytes.get(tier, 0)
        if peak or budget:
            table.add_row(f"{tier} peak", f"{format_bytes(peak)} of {format_bytes(budget)}")
    console.print(table)
    for line in _remarks(found, other_profile):
        print_wrapped(console, line)


def _share(seconds: float, step_s: float) -> str:
    return f"{100 * seconds / step_s:.0f} %" if step_s > 0 else "0 %"


def _remarks(found: Simulation, other_profile: bool) -> Iterator[str]:
    if found.over_bytes:
        yield f"does not fit: {sizes_in_words(found.over_bytes)} over what there is"
    if found.stored_step_s is None:
        yield "the plan carries no prediction"
    elif other_profile and found.stale:
        yield f"the plan's own prediction, for the machine it was solved for: {format_seconds(found.stored_step_s)}"
    elif found.stale:
        yield (
            f"the prediction in the plan is stale: {', '.join(found.stale)} differ from the simulation, "
            f"it says {format_seconds(found.stored_step_s)} a step"
        )
