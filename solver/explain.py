"""A plan explained: what binds, what a little more would buy, what each decision costs, where compute waits.

Everything but ``gains`` is simulated, so it is the same whenever it is asked. Gains are also looked for by solving anew
with a changed machine or budget; what such a solve finds beyond its own distance to the bound is proven, less is not.
"""

from __future__ import annotations

import math

from lazysched.errors import UsageError
from lazysched.schemas import Engine, Plan, Profile, Schema, Tier
from lazysched.solver import what_if
from lazysched.solver.decision_costs import (
    Alternative,
    Base,
    StageCosts,
    base_of,
    recompute_s,
    stage_costs,
    step_alternatives,
)
from lazysched.solver.waits import WaitGroup, wait_groups
from lazysched.solver.what_if import Gain, over_budget


class Explanation(Schema):
    """What ``explain`` found."""

    pins: list[str]
    """What was fixed by hand and still is so; gains keep to it, alternatives against it say so."""
    step_s: float
    """The plan's step on this machine, simulated."""
    recompute_s: float
    """Of it, forward and backward beyond the fastest variants."""
    exposed_s: dict[Engine, float]
    """Of it, ``compute`` waiting, by what it waits for."""
    binding_engine: Engine
    """The one whose speed decides most of the step."""
    binding_tiers: list[Tier]
    """Memory of which more is proven to make the step shorter; empty where nothing was solved."""
    engine_shares: dict[Engine, float]
    """Engine -> share of the step that follows its speed, largest first."""
    peak_bytes: dict[Tier, int]
    budget_bytes: dict[Tier, int]
    over_bytes: dict[str, int]
    """Tier, or ``page-locked`` -> bytes by which the plan exceeds what there is; empty where it fits."""
    reference_s: float
    """Step of the fastest plan known for the same machine and budgets, which gains count from: this plan, or a faster
    one that was found while looking for gains."""
    bound_s: float | None
    """No plan for the same machine and budgets is faster; null where nothing was solved."""
    gap: float | None
    """Share of ``reference_s`` by which a plan for the same budgets might still be faster."""
    problem: str | None
    """Why solving anew found no plan."""
    gains: list[Gain]
    """What a little more of each resource would buy, largest gain first."""
    stages: list[StageCosts]
    step_alternatives: list[Alternative]
    waits: list[WaitGroup]
    """Longest first."""


def explain(plan: Plan, profile: Profile | None = None, *, time_limit_s: float = 10.0) -> Explanation:
    """Explain ``plan`` as it stands.

    Args:
        plan: the decisions.
        profile: of the machine to be; None: the one that the plan was solved from.
        time_limit_s: for each of the about eight solves; 0 solves nothing, which leaves what memory would buy open.

    Raises:
        UsageError: there is no profile, it is of another model, or it lacks a figure.
    """
    measured = profile or plan.profile
    if not 0 <= time_limit_s < math.inf:
        raise UsageError(f"time_limit_s: {time_limit_s} is no time to spend; give seconds, or 0 to solve nothing")
    if measured is None:
        raise UsageError("plan: profile: null, as in a plan written by hand; name one with --profile")
    base = base_of(plan, measured)
    step_s = base.timeline.step_s
    asked = what_if.changes(plan, base.profile, base.timeline.moved_bytes)
    answers = what_if.solve_changes(plan, base.profile, asked, time_limit_s) if time_limit_s else []
    again = answers[0].plan if answers else None
    # A machine or budget with more of something has no slower plans, so its bound holds here too.
    bounds = [answer.plan.solver.bound_s for answer in answers if answer.plan is not None and answer.plan.solver]
    bound_s = max(bounds) if again is not None else None
    known = what_if.Known([plan, *(answer.plan for answer in answers if answer.plan is not None)])
    reference_s = min(known.best_s(base.profile, plan.budget_bytes), step_s)
    gains = what_if.gains(plan, known, asked, reference_s, bound_s)
    shares = what_if.engine_shares(plan, base.profile, step_s)
    return Explanation(
        pins=[pin.text for pin in base.pins],
        step_s=step_s,
        recompute_s=recompute_s(base),
        exposed_s=base.timeline.exposed_s,
        binding_engine=next(iter(shares)),
        binding_tiers=[g.tier for g in gains if g.tier is not None and g.gain_s > 0 and g.within_gap is False],
        engine_shares=shares,
        peak_bytes=base.timeline.peak_bytes,
        budget_bytes=plan.budget_bytes,
        over_bytes=over_budget(base.timeline, plan.budget_bytes, base.profile),
        reference_s=reference_s,
        bound_s=bound_s,
        gap=None if bound_s is None else max(0.0, 1 - bound_s / reference_s),
        problem=answers[0].problem if answers else None,
        gains=gains,
        stages=stage_costs(base),
        step_alternatives=step_alternatives(base),
        waits=_waits(base),
    )


def _waits(base: Base) -> list[WaitGroup]:
    return wait_groups(base.program, base.timeline.intervals, in_line=base.profile.device == "cpu")
