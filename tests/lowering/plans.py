"""Random valid plans for any stages, for property tests."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from lazysched.schemas import Plan, SaveVariant, Stage, StagePlan, StateFormat, Tier, Timing, Update, variant_key
from lazysched.trainable import first_trained

NOT_TIMED = Timing(median_s=None, reason="synthetic")


def variants_for(structure: str, input_bytes: int, saved_bytes: int) -> dict[str, SaveVariant]:
    """The variants ``all`` and ``input`` of a block structure, without times."""
    shared = {"forward": NOT_TIMED, "backward": NOT_TIMED, "working_forward_bytes": 10, "working_backward_bytes": 20}
    full = {"input": input_bytes, "intermediates": saved_bytes}
    variants = [
        SaveVariant(name="all", saved=full, **shared),
        SaveVariant(name="input", saved={"input": input_bytes}, **shared),
    ]
    return {variant_key(structure, variant.name): variant for variant in variants}


def end_variants(structure: str) -> dict[str, SaveVariant]:
    """The one variant of the embedding or the head."""
    variant = SaveVariant(
        name="all", saved={}, forward=NOT_TIMED, backward=NOT_TIMED, working_forward_bytes=5, working_backward_bytes=7
    )
    return {variant_key(structure, "all"): variant}


@st.composite
def stage_choices(
    draw: st.DrawFn,
    stage: Stage,
    variants: Sequence[SaveVariant],
    formats: Sequence[StateFormat],
    tiers: Sequence[Tier],
) -> StagePlan:
    state = draw(st.sampled_from(tiers[::-1]))
    behind = ("gpu", "host") if state == "host" else ("gpu", "host", "nvme")
    weights = "gpu" if state == "gpu" else draw(st.sampled_from(behind[::-1]))
    state_format = draw(st.sampled_from(formats))
    if not stage.is_block:
        return StagePlan(weights=weights, state=state, state_format=state_format)
    variant = draw(st.sampled_from(variants))
    away = [tier for tier in tiers if tier != "gpu"]
    tier = st.sampled_from([draw(st.sampled_from(away)) if len(away) > 1 else away[0], "gpu"])
    saved_tiers = {group: draw(tier) for group in variant.saved if group != "input"}
    return StagePlan(
        weights=weights, state=state, state_format=state_format, save=variant.name, saved_tiers=saved_tiers,
        input_tier=draw(tier),
    )  # fmt: skip


@st.composite
def segmented(draw: st.DrawFn, choices: dict[str, StagePlan], blocks: Sequence[Stage]) -> dict[str, StagePlan]:
    """The same choices with some runs of alike blocks made segments."""
    choices, start = dict(choices), 0
    while start < len(blocks):
        structures = [stage.structure for stage in blocks[start : start + 4]]
        alike = next((n for n, structure in enumerate(structures) if structure != structures[0]), len(structures))
        length = draw(st.integers(1, alike))
        first = choices[blocks[start].id]
        for stage in blocks[start : start + length] if length > 1 else ():
            kept = {"save": first.save, "saved_tiers": dict.fromkeys(first.saved_tiers, "gpu"), "segment": length}
            input_tier = first.input_tier if stage is blocks[start] else "gpu"
            choices[stage.id] = choices[stage.id].model_copy(update={**kept, "input_tier": input_tier})
        start += length
    return choices


@st.composite
def plans(
    draw: st.DrawFn,
    stages: Sequence[Stage],
    variants: dict[str, SaveVariant],
    *,
    micro_batch: int,
    accumulation: int,
    seq_len: int,
    compute_dtype: str = "float32",
    clip_norm: float | None = 1.0,
    loss_chunk_tokens: int = 16,
    formats: Sequence[StateFormat] = ("fp32", "hybrid8"),
    fp32_state_elements: int = 1000,
    executable: bool = True,
) -> Plan:
    """A valid plan whose placement decisions are random, as is the check for finite gradients where nothing clips.

    Where it need not be executable, files and segments are among the decisions.
    """
    of = {
        stage.structure: [v for key, v in variants.items() if key == variant_key(stage.structure, v.name)]
        for stage in stages
    }
    tiers: Sequence[Tier] = ("gpu", "host") if executable else ("gpu", "host", "nvme")
    choices = {stage.id: draw(stage_choices(stage, of[stage.structure], formats, tiers)) for stage in stages}
    first = first_trained(stages)
    for stage in stages[1:-1][: max(0, first - 1)]:  # no backward, so that nothing is kept for one
        kept = {"save": "input", "saved_tiers": {}, "input_tier": "gpu"}
        choices[stage.id] = choices[stage.id].model_copy(update=kept)
    if not executable:
        choices = draw(segmented(choices, stages[max(1, first) : -1]))
    check_finite = True if clip_norm is not None else draw(st.booleans())
    return Plan.model_validate(
        {
            "model_id": "tiny", "hardware_id": "any", "compute_dtype": compute_dtype,
            "batch_size": micro_batch * accumulation, "seq_len": seq_len, "micro_batch": micro_batch,
            "accumulation": accumulation, "loss_chunk_tokens": loss_chunk_tokens,
            "prefetch_depth": draw(st.integers(1, 3)), "d2h_lag": draw(st.integers(0, 2)),
            "update": Update(clip_norm=clip_norm, check_finite=check_finite), "variants": variants, "budget_bytes": {},
            "stages": choices, "fp32_state_elements": fp32_state_elements,
            "host_memory": draw(st.sampled_from(["pinned", "pageable"])),
        }
    )  # fmt: skip
