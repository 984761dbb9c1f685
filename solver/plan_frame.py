"""A plan as a table: what was decided for each stage, and what that takes and costs in one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lazysched.lower import lower
from lazysched.optimizer_state import state_bytes
from lazysched.schemas import BYTES_PER_ELEMENT, Plan, Profile, Stage, Tier, variant_key
from lazysched.solver.simulate import simulate_plan
from lazysched.timeline import LINK_ENGINES, intervals_by_step
from lazysched.trainable import FROZEN, first_trained, training_of

if TYPE_CHECKING:
    import pandas as pd

TIERS: tuple[Tier, ...] = ("gpu", "host", "nvme")


def plan_frame(plan: Plan, profile: Profile | None = None) -> pd.DataFrame:
    """One row per stage, in forward order; bytes and seconds are those of one step, all micro-batches together.

    Args:
        plan: the decisions.
        profile: of the machine to be; None: the one in the plan. Without any, only the decisions are there.

    Returns:
        Index ``stage``, and the columns

        - ``weights state state_format save segment input_tier`` as in the plan, but empty where the profile says that
          nothing is trained (state) or no backward runs (what a block saves, and where); ``saved_tiers``: where lies
          what is saved beside the input, several tiers joined by ``+``, empty where nothing is;
        - ``num_params weight_bytes state_bytes``: own parameters, weights, optimizer state;
        - ``saved_bytes``: what a block keeps for its backward, its input included; of it ``saved_gpu_bytes`` and so on;
        - ``compute_s``: time on ``compute``; ``recompute_s``: what of it is there because not all was kept: recompute
          operations, and the backward beyond the fastest one in the profile;
        - ``h2d_bytes d2h_bytes`` and so on for every link that the program uses: bytes moved for the stage.

    Raises:
        UsageError: the profile is of another model or lacks a figure, or the plan cannot be lowered.
    """
    import pandas as pd  # takes longer than a small plan to solve, which needs none of it

    decisions = pd.DataFrame.from_dict(
        {
            stage_id: {
                "weights": choice.weights, "state": choice.state, "state_format": choice.state_format,
                "save": choice.save, "saved_tiers": "+".join(t for t in TIERS if t in choice.saved_tiers.values()),
                "segment": choice.segment, "input_tier": choice.input_tier,
            }
            for stage_id, choice in plan.stages.items()
        },
        orient="index",
    )  # fmt: skip
    measured = profile or plan.profile
    if measured is not None:
        for stage_id, training in training_of(measured.stages).items():
            if training in FROZEN:
                decisions.loc[stage_id, ["state", "state_format"]] = ""
            if training == "no backward" and stage_id.startswith("block."):
                decisions.loc[stage_id, ["save", "input_tier"]] = ""
        costs = _costs(plan, measured)
        figures = {
            stage.id: _sizes(plan, stage) | _saved(plan, stage, keeps_input) | costs[stage.id]
            for stage, keeps_input in _with_inputs(plan, measured)
        }
        decisions = pd.DataFrame.from_dict(figures, orient="index").join(decisions)[
            [*decisions.columns, *next(iter(figures.values()))]
        ]
    decisions.index.name = "stage"
    return decisions


def equal_runs(decisions: pd.DataFrame) -> pd.DataFrame:
    """One row for each run of neighbours with equal rows; the column ``stages`` names the first and the last."""
    runs = (decisions != decisions.shift()).any(axis=1).cumsum()
    groups = decisions.groupby(runs)
    names = [str(g.index[0]) if len(g) == 1 else f"{g.index[0]} … {g.index[-1]}" for _, g in groups]
    summary = groups.first().reset_index(drop=True)
    summary.insert(0, "stages", names)
    return summary


def _with_inputs(plan: Plan, profile: Profile) -> Iterator[tuple[Stage, bool]]:
    """Stages in forward order, and whether each keeps its input: of a segment only the first block does.

    Blocks before anything is trained do not.
    """
    remaining, trained = 0, first_trained(profile.stages)
    for place, stage in enumerate(profile.stages):
        first = stage.is_block and remaining == 0
        remaining = (plan.stages[stage.id].segment if first else remaining) - stage.is_block
        yield stage, first and place >= trained


def _sizes(plan: Plan, stage: Stage) -> dict[str, int]:
    state_format, small = plan.stages[stage.id].state_format, plan.fp32_state_elements
    return {
        "num_params": stage.num_params, "weight_bytes": stage.weight_bytes,
        "state_bytes": state_bytes(stage, BYTES_PER_ELEMENT[plan.compute_dtype], state_format, small),
    }  # fmt: skip


def _saved(plan: Plan, stage: Stage, keeps_input: bool) -> dict[str, int]:
    """Bytes that the stage keeps from its forward to its backward, by tier."""
    choice = plan.stages[stage.id]
    tiers = dict(choice.saved_tiers)
    if keeps_input:
        tiers["input"] = choice.input_tier
    saved_bytes: dict[Tier, int] = dict.fromkeys(TIERS, 0)
    for group, num_bytes in plan.variants[variant_key(stage.structure, choice.save)].saved.items():
        if group in tiers:
            saved_bytes[tiers[group]] += num_bytes * plan.accumulation
    return {"saved_bytes": sum(saved_bytes.values())} | {f"saved_{t}_bytes": saved_bytes[t] for t in TIERS}


def _costs(plan: Plan, profile: Profile) -> dict[str, dict[str, float]]:
    """Stage id -> seconds on ``compute`` and bytes on each link, of the last simulated step."""
    program = lower(plan, profile.stages)
    last = max(intervals_by_step(simulate_plan(plan, profile).intervals).items())[1]
    links = [engine for engine in LINK_ENGINES if any(op.engine == engine for op in program.ops.values())]
    names = ["compute_s", "recompute_s", *(f"{engine}_bytes" for engine in links)]
    costs: dict[str, dict[str, float]] = defaultdict(lambda: {name: 0 for name in names})
    for op in program.ops.values():
        if op.stage is None:
            continue
        duration_s = last[op.id].duration_s
        if op.engine == "compute":
            costs[op.stage]["compute_s"] += duration_s
        if op.kind == "recompute":
            costs[op.stage]["recompute_s"] += duration_s
        if op.engine in links:
            costs[op.stage][f"{op.engine}_bytes"] += op.num_bytes
    for stage in profile.stages:
        costs[stage.id]["recompute_s"] += plan.accumulation * _longer_backward_s(plan, profile, stage)
    return costs


def _longer_backward_s(plan: Plan, profile: Profile, stage: Stage) -> float:
    """How much longer the stage's backward takes than that of the fastest variant."""
    backward_s = {
        variant.name: variant.backward.median_s
        for variant in profile.variants[stage.structure][plan.micro_batch]
        if variant.backward.median_s is not None
    }
    return backward_s[plan.stages[stage.id].save] - min(backward_s.values())
