"""Fixed recipes to compare a solved plan with: what other systems do for every block alike, at its best.

Each recipe may choose micro-batch, prefetch depth, placement of the vocabulary and whatever its rule leaves open: how
many blocks keep their weights on the GPU, with or without their optimizer state, and how many send what they save to
the host. The fastest combination that fits is the recipe's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lazysched.schemas import HostMemory, Plan, Tier
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.options import SaveOption
from lazysched.solver.plans import Choices
from lazysched.solver.search import allowed_states, rank_s
from lazysched.solver.simulate import Timeline
from lazysched.solver.window_replay import GPU, RESIDENT, STREAMED, ChoiceBatch, Ints, WindowReplay

COARSE = 32
"""Numbers of blocks that are tried at first; what lies between them is tried beside the best."""
MAX_REFINEMENTS = 4
"""How often the numbers of blocks in each state are improved, one against the other."""


@dataclass(frozen=True)
class Rule:
    """What a recipe prescribes.

    Attributes:
        name: shown to the user.
        saves: ``most`` or ``least`` that a variant can save in every block, or any ``one`` variant for all blocks.
        tiers: where that may go; with two, any number of blocks may use the second.
        streams_all: every stage has its state on the host, and every block its weights.
    """

    name: str
    saves: Literal["most", "least", "one"]
    tiers: tuple[Tier, ...] = ("gpu",)
    streams_all: bool = False


RULES = (
    Rule("keep all activations", "most"),
    Rule("checkpoint every block", "least"),
    Rule("checkpoint every block, inputs on host", "least", ("host",)),
    Rule("one variant for all blocks", "one"),
    Rule("everything streamed, inputs kept", "least", streams_all=True),
    Rule("everything streamed, inputs on gpu or host", "least", ("gpu", "host"), streams_all=True),
)
"""The last but one is MegaTrain's without its segments of four blocks, which no plan has yet; the last LazyTrain's."""


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


def candidates_of_rule(
    rule: Rule,
    accumulations: Mapping[int, int],
    limits: Mapping[int, Sequence[int]],
    host_memories: Sequence[HostMemory],
    prefetch_depths: Sequence[int],
) -> list[Candidate]:
    """The points of the outer search at which ``rule`` is tried.

    Args:
        rule: the recipe.
        accumulations: micro-batch -> accumulation.
        limits: micro-batch -> sizes in bytes that a block may send to the host, ascending, from 0 on.
        host_memories: kinds of host memory.
        prefetch_depths: how many stages ahead weights may be fetched.
    """
    return [
        Candidate(size, accumulation, depth, offload_limit_bytes=limit, host_memory=memory)
        for memory in host_memories
        for size, accumulation in accumulations.items()
        for depth in prefetch_depths
        for limit in _offload_limits(rule, limits[size])
    ]


def _offload_limits(rule: Rule, limits: Sequence[int]) -> list[int]:
    """What a block may send to the host: nothing, or the smallest size that there is."""
    none = [0] if "gpu" in rule.tiers else []
    return none + ([limits[1]] if "host" in rule.tiers else [])


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
    for instance in sorted(instances, key=lambda instance: instance.compute_bound_s):  # so that most need no look
        if not goes_on(best):
            break
        found = _best_of_instance(rule, instance, budgets(instance), best.step_s if best else np.inf)
        if found is not None:
            best = found
    return best


def _best_of_instance(rule: Rule, instance: Instance, limits: Budgets, below_s: float) -> Found | None:
    """The fastest choices of one instance if they take less than ``below_s``."""
    saves = [row for row in _saves(rule, instance) if _compute_s(instance, row) < below_s]
    if not saves:
        return None
    replay, best = WindowReplay(instance), None
    states = _state_rows(rule, instance, _edges(instance.num_blocks))
    for _ in range(MAX_REFINEMENTS):
        found = _fastest(replay, limits, _combined(rule, instance, saves, states))
        if found is None or found.step_s >= below_s:
            break
        best, below_s = found, found.step_s
        saves = [list(found.choices.saves)]
        states = _state_rows(rule, instance, _beside(found.choices))
    return best


def _fastest(replay: WindowReplay, limits: Budgets, batch: ChoiceBatch | None) -> Found | None:
    if batch is None:
        return None
    batch = batch.rows(replay.fits(batch, limits))
    if not len(batch.vocabulary):
        return None
    evaluation = replay.evaluate(batch)
    winner = int(np.argmin(rank_s(evaluation, limits)))
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


# ---- what blocks save


def _saves(rule: Rule, instance: Instance) -> list[list[int]]:
    """Save options of all blocks, one list per possibility."""
    per_tier = [[_in_tier(options, tier) for options in instance.saves] for tier in rule.tiers]
    available = [tier for tier in per_tier if all(tier)]
    if rule.saves == "one":
        return [row for tier in available for row in _shared_variants(instance, tier)]
    chosen = [
        [_extreme(options, places, rule.saves) for options, places in zip(instance.saves, tier, strict=True)]
        for tier in available
    ]
    return [row for n in range(instance.num_blocks + 1) for row in _split(chosen, n)] if len(chosen) > 1 else chosen


def _in_tier(options: Sequence[SaveOption], tier: Tier) -> list[int]:
    return [k for k, option in enumerate(options) if option.tier == tier]


def _extreme(options: Sequence[SaveOption], places: list[int], saves: str) -> int:
    pick = max if saves == "most" else min
    return pick(places, key=lambda k: options[k].kept_gb + options[k].offloaded_gb)


def _shared_variants(instance: Instance, places: list[list[int]]) -> list[list[int]]:
    """One row per variant, by name, that every block has."""
    named = [{options[k].variant.name: k for k in own} for options, own in zip(instance.saves, places, strict=True)]
    return [[block[name] for block in named] for name in named[0] if all(name in block for block in named)]


def _split(chosen: list[list[int]], count: int) -> list[list[int]]:
    """``count`` blocks take the second of the two rows: the first ones, whose inputs wait longest, or evenly spread."""
    length = len(chosen[0])
    spread = [(i + 1) * count // length > i * count // length for i in range(length)]
    masks = [[i < count for i in range(length)], spread]
    return [[chosen[mask][i] for i, mask in enumerate(masked)] for masked in masks]


def _compute_s(instance: Instance, saves: list[int]) -> float:
    """No plan that saves so is faster: nothing ever waits."""
    chosen = [options[k] for options, k in zip(instance.saves, saves, strict=True)]
    fastest = [min(options, key=lambda o: o.forward_s + o.backward_s) for options in instance.saves]
    more_s = sum(o.forward_s + o.backward_s - f.forward_s - f.backward_s for o, f in zip(chosen, fastest, strict=True))
    return instance.compute_bound_s + instance.candidate.accumulation * more_s


# ---- where weights and states are


def _state_rows(rule: Rule, instance: Instance, counts: Iterable[tuple[int, int]]) -> list[list[int]]:
    """States of all blocks: the first on the GPU, then those with resident weights, the rest streamed.

    Args:
        rule: which may stream everything.
        instance: how many blocks there are.
        counts: (blocks whose state is on the GPU, blocks whose weights alone are) to try.
    """
    length, allowed = instance.num_blocks, allowed_states(instance)
    if rule.streams_all:
        rows = [[STREAMED] * length]
    else:
        rows = [[GPU] * a + [RESIDENT] * b + [STREAMED] * (length - a - b) for a, b in dict.fromkeys(counts)]
    return [row for row in rows if all(state in own for state, own in zip(row, allowed, strict=True))]


def _edges(length: int) -> list[tuple[int, int]]:
    """Counts with at most two kinds of state, not more than about ``COARSE`` of each where blocks are many."""
    each = [*range(0, length, max(1, length // COARSE)), length]
    return [(n, 0) for n in each] + [(0, n) for n in each] + [(n, length - n) for n in each]


def _beside(choices: Choices) -> list[tuple[int, int]]:
    """Counts that differ from those of ``choices`` in one, or exchange one for the other."""
    length, on_gpu, resident = len(choices.states), choices.states.count("gpu"), choices.states.count("resident")
    rows = [(a, resident) for a in range(length - resident + 1)]
    rows += [(on_gpu, b) for b in range(length - on_gpu + 1)]
    return rows + [(a, on_gpu + resident - a) for a in range(on_gpu + resident + 1)]
