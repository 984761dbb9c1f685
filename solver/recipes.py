"""Fixed recipes to compare a solved plan with: what other systems do for every block alike, at its best.

Each recipe may choose micro-batch, prefetch depth, placement of the vocabulary and, where it streams weights, how many
blocks stay on the GPU (with or without their optimizer state): the fastest combination that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lazysched.schemas import Plan, Tier
from lazysched.solver.instance import Candidate, Instance, SaveOption
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.plans import Choices
from lazysched.solver.search import allowed_states, rank_s
from lazysched.solver.simulate import Timeline
from lazysched.solver.window_replay import GPU, RESIDENT, STREAMED, ChoiceBatch, Ints, WindowReplay


@dataclass(frozen=True)
class Rule:
    """What a recipe prescribes.

    Attributes:
        name: shown to the user.
        saves_most: every block saves as much as a variant can, else as little.
        tier: where that goes.
        states: (state of the first n blocks, state of the rest); None for n means any.
        free_save: whether any one save variant may be taken for all blocks.
    """

    name: str
    saves_most: bool
    tier: Tier
    states: tuple[tuple[int, int], ...]
    free_save: bool = False


GREEDY_RESIDENCY = ((GPU, STREAMED), (RESIDENT, STREAMED))
RULES = (
    Rule("keep all activations", True, "gpu", GREEDY_RESIDENCY),
    Rule("checkpoint every block", False, "gpu", GREEDY_RESIDENCY),
    Rule("checkpoint every block, inputs on host", False, "host", GREEDY_RESIDENCY),
    Rule("weights on gpu, states on host", False, "gpu", ((RESIDENT, RESIDENT),)),
    Rule("all blocks on gpu", True, "gpu", ((GPU, GPU),), free_save=True),
)


@dataclass(frozen=True)
class Found:
    """Choices for a candidate and what the window replay expects of them."""

    candidate: Candidate
    choices: Choices
    step_s: float


@dataclass(frozen=True)
class Recipe:
    """A recipe's best plan, or None when it does not fit the budgets."""

    name: str
    plan: Plan | None
    timeline: Timeline | None


def best_of_rule(rule: Rule, instances: Iterable[Instance], budgets: Callable[[Instance], Budgets]) -> Found | None:
    """The fastest choices that follow ``rule`` and fit, over all ``instances``."""
    best: Found | None = None
    for instance in instances:
        if best is not None and instance.compute_bound_s >= best.step_s:
            continue
        batch = _combinations(rule, instance)
        if batch is None:
            continue
        replay = WindowReplay(instance)
        limits = budgets(instance)
        batch = batch.rows(replay.fits(batch, limits))
        if not len(batch.vocabulary):
            continue
        evaluation = replay.evaluate(batch)
        winner = int(np.argmin(rank_s(evaluation, limits)))
        step_s = float(evaluation.step_s[winner])
        if best is None or step_s < best.step_s:
            best = Found(instance.candidate, batch.choices(winner), step_s)
    return best


def offload_limit(rule: Rule, limits: Sequence[int]) -> int:
    """What a block may send to the host under ``rule``: nothing, or the smallest size that there is."""
    return limits[1] if rule.tier == "host" else 0


def _combinations(rule: Rule, instance: Instance) -> ChoiceBatch | None:
    """Every combination that the rule leaves open."""
    saves = _saves(rule, instance)
    if not saves:
        return None
    length, rows = instance.num_blocks, []
    for first, rest in rule.states:
        lengths = range(length + 1) if first != rest else (length,)
        rows += [[first] * n + [rest] * (length - n) for n in lengths]
    allowed = allowed_states(instance)
    rows = [row for row in rows if all(state in own for state, own in zip(row, allowed, strict=True))]
    if not rows:
        return None
    states: Ints = np.array(rows, dtype=np.int64)
    kinds = np.arange(len(instance.vocabulary_options))
    grid = np.indices((len(saves), len(states), len(kinds))).reshape(3, -1)
    return ChoiceBatch(np.array(saves, dtype=np.int64)[grid[0]], states[grid[1]], kinds[grid[2]])


def _saves(rule: Rule, instance: Instance) -> list[list[int]]:
    """Save options of all blocks, one list per possibility."""

    def size(option: SaveOption) -> float:
        return option.kept_gb + option.offloaded_gb

    rows: list[list[int]] = []
    indices = [[k for k, o in enumerate(options) if o.tier == rule.tier] for options in instance.saves]
    if not all(indices):
        return []
    pick = max if rule.saves_most else min
    chosen = [
        pick(available, key=lambda k, options=options: size(options[k]))  # type: ignore[misc]
        for available, options in zip(indices, instance.saves, strict=True)
    ]
    rows.append(chosen)
    if rule.free_save:
        shared = min(len(available) for available in indices)
        rows += [[available[k] for available in indices] for k in range(shared)]
    return rows
