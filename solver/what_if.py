"""What a little more of something would buy: the plan simulated, and solved anew, with another machine or budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lazysched.errors import UsageError
from lazysched.schemas import Curve, Engine, Plan, Profile, Rate, SaveVariant, Schema, Tier, Timing
from lazysched.schemas.executable import check_executable, executes_files
from lazysched.solver.many import Answer, Request, answer_all
from lazysched.solver.pins import kept_pins
from lazysched.solver.simulate import SIMULATED_STEPS, Timeline, simulate_plan
from lazysched.units import format_bytes

MORE_BYTES = 10**9
MORE_BYTES_PER_S = 1e9
FASTER = 1.1
MEMORY: dict[Tier, str] = {"gpu": "gpu memory", "host": "host memory", "nvme": "room for files on nvme"}
LINKS: tuple[Engine, ...] = ("h2d", "d2h", "nvme_read", "nvme_write")


@dataclass(frozen=True)
class Change:
    """A machine or a budget that differs in one thing.

    Attributes:
        resource: key of what there is more of, as ``gpu_memory`` or ``h2d``.
        words: the same for a person.
        profile: of the other machine.
        budget_bytes: the other budgets.
        tier: whose budget grew; None where the machine changed.
    """

    resource: str
    words: str
    profile: Profile
    budget_bytes: dict[Tier, int]
    tier: Tier | None = None


class Gain(Schema):
    """What a change would buy."""

    resource: str
    words: str
    same_plan_s: float | None
    """Step time of the very same plan with the change, simulated; null where only a budget grew."""
    best_s: float
    """Step time of the fastest plan known with the change."""
    gain_s: float
    """What that saves of the fastest plan known without the change; 0 where nothing."""
    within_gap: bool | None
    """Whether a plan as fast might exist without the change; null where nothing was solved."""
    tier: Tier | None = None
    """Whose budget grew."""


def changes(plan: Plan, profile: Profile, moved_bytes: Mapping[Engine, int]) -> list[Change]:
    """The changes that are asked about: budgets in use, links in use, processors.

    Args:
        plan: gives the budgets.
        profile: of the machine.
        moved_bytes: engine -> what the plan moves over it.
    """
    budget = plan.budget_bytes
    result = [
        Change(f"{tier}_memory", f"{format_bytes(MORE_BYTES)} more {MEMORY[tier]}", profile,
               {**budget, tier: budget[tier] + MORE_BYTES}, tier)
        for tier in budget if budget[tier] > 0
    ]  # fmt: skip
    for link in LINKS:
        if moved_bytes.get(link):
            result.append(Change(link, f"1 GB/s more on {link}", wider(profile, link, MORE_BYTES_PER_S), budget))
    for engine, words in (("cpu", "a CPU update 10 % faster"), ("compute", "compute 10 % faster")):
        result.append(Change(engine, words, faster(profile, engine, FASTER), budget))  # type: ignore[arg-type]
    return result


def engine_shares(plan: Plan, profile: Profile, step_s: float) -> dict[Engine, float]:
    """Engine -> share of the step that follows its speed, largest first.

    Each engine is made a little faster in turn and the plan is simulated again: where the step shortens as much as the
    engine's work does, the share is 1.

    Args:
        plan: simulated as it stands.
        profile: of the machine.
        step_s: of the plan there.
    """
    engines: tuple[Engine, ...] = ("compute", "cpu", *LINKS)
    shares: dict[Engine, float] = {}
    for engine in engines:
        quick_s = simulate_plan(plan, faster(profile, engine, FASTER), steps=SIMULATED_STEPS).step_s
        shares[engine] = max(0.0, (step_s - quick_s) / (step_s * (1 - 1 / FASTER))) if step_s > 0 else 0.0
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Known:
    """Plans that may be run on a machine: the one in question and all that were found while looking for gains.

    Each is tried on each machine, so that what one solve happened to find does not pass for the gain of its change.
    """

    plans: list[Plan]

    def best_s(self, profile: Profile, budget_bytes: dict[Tier, int]) -> float:
        """Step of the fastest plan that keeps the budgets on the machine of ``profile``; infinite if none does."""
        timelines = [simulate_plan(plan, profile, steps=SIMULATED_STEPS) for plan in self.plans]
        fitting = (t.step_s for t in timelines if not over_budget(t, budget_bytes, profile))
        return min(fitting, default=math.inf)


def over_budget(timeline: Timeline, budget_bytes: Mapping[Tier, int], profile: Profile) -> dict[str, int]:
    """Tier, or ``page-locked`` -> bytes by which a simulated plan exceeds what there is; what it keeps is absent."""
    over: dict[str, int] = {tier: size - budget_bytes.get(tier, 0) for tier, size in timeline.peak_bytes.items()}
    if profile.pin_limit_bytes is not None:
        over["page-locked"] = timeline.pinned_bytes - profile.pin_limit_bytes
    return {name: size for name, size in over.items() if size > 0}


def gains(plan: Plan, known: Known, asked: Sequence[Change], reference_s: float, bound_s: float | None) -> list[Gain]:
    """What each change buys, largest gain first.

    Args:
        plan: the plan in question.
        known: it and others.
        asked: the changes.
        reference_s: step of the fastest plan known without any change.
        bound_s: of all plans without any change; None where nothing was solved, which leaves out growing budgets.
    """
    result = []
    for change in asked:
        if bound_s is None and change.tier is not None:
            continue
        same_s = None
        if change.tier is None:
            same_s = simulate_plan(plan, change.profile, steps=SIMULATED_STEPS).step_s
        best_s = min(known.best_s(change.profile, change.budget_bytes), same_s or math.inf, reference_s)
        within_gap = None if bound_s is None else best_s >= bound_s * (1 - 1e-9)
        result.append(
            Gain(
                resource=change.resource, words=change.words, same_plan_s=same_s, best_s=best_s,
                gain_s=reference_s - best_s, within_gap=within_gap, tier=change.tier,
            )
        )  # fmt: skip
    return sorted(result, key=lambda gain: -gain.gain_s)


def solve_changes(plan: Plan, profile: Profile, asked: Sequence[Change], time_limit_s: float) -> list[Answer]:
    """Solve for the plan's own machine and budgets, then for each change; answers in that order."""
    own = Change("", "", profile, plan.budget_bytes)
    return answer_all([_request(plan, change, time_limit_s) for change in (own, *asked)])


def _request(plan: Plan, change: Change, time_limit_s: float) -> Request:
    """What was asked of the solver when ``plan`` was made, with the change."""
    settings: dict[str, Any] = {
        "batch_size": plan.batch_size,
        "pins": [pin.text for pin in kept_pins(plan, change.profile.stages)],
        "max_grad_norm": plan.update.clip_norm,
        "check_finite": plan.update.check_finite,
        "optimizer_state": next(iter(plan.stages.values())).state_format,
        "executable_only": _only_executable(plan),
        "time_limit_s": time_limit_s,
        "seed": plan.solver.seed if plan.solver else 0,
    }
    settings |= {f"{tier}_memory_bytes": change.budget_bytes.get(tier) for tier in ("gpu", "host")}
    settings["nvme_bytes"] = change.budget_bytes.get("nvme", 0)
    return Request(change.profile, settings)


def _only_executable(plan: Plan) -> bool:
    """Whether ``plan`` is to be compared with plans that the runtime executes: it is one, and no budget is in vain."""
    try:
        check_executable(plan)
    except UsageError:
        return False
    return executes_files() or not plan.budget_bytes.get("nvme")


def faster(profile: Profile, engine: Engine, factor: float) -> Profile:
    """``profile`` of a machine whose ``engine`` does ``factor`` times as much a second."""
    if engine == "cpu":
        return _with_updates(profile, "cpu", factor)
    if engine != "compute":
        return _with_links(profile, engine, factor, 0.0)
    quick = {
        structure: {size: [_quicker(variant, factor) for variant in listed] for size, listed in by_size.items()}
        for structure, by_size in profile.variants.items()
    }
    return _with_links(_with_updates(profile.model_copy(update={"variants": quick}), "gpu", factor), "gpu", factor, 0.0)


def wider(profile: Profile, link: Engine, more_bytes_per_s: float) -> Profile:
    """``profile`` of a machine whose ``link`` moves so much more a second at every size of request."""
    return _with_links(profile, link, 1.0, more_bytes_per_s)


def _with_links(profile: Profile, link: str, factor: float, more_bytes_per_s: float) -> Profile:
    """All curves of ``link``: with both directions busy, and to and from ordinary memory too."""
    links = {
        name: Curve(points=[(size, rate * factor + more_bytes_per_s) for size, rate in curve.points],
                    reason=curve.reason)
        if name == link or name.startswith(f"{link}_")
        else curve
        for name, curve in profile.links.items()
    }  # fmt: skip
    return profile.model_copy(update={"links": links})


def _with_updates(profile: Profile, processor: str, factor: float) -> Profile:
    update = {
        name: {state: _rate(rate, factor) for state, rate in rates.items()} if name == processor else rates
        for name, rates in profile.update.items()
    }
    beside = profile.update_beside_copies
    if processor == "cpu":
        beside = {state: _rate(rate, factor) for state, rate in beside.items()}
    return profile.model_copy(update={"update": update, "update_beside_copies": beside})


def _rate(rate: Rate, factor: float) -> Rate:
    return rate if rate.per_s is None else rate.model_copy(update={"per_s": rate.per_s * factor})


def _quicker(variant: SaveVariant, factor: float) -> SaveVariant:
    return variant.model_copy(
        update={"forward": _shorter(variant.forward, factor), "backward": _shorter(variant.backward, factor)}
    )


def _shorter(timing: Timing, factor: float) -> Timing:
    return timing if timing.median_s is None else timing.model_copy(update={"median_s": timing.median_s / factor})
