"""From choices to a plan document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lazysched.schemas import Plan, SaveVariant, Tier, variant_key
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.options import StateChoice, block_plan, stage_plan


@dataclass(frozen=True)
class Choices:
    """Decisions for every stage of one candidate."""

    states: tuple[StateChoice, ...]
    """Per block."""
    saves: tuple[int, ...]
    """Per block, an index into ``Instance.saves``."""
    vocabulary: int
    """Index into ``Instance.vocabulary_options``."""


@dataclass(frozen=True)
class Found:
    """Choices for a candidate and what the window replay expects of them."""

    candidate: Candidate
    choices: Choices
    step_s: float


def transferred(choices: Choices, theirs: Instance, ours: Instance) -> Choices | None:
    """What ``choices`` among the options of one instance are among those of another; None where it has others."""
    chosen = [options[place] for options, place in zip(theirs.saves, choices.saves, strict=True)]
    ends = theirs.vocabulary_options[choices.vocabulary]
    known = all(option in options for option, options in zip(chosen, ours.saves, strict=True))
    if not known or ends not in ours.vocabulary_options:
        return None
    saves = tuple(options.index(option) for option, options in zip(chosen, ours.saves, strict=True))
    return replace(choices, saves=saves, vocabulary=ours.vocabulary_options.index(ends))


def make_plan(instance: Instance, choices: Choices, *, budget_bytes: Mapping[Tier, int]) -> Plan:
    """The plan that ``choices`` describe, without a prediction."""
    profile, candidate = instance.profile, instance.candidate
    vocabulary = instance.vocabulary_options[choices.vocabulary]
    stages = {"embed": stage_plan(vocabulary.embed, instance.embed_variant.name)}
    variants: dict[str, SaveVariant] = {
        variant_key(instance.embed_stage.structure, instance.embed_variant.name): instance.embed_variant,
        variant_key(instance.head_stage.structure, instance.head_variant.name): instance.head_variant,
    }
    for stage, state, options, index in zip(
        instance.block_stages, choices.states, instance.saves, choices.saves, strict=True
    ):
        option = options[index]
        stages[stage.id] = block_plan(state, option)
        variants[variant_key(stage.structure, option.variant.name)] = option.variant
    stages["head"] = stage_plan(vocabulary.head, instance.head_variant.name)
    return Plan(
        model_id=profile.model_id,
        hardware_id=profile.hardware_id,
        compute_dtype=profile.compute_dtype,
        attention=profile.attention,
        full_determinism=profile.full_determinism,
        packing=profile.packing,
        trainable=profile.trainable,
        argument_bytes=profile.argument_bytes.get(candidate.micro_batch, 0),
        context_bytes=profile.context_bytes,
        workspace_bytes=profile.workspace_bytes,
        batch_size=candidate.micro_batch * candidate.accumulation,
        seq_len=profile.seq_len,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        loss_chunk_tokens=profile.loss_chunk_tokens,
        prefetch_depth=candidate.prefetch_depth,
        d2h_lag=candidate.d2h_lag,
        host_memory=candidate.host_memory,
        update=instance.update,
        stages={
            stage_id: choice.model_copy(update={"state_format": instance.state_format})
            for stage_id, choice in stages.items()
        },
        variants=variants,
        pins=[pin.text for pin in instance.pins],
        budget_bytes=dict(budget_bytes),
    )
