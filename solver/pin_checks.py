"""What a profile and the tiers in use leave of decisions fixed by hand: pins that nothing can satisfy, and which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from lazysched.errors import UsageError
from lazysched.schemas import Plan, Profile, Stage, StagePlan, Tier
from lazysched.solver.options import PLACES, Scope, stage_plan
from lazysched.solver.pins import Pin, of_stage, parse_pins
from lazysched.solver.vocabulary import vocabulary_pairs

ONE_SLOT = "embedding and head stream together, through one slot, or not at all: alone each has its own buffer anyway"


def check_pins(pins: Sequence[Pin], profile: Profile, scope: Scope) -> None:
    """Refuse pins that leave a stage no choice, each alone, two of one stage, or those of embedding and head.

    Args:
        pins: on the stages of ``profile``.
        profile: whose variants there are.
        scope: where things may be.

    Raises:
        UsageError: names the pins, and what there is instead.
    """
    for stage in profile.stages if pins else ():
        own = of_stage(pins, stage)
        choices = list(_choices(profile, stage, scope)) if own else []
        for pin in own:
            # A block that saves its input alone would keep to any tier of what it saves.
            is_absent = pin.field == "saved_tiers" and pin.value not in scope.saved
            if is_absent or not any(map(pin.allows, choices)):
                raise UsageError(f"pin: {pin.text!r}: {_instead(pin, profile, stage, scope)}")
        for one, other in combinations(own, 2):
            if not any(one.allows(choice) and other.allows(choice) for choice in choices):
                raise UsageError(
                    f"pin: {one.text!r} and {other.text!r} contradict each other at {stage.id}; leave one out"
                )
    _check_ends(pins, profile, scope)


def remarks(plan: Plan, stages: Sequence[Stage]) -> Iterator[str]:
    """What pins brought about beside what they say."""
    for pin in parse_pins(plan.pins, stages):
        idle = [id for id in pin.stage_ids if not plan.stages[id].saved_tiers] if pin.field == "saved_tiers" else []
        if idle:
            yield f"{pin.text}: {len(idle)} of {len(pin.stage_ids)} blocks save nothing but their input, and keep to it"
    if stages[-1].shares is not None:
        return
    ends = ("embed", "head")
    streaming = [pin for pin in parse_pins(plan.pins, stages) if pin.field == "weights" and pin.value != "gpu"]
    pinned = {end: pin for pin in streaming for end in ends if end in pin.stage_ids}
    if len(pinned) == 1:
        ((end, pin),) = pinned.items()
        other = ends[1 - ends.index(end)]
        yield f"{pin.text}: {other} is streamed too, {ONE_SLOT}"


def _choices(profile: Profile, stage: Stage, scope: Scope) -> Iterator[StagePlan]:
    """Every choice for ``stage`` that differs in a field that can be fixed."""
    places: list[tuple[Tier, Tier]] = [(w, s) for w, s in PLACES.values() if w in scope.weights and s in scope.state]
    if not stage.is_block:
        yield from (StagePlan(weights=weights, state=state) for weights, state in places)
        return
    # What leaves a block goes to one tier: all of it, or its input alone.
    tiers: list[tuple[Tier, Tier]] = [
        (tier, saved) for tier in scope.saved for saved in scope.saved if saved in (tier, "gpu")
    ]
    variants = [variant for listed in profile.variants[stage.structure].values() for variant in listed]
    groups = {variant.name: set(variant.saved) - {"input"} for variant in variants}
    for (weights, state), (tier, saved), name in product(places, tiers, groups):
        kept: dict[str, Tier] = dict.fromkeys(groups[name], saved)
        yield StagePlan(weights=weights, state=state, save=name, saved_tiers=kept, input_tier=tier)


def _instead(pin: Pin, profile: Profile, stage: Stage, scope: Scope) -> str:
    """What may stand in the place of the value of ``pin``."""
    if pin.field == "save":
        by_size = profile.variants[stage.structure]
        names = dict.fromkeys(variant.name for variants in by_size.values() for variant in variants)
        return f"no variant is called {pin.value!r}; use {', '.join(names)}"
    tiers = {"weights": scope.weights, "state": scope.state}.get(pin.field, scope.saved)
    more = "; files need --nvme and --not-executable" if pin.value == "nvme" else ""
    return f"nothing may be on {pin.value} here; use {' or '.join(tiers)}{more}"


def _check_ends(pins: Sequence[Pin], profile: Profile, scope: Scope) -> None:
    embed, head = profile.stages[0], profile.stages[-1]
    tied = head.shares is not None
    own = {stage.id: of_stage(pins, stage) for stage in (embed, head)}
    if not any(own.values()):
        return

    def allowed(stage: Stage, choice: StagePlan) -> bool:
        places = choice.weights in scope.weights and choice.state in scope.state
        return places and all(pin.allows(choice) for pin in own[stage.id])

    pairs = [(stage_plan(e, "all"), stage_plan(h, "all")) for e, h in vocabulary_pairs(tied)]
    if any(allowed(embed, e) and allowed(head, h) for e, h in pairs):
        return
    listed = " and ".join(repr(pin.text) for pins_of in own.values() for pin in pins_of)
    if tied:
        reason = "the matrix that embedding and head share has a GPU buffer of its own, so that streaming saves nothing"
        raise UsageError(f"pin: {listed}: {reason} and is no option; fix the state alone, as embed.state=host")
    raise UsageError(f"pin: {listed}: {ONE_SLOT}, so that streaming saves nothing; fix both to host, or leave one out")
