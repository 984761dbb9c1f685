"""``lazysched plot``: one step of a plan as one web page that needs nothing else, its pictures embedded as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, get_args

from lazysched.html_page import facts, page, picture, save_page
from lazysched.plots import draw_decisions, draw_memory, draw_timeline
from lazysched.schemas import Plan, Profile, Tier
from lazysched.solver import Timeline, equal_runs, memory_frame, simulate_plan, steady_frame
from lazysched.units import format_bytes, format_seconds

DECISIONS = ["weights", "state", "save", "saved_tiers", "segment", "input_tier"]


def save_plan_page(path: Path, plan: Plan, profile: Profile | None = None) -> None:
    """Simulate ``plan`` and write its page.

    Args:
        path: HTML file to write.
        plan: the decisions.
        profile: of the machine to be; None: the one in the plan.

    Raises:
        UsageError: there is no profile, or it lacks a figure.
        RunError: the file cannot be written.
    """
    save_page(path, plan_page(plan, profile))


def plan_page(plan: Plan, profile: Profile | None = None) -> str:
    """The page as HTML; arguments and errors as for ``save_plan_page``."""
    timeline = simulate_plan(plan, profile)
    memory, decisions = memory_frame(plan, timeline, profile), plan.to_frame(profile)
    parts = [
        f"<h1>{escape(plan.model_id)}</h1>",
        f'<p class="note">{escape(_origin(plan, profile))}</p>',
        _facts(plan, timeline),
        "<h2>One step on the engines</h2>",
        picture(3.0, partial(draw_timeline, steady=steady_frame(timeline.intervals))),
    ]
    tiers: tuple[Tier, ...] = get_args(Tier)
    for tier in tiers:
        if tier not in memory:
            continue
        draw = partial(draw_memory, memory=memory, tier=tier, budget_bytes=plan.budget_bytes.get(tier))
        parts += [f"<h2>Memory of the tier {tier}</h2>", picture(3.8, draw)]
    parts += [
        "<h2>Decisions by stage</h2>",
        picture(3.2, partial(draw_decisions, decisions=decisions)),
        f'<div class="scroll">{equal_runs(decisions[DECISIONS]).to_html(index=False, border=0)}</div>',
    ]
    return page(f"{plan.model_id}: plan", parts)


def _origin(plan: Plan, profile: Profile | None) -> str:
    measured = profile or plan.profile
    assert measured is not None  # simulating refuses that
    kind = "estimated, not measured" if measured.estimated else "measured"
    return f"Simulated with a profile of {measured.hardware_id} ({kind})."


def _facts(plan: Plan, timeline: Timeline) -> str:
    """What a step does and takes, as a table."""
    tokens = plan.batch_size * plan.seq_len
    rows = {
        "batch": f"{plan.batch_size} rows of {plan.seq_len} tokens, {plan.micro_batch} rows at once",
        "step": f"{format_seconds(timeline.step_s)}, {tokens / timeline.step_s:,.0f} tokens/s",
        "compute waits for": _listed(timeline.exposed_s, format_seconds) or "nothing",
        "moved in a step": _listed(timeline.moved_bytes, format_bytes) or "nothing",
        "peaks": _listed({tier: peak for tier, peak in timeline.peak_bytes.items() if peak}, format_bytes),
        "prefetch depth, copies behind": f"{plan.prefetch_depth}, {plan.d2h_lag}",
    }
    if plan.solver is not None:
        rows["solver"] = f"{plan.solver.status}, {100 * plan.solver.gap:.1f} % from the bound"
    return facts(rows)


def _listed(amounts: Mapping[Any, float], shown: Callable[[float], str]) -> str:
    return ", ".join(f"{name} {shown(amount)}" for name, amount in amounts.items())
