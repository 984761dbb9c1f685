"""Fixed recipes to compare a solved plan with: what other systems do for every block alike, at its best.

Each recipe may choose micro-batch, prefetch depth, D2H lag, placement of the vocabulary and whatever its rule leaves
open: how many blocks keep their weights on the GPU, with or without their optimizer state, how many have it in files,
and how many send what they save to the host. The fastest combination that fits is the recipe's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lazysched.schemas import HostMemory, Plan
from lazysched.solver.choice_batch import ChoiceBatch, Ints
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.plans import Found
from lazysched.solver.recipe_choices import edge_splits, saves_of, saving_bound_s, splits_beside, state_rows
from lazysched.solver.recipe_rules import Rule
from lazysched.solver.search import TIE, rank_s
from lazysched.solver.simulate import Timeline
from lazysched.solver.window_replay import WindowReplay

MAX_REFINEMENTS = 4
"""How often the numbers of blocks in each state are improved, one against the other."""


@dataclass(frozen=True)
class Recipe:
    """A recipe's best plan, or None when it does not fit the budgets."""

    name: str
    plan: Plan | None
    timeline: Timeline | None


def candidates_of_rule(
    rule: Rule,
    accumulations: Mapping[int, int],
    limits: Mapping[int, Sequence[int]],
    host_memories: Sequence[HostMemory],
    prefetch_depths: Sequence[int],
    d2h_lags: Sequence[int],
    num_blocks: int,
) -> list[Candidate]:
    """The points of the outer search at which ``rule`` is tried.

    Args:
        rule: the recipe.
        accumulations: micro-batch -> accumulation.
        limits: micro-batch -> sizes in bytes that a block may send to the host, ascending, from 0 on.
        host_memories: kinds of host memory.
        prefetch_depths: how many stages ahead weights may be fetched.
        d2h_lags: by how many windows what leaves may lag behind.
        num_blocks: of the model.
    """
    segments = tuple(sorted({1, rule.length(num_blocks)}))
    return [
        Candidate(size, accumulation, depth, lag, limit, memory, segments)
        for lag in d2h_lags
        for memory in host_memories
        for size, accumulation in accumulations.items()
        for depth in prefetch_depths
        for limit in _offload_limits(rule, limits[size])
    ]


def _offload_limits(rule: Rule, limits: Sequence[int]) -> list[int]:
    """What a block may send away: nothing, or the smallest size that there is."""
    none = [0] if "gpu" in rule.tiers else []
    return none + ([limits[1]] if rule.tiers != ("gpu",) else [])


def best_of_rule(
    rule: Rule,
    instances: Iterable[Instance],
    budgets: Callable[[Instance], Budgets],
    goes_on: Callable[[Found | None], bool] = lambda _: True,
) -> Found | None:
    """The fastest choices that follow ``rule`` and fit, over all ``instances``.

    ``goes_on`` is asked before each of them, with the best choices so far.
    """
    best: Found | None = None
    for instance in sorted(instances, key=_in_turn):
        if not goes_on(best):
            break
        found = _best_of_instance(rule, instance, budgets(instance), best.step_s if best else np.inf)
        if found is not None:
            best = found
    return best


def _in_turn(instance: Instance) -> tuple[bool, int, float]:
    """The shortest lag with copies beside compute first, should time run out; then so that most need no look."""
    lag = instance.candidate.d2h_lag
    return lag == 0, lag, instance.compute_bound_s


def _best_of_instance(rule: Rule, instance: Instance, limits: Budgets, below_s: float) -> Found | None:
    """The fastest choices of one instance if they take less than ``below_s``."""
    saves = [row for row in saves_of(rule, instance) if saving_bound_s(instance, row) < below_s]
    if not saves:
        return None
    replay, best = WindowReplay(instance), None
    states = state_rows(rule, instance, edge_splits(rule, instance))
    for _ in range(MAX_REFINEMENTS):
        found = _fastest(replay, limits, _combined(rule, instance, saves, states))
        if found is None or found.step_s >= below_s:
            break
        best, below_s = found, found.step_s
        saves = [list(found.choices.saves)]
        states = state_rows(rule, instance, splits_beside(instance, found.choices))
    return best


def _fastest(replay: WindowReplay, limits: Budgets, batch: ChoiceBatch | None) -> Found | None:
    if batch is None:
        return None
    batch = batch.rows(replay.fits(batch, limits))
    if not len(batch.vocabulary):
        return None
    evaluation = replay.evaluate(batch)
    scores = rank_s(evaluation, limits)
    as_fast = evaluation.step_s <= evaluation.step_s[int(np.argmin(scores))] * (1 + TIE)
    winner = int(np.lexsort((scores, evaluation.nvme_gb, ~as_fast))[0])  # files only where they gain
    return Found(replay.instance.candidate, batch.choices(winner), float(evaluation.step_s[winner]))


def _combined(rule: Rule, instance: Instance, saves: list[list[int]], states: list[list[int]]) -> ChoiceBatch | None:
    """Every combination of ``saves``, ``states`` and placements of the vocabulary that the rule allows."""
    options = instance.vocabulary_options
    kinds = [k for k, o in enumerate(options) if not rule.streams_all or "gpu" not in (o.embed, o.head)]
    if not states or not kinds:
        return None
    grid = np.indices((len(saves), len(states), len(kinds))).reshape(3, -1)
    rows: list[Ints] = [np.array(part, dtype=np.int64)[k] for part, k in zip((saves, states, kinds), grid, strict=True)]
    return ChoiceBatch(*rows)
