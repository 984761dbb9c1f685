"""What each decision of a plan costs, and what another in its place would cost: the changed plan is simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import Field

from lazysched.errors import UsageError
from lazysched.lower import lower
from lazysched.schemas import (
    Engine,
    Plan,
    Profile,
    Program,
    SaveVariant,
    Schema,
    Stage,
    StagePlan,
    Tier,
    Update,
    variant_key,
)
from lazysched.segments import segments_of
from lazysched.solver.pins import Pin, kept_pins, of_stage
from lazysched.solver.simulate import SIMULATED_STEPS, Timeline, simulate_plan
from lazysched.solver.what_if import over_budget
from lazysched.trainable import Training, first_trained, training_of

ROUNDING = 1e-9
"""Share of a step below which two simulated steps are equal."""
TIERS: tuple[Tier, ...] = ("gpu", "host", "nvme")


class Alternative(Schema):
    """The plan with one decision changed, all others kept."""

    where: str
    """Stage that is changed, or ``step``."""
    words: str
    """What is done instead."""
    step_s: float
    """Change of the step time; negative is faster."""
    peak_bytes: dict[Tier, int]
    """Change of each tier's peak."""
    over_bytes: dict[str, int]
    """Tier, or ``page-locked`` -> bytes by which the changed plan exceeds what there is; empty where it fits."""
    same_result: bool = True
    """Whether training computes the same."""
    against_pins: list[str] = Field(default_factory=list)
    """What was fixed by hand and would have to be given up."""


class StageCosts(Schema):
    """Stages that are decided alike, and what that costs all of them together in a step."""

    stages: list[str]
    """In forward order."""
    choice: StagePlan
    training: Training = "trained"
    """What is frozen has no optimizer state, wherever ``choice`` has it, and without a backward it saves nothing."""
    recompute_s: float
    """Time in forward and backward beyond that of the fastest variants at this micro-batch."""
    moved_bytes: dict[Engine, int]
    """Engine -> bytes moved for them."""
    kept_bytes: dict[Tier, int]
    """Tier -> bytes held for them: weights, gradients, optimizer state, and what they save for their backward."""
    alternatives: list[Alternative]
    """For the first of the stages."""


@dataclass(frozen=True)
class Base:
    """The plan whose decisions are looked at, on a machine."""

    plan: Plan
    profile: Profile
    program: Program
    timeline: Timeline

    @cached_property
    def pins(self) -> tuple[Pin, ...]:
        """What the plan keeps to because it was fixed by hand."""
        return kept_pins(self.plan, self.profile.stages)


def base_of(plan: Plan, profile: Profile) -> Base:
    """Lower and simulate ``plan``."""
    timeline = simulate_plan(plan, profile, steps=SIMULATED_STEPS)
    return Base(plan, profile, lower(plan, profile.stages), timeline)


def stage_costs(base: Base) -> list[StageCosts]:
    """One entry for each distinct decision about stages of equal structure, in order of first appearance."""
    groups: dict[str, list[Stage]] = defaultdict(list)
    training = training_of(base.profile.stages)
    for stage in base.profile.stages:
        groups[f"{stage.structure} {base.plan.stages[stage.id].model_dump_json()}"].append(stage)
    durations = _Durations(base)
    return [
        StageCosts(
            stages=[stage.id for stage in stages],
            choice=base.plan.stages[stages[0].id],
            training=training[stages[0].id],
            recompute_s=sum(map(durations.recompute_s, stages)),
            moved_bytes=_moved_bytes(base.program, {stage.id for stage in stages}),
            kept_bytes=_kept_bytes(base, stages),
            alternatives=_alternatives(base, stages[0]),
        )
        for stages in groups.values()
    ]


def step_alternatives(base: Base) -> list[Alternative]:
    """Other prefetch depths and D2H lags, and updates that do not wait for the gradient norm."""
    plan = base.plan
    changed: list[tuple[str, dict[str, Any]]] = [
        (f"prefetch depth {plan.prefetch_depth + 1}", {"prefetch_depth": plan.prefetch_depth + 1}),
        (f"D2H lag {plan.d2h_lag + 1}", {"d2h_lag": plan.d2h_lag + 1}),
    ]
    if plan.prefetch_depth > 1:
        changed.append((f"prefetch depth {plan.prefetch_depth - 1}", {"prefetch_depth": plan.prefetch_depth - 1}))
    if plan.d2h_lag > 0:
        changed.append((f"D2H lag {plan.d2h_lag - 1}", {"d2h_lag": plan.d2h_lag - 1}))
    if plan.update.waits_for_norm:
        early = Update(clip_norm=None, check_finite=False)
        changed.append(("no clipping and no check for gradients that are not finite", {"update": early}))
    found = (_alternative(base, "step", words, plan.model_copy(update=update)) for words, update in changed)
    return [alternative for alternative in found if alternative is not None]


def recompute_s(base: Base) -> float:
    """Of a step, time in forward and backward beyond that of the fastest variants."""
    durations = _Durations(base)
    return sum(durations.recompute_s(stage) for stage in base.profile.stages)


class _Durations:
    """What the passes of a stage take in the last simulated step."""

    def __init__(self, base: Base) -> None:
        self.base = base
        last = max(interval.step for interval in base.timeline.intervals)
        self.seconds: dict[str, float] = defaultdict(float)
        for interval in base.timeline.intervals:
            op = base.program.ops[interval.op]
            if interval.step == last and op.stage is not None and op.engine == "compute" and op.kind == "recompute":
                self.seconds[op.stage] += interval.duration_s

    def recompute_s(self, stage: Stage) -> float:
        """Time beyond that of the fastest variant, and operations that only recompute."""
        plan, measured = self.base.plan, _measured(self.base, stage)
        chosen = next(variant for variant in measured if variant.name == plan.stages[stage.id].save)
        beyond_s = _pass_s(chosen) - min(map(_pass_s, measured))
        return plan.accumulation * (beyond_s if stage.is_block else 0.0) + self.seconds[stage.id]


def _measured(base: Base, stage: Stage) -> list[SaveVariant]:
    listed = base.profile.variants[stage.structure][base.plan.micro_batch]
    return [v for v in listed if v.forward.median_s is not None and v.backward.median_s is not None]


def _pass_s(variant: SaveVariant) -> float:
    return variant.forward.seconds + variant.backward.seconds


def _moved_bytes(program: Program, stage_ids: set[str]) -> dict[Engine, int]:
    moved: dict[Engine, int] = defaultdict(int)
    for op in program.ops.values():
        if op.stage in stage_ids and op.engine != "compute" and op.num_bytes:
            moved[op.engine] += op.num_bytes
    return dict(moved)


def _kept_bytes(base: Base, stages: Sequence[Stage]) -> dict[Tier, int]:
    """Buffers of the stages' own, and inputs that wait on the GPU, in slots that have no stage's name."""
    kept: dict[Tier, int] = defaultdict(int)
    ids = {stage.id for stage in stages}
    for buffer in base.program.buffers.values():
        if ids & set(buffer.id.split("/")[2:]):
            kept[buffer.tier] += buffer.num_bytes
    with_backward = base.profile.stages[first_trained(base.profile.stages) :]
    for stage in stages:
        choice = base.plan.stages[stage.id]
        if stage.is_block and choice.input_tier == "gpu" and stage in with_backward:
            chosen = base.plan.variants[variant_key(stage.structure, choice.save)]
            kept["gpu"] += base.plan.accumulation * chosen.saved["input"] // choice.segment
    return dict(kept)


# ---- one decision changed


def _alternatives(base: Base, stage: Stage) -> list[Alternative]:
    found = []
    for words, choice, variant in _changed_choices(base, stage):
        variants = dict(base.plan.variants)
        variants[variant_key(stage.structure, variant.name)] = variant
        stages = {**base.plan.stages, stage.id: choice}
        changed = base.plan.model_copy(update={"stages": stages, "variants": variants})
        alternative = _alternative(base, stage.id, words, changed)
        if alternative is not None:
            against = [pin.text for pin in of_stage(base.pins, stage) if not pin.allows(choice)]
            found.append(alternative.model_copy(update={"against_pins": against}))
    dissolved = _dissolved(base, stage)
    return found if dissolved is None else [*found, dissolved]


def _dissolved(base: Base, stage: Stage) -> Alternative | None:
    """Every block of the stage's segment keeps its own input, where the first one's is; None where it is in none."""
    blocks = [other for other in base.profile.stages if other.is_block]
    own = next((segment for segment in segments_of(base.plan, blocks) if stage in segment), [])
    if len(own) < 2:
        return None
    tier = base.plan.stages[own[0].id].input_tier
    alone = {
        block.id: base.plan.stages[block.id].model_copy(update={"segment": 1, "input_tier": tier}) for block in own
    }
    against = [pin.text for block in own for pin in of_stage(base.pins, block) if not pin.allows(alone[block.id])]
    changed = base.plan.model_copy(update={"stages": {**base.plan.stages, **alone}})
    words = f"keeping the input of each of {own[0].id}..{own[-1].id.removeprefix('block.')}"
    alternative = _alternative(base, stage.id, words, changed)
    return alternative and alternative.model_copy(update={"against_pins": list(dict.fromkeys(against))})


def _alternative(base: Base, where: str, words: str, changed: Plan) -> Alternative | None:
    """The simulated difference; None where the changed plan is none that could run."""
    try:
        timeline = simulate_plan(changed, base.profile, steps=SIMULATED_STEPS)
    except UsageError:
        return None
    before = base.timeline
    return Alternative(
        where=where, words=words, step_s=_difference_s(timeline.step_s, before.step_s),
        peak_bytes={tier: size - before.peak_bytes.get(tier, 0) for tier, size in timeline.peak_bytes.items()},
        over_bytes=over_budget(timeline, base.plan.budget_bytes, base.profile),
        same_result=changed.update == base.plan.update,
    )  # fmt: skip


def _difference_s(changed_s: float, before_s: float) -> float:
    """The difference, or 0 where it is one of rounding."""
    difference_s = changed_s - before_s
    return difference_s if abs(difference_s) > ROUNDING * before_s else 0.0


_Changed = tuple[str, StagePlan, SaveVariant]


def _changed_choices(base: Base, stage: Stage) -> Iterator[_Changed]:
    """(in words, the other choice, its variant) for every decision about ``stage`` moved to a neighbour."""
    choice = base.plan.stages[stage.id]
    own = base.plan.variants[variant_key(stage.structure, choice.save)]
    if stage.is_block:
        yield from _other_saves(base, stage, choice, own)
        yield from _other_save_tiers(base, choice, own)
    for weights, state in _other_places(choice, _tiers_in_use(base)):
        update = {"weights": weights, "state": state}
        if stage.is_trained:
            yield _place_words(choice, weights, state), choice.model_copy(update=update), own
        elif weights == state:  # no state: its tier only says where weights come from
            words = "keeping its weights on gpu" if weights == "gpu" else f"streaming its weights from {weights}"
            yield words, choice.model_copy(update=update), own


def _other_places(choice: StagePlan, tiers: Sequence[Tier]) -> Iterator[tuple[Tier, Tier]]:
    """(tier of the weights, tier of the state): one of them moved, or both to one tier."""
    places: dict[tuple[Tier, Tier], None] = {}
    for tier in tiers:
        places |= dict.fromkeys([(tier, choice.state), (choice.weights, tier), (tier, tier)])
    for weights, state in places:
        # A stage that the GPU updates has its weights there; weights in files are updated with state from files.
        possible = (state != "gpu" or weights == "gpu") and (weights != "nvme" or state == "nvme")
        if possible and (weights, state) != (choice.weights, choice.state):
            yield weights, state


def _other_saves(base: Base, stage: Stage, choice: StagePlan, own: SaveVariant) -> Iterator[_Changed]:
    """The variants that save next more and next less, in the tier that the present one saves to."""
    tier = next(iter(choice.saved_tiers.values()), choice.input_tier)
    measured = sorted(_measured(base, stage), key=lambda variant: variant.saved_bytes)
    place = next(index for index, variant in enumerate(measured) if variant.name == own.name)
    for index in (place - 1, place + 1):
        if 0 <= index < len(measured):
            other = measured[index]
            tiers = {group: tier for group in other.saved if group != "input"}
            update = {"save": other.name, "saved_tiers": tiers, "segment": 1}
            yield f"saving {other.name} instead of {own.name}", choice.model_copy(update=update), other


def _other_save_tiers(base: Base, choice: StagePlan, own: SaveVariant) -> Iterator[_Changed]:
    """All that the block saves, in another tier."""
    now = {choice.input_tier, *choice.saved_tiers.values()}
    for tier in _tiers_in_use(base):
        if now != {tier}:
            update = {"saved_tiers": dict.fromkeys(choice.saved_tiers, tier), "input_tier": tier}
            rest = set(choice.saved_tiers.values()) - {tier}
            what = "its input" if not rest else "what it saves"
            what += " beside its input" if rest and choice.input_tier == tier else ""
            yield f"keeping on {tier} {what}", choice.model_copy(update=update), own


def _place_words(choice: StagePlan, weights: Tier, state: Tier) -> str:
    parts = []
    if weights != choice.weights:
        parts.append("keeping its weights on gpu" if weights == "gpu" else f"streaming its weights from {weights}")
    if state != choice.state:
        parts.append(f"keeping its optimizer state on {state}")
    return " and ".join(parts)


def _tiers_in_use(base: Base) -> list[Tier]:
    return [tier for tier in TIERS if base.plan.budget_bytes.get(tier)]
