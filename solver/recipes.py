"""Fixed recipes to compare a solved plan with: what other systems do for every block alike, at its best.

Each recipe may choose micro-batch, prefetch depth, D2H lag, placement of the vocabulary and whatever its rule leaves
open: how many blocks keep their weights on the GPU, with or without their optimizer state, how many have it in files,
and how many send what they save to the host. The fastest combination that fits is the recipe's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lazysched.schemas import HostMemory, Plan, Tier
from lazysched.solver.choice_batch import ChoiceBatch, Ints
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.options import IN_FILES, RESIDENT, STATE_CHOICES, STREAMED, SaveOption, Scope, StateChoice
from lazysched.solver.plans import Choices, Found
from lazysched.solver.search import TIE, allowed_states, rank_s
from lazysched.solver.simulate import Timeline
from lazysched.solver.window_replay import WindowReplay

COARSE = 32
"""Numbers of blocks that are tried at first; what lies between them is tried beside the best."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, are evenly spread however many they are."""
MAX_REFINEMENTS = 4
"""How often the numbers of blocks in each state are improved, one against the other."""


@dataclass(frozen=True)
class Rule:
    """What a recipe prescribes.

    Attributes:
        name: shown to the user.
        saves: ``most`` or ``least`` that a variant can save in every block, or any ``one`` variant for all blocks.
        tiers: where that may go; with several, any number of blocks may use each.
        streams_all: every stage has its state on the host, and every block its weights.
        segment: blocks of a segment, or the ``root`` of their number; those left over checkpoint every block.
    """

    name: str
    saves: Literal["most", "least", "one"]
    tiers: tuple[Tier, ...] = ("gpu",)
    streams_all: bool = False
    segment: int | Literal["root"] = 1

    def length(self, num_blocks: int) -> int:
        """Blocks of a segment."""
        return max(1, round(math.sqrt(num_blocks))) if self.segment == "root" else min(self.segment, num_blocks)

    def within(self, scope: Scope) -> Rule | None:
        """The rule with the tiers of ``scope``; None where it has none or no segments."""
        tiers = tuple(tier for tier in self.tiers if tier in scope.saved)
        whole = self.segment == 1 or max(scope.segments) > 1
        return replace(self, tiers=tiers) if tiers and whole else None


RULES = (
    Rule("keep all activations", "most"),
    Rule("checkpoint every block", "least"),
    Rule("checkpoint every block, inputs on host", "least", ("host",)),
    Rule("segments of the square root of the number of blocks", "one", segment="root"),
    Rule("one variant for all blocks", "one"),
    Rule("everything streamed, inputs kept", "least", streams_all=True),
    Rule("everything streamed, segments of four blocks", "one", streams_all=True, segment=4),
    Rule("everything streamed, inputs anywhere", "least", ("gpu", "host", "nvme"), streams_all=True),
)
"""The last but one is MegaTrain's, the last LazyTrain's."""


def rules_within(scope: Scope) -> list[Rule]:
    """Those of ``RULES`` whose plans are in ``scope``."""
    return [rule for rule in (rule.within(scope) for rule in RULES) if rule is not None]


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
        d2h_lags: by how many windows what leaves may lag behind; the first is tried before the others.
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


def _in_turn(instance: Instance) -> tuple[int, float]:
    """The shortest lag first, should time run out; then so that most need no look."""
    return instance.candidate.d2h_lag, instance.compute_bound_s


def _best_of_instance(rule: Rule, instance: Instance, limits: Budgets, below_s: float) -> Found | None:
    """The fastest choices of one instance if they take less than ``below_s``."""
    saves = [row for row in _saves(rule, instance) if _compute_s(instance, row) < below_s]
    if not saves:
        return None
    replay, best = WindowReplay(instance), None
    states = _state_rows(rule, instance, _edges(rule, instance))
    for _ in range(MAX_REFINEMENTS):
        found = _fastest(replay, limits, _combined(rule, instance, saves, states))
        if found is None or found.step_s >= below_s:
            break
        best, below_s = found, found.step_s
        saves = [list(found.choices.saves)]
        states = _state_rows(rule, instance, _beside(instance, found.choices))
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


# ---- what blocks save


def _saves(rule: Rule, instance: Instance) -> list[list[int]]:
    """Save options of all blocks, one list per possibility; blocks without a backward have one that saves nothing."""
    blocks, before = instance.saves[instance.num_forward_only :], [0] * instance.num_forward_only
    return [before + row for row in _saves_of(rule, blocks, rule.length(instance.num_blocks))] if blocks else [before]


def _saves_of(rule: Rule, blocks: Sequence[Sequence[SaveOption]], length: int) -> list[list[int]]:
    """The same for ``blocks`` that have a backward."""
    per_tier = [[_by_variant(options, tier, length) for options in blocks] for tier in rule.tiers]
    available = [tier for tier in per_tier if all(tier)]
    if rule.saves == "one":
        return [row for tier in available for row in _shared_variants(tier)]
    chosen = [
        [_extreme(options, own, rule.saves) for options, own in zip(blocks, tier, strict=True)] for tier in available
    ]
    return _shared_out(chosen) if len(chosen) > 1 else chosen


def _by_variant(options: Sequence[SaveOption], tier: Tier, length: int) -> dict[str, int]:
    """Variant -> the option that saves it in ``tier`` and in segments of that length.

    A block that is in no such segment saves as little as it can, whatever the others save.
    """
    in_tier = [(k, o) for k, o in enumerate(options) if o.tier == tier]
    alone = {o.variant.name: k for k, o in in_tier if o.segment == 1 and not o.rest_stays}
    own = alone if length == 1 else {o.variant.name: k for k, o in in_tier if o.segment == length}
    if own or length == 1 or not alone:
        return own
    least = _extreme(options, alone, "least")
    return {o.variant.name: least for o in options}


def _extreme(options: Sequence[SaveOption], own: Mapping[str, int], saves: str) -> int:
    pick = max if saves == "most" else min
    return pick(own.values(), key=lambda k: options[k].kept_gb + options[k].offloaded_gb)


def _shared_variants(blocks: list[dict[str, int]]) -> list[list[int]]:
    """One row per variant, by name, that every block has."""
    return [[block[name] for block in blocks] for name in blocks[0] if all(name in block for block in blocks)]


def _shared_out(chosen: list[list[int]]) -> list[list[int]]:
    """Any number of blocks take each of the rows, of three and more about ``COARSE`` / 2 numbers.

    Those that take the last come first, because their inputs wait longest, or all are evenly spread.
    """
    length = len(chosen[0])
    step = 1 if len(chosen) == 2 else max(1, 2 * length // COARSE)
    counts = [sorted({*range(0, length + 1, step), length})] * (len(chosen) - 1)
    rows = []
    for numbers in itertools.product(*counts):
        if sum(numbers) <= length:
            kinds = [k for k, count in reversed(list(enumerate(numbers, 1))) for _ in range(count)]
            kinds += [0] * (length - len(kinds))
            for order in (range(length), _spread(length)):
                rows.append([chosen[kinds[place]][i] for i, place in enumerate(order)])
    return rows


def _spread(length: int) -> list[int]:
    """An order of the blocks in which any first few of them are about evenly spread: place -> rank."""
    return [int(rank) for rank in np.argsort(np.argsort([(i + 1) * GOLDEN % 1 for i in range(length)], kind="stable"))]


def _compute_s(instance: Instance, saves: list[int]) -> float:
    """No plan that saves so is faster: nothing ever waits."""
    chosen = [options[k] for options, k in zip(instance.saves, saves, strict=True)]
    fastest = [min(options, key=lambda o: o.forward_s + o.backward_s) for options in instance.saves]
    more_s = sum(o.forward_s + o.backward_s - f.forward_s - f.backward_s for o, f in zip(chosen, fastest, strict=True))
    return instance.compute_bound_s + instance.candidate.accumulation * more_s


# ---- where weights and states are


@dataclass(frozen=True)
class _Split:
    """How many blocks, from the first on, have their state on the GPU, and how many then their weights alone.

    Of those that the host updates, the last ``in_files`` have their state in files, or state and ``kind`` weights.
    """

    on_gpu: int
    resident: int
    in_files: int = 0
    kind: StateChoice = "streamed_nvme"

    def states(self, length: int) -> list[int]:
        """Of all blocks, as places in ``STATE_CHOICES``."""
        rest = length - self.on_gpu - self.resident
        counts: dict[StateChoice, int] = {"gpu": self.on_gpu, "resident": self.resident, "streamed": rest}
        states = [state for state, count in counts.items() for _ in range(count)]
        for i in range(length - self.in_files, length):
            states[i] = "resident_nvme" if states[i] == "resident" else self.kind
        return [STATE_CHOICES.index(state) for state in states]


def _state_rows(rule: Rule, instance: Instance, splits: Iterable[_Split]) -> list[list[int]]:
    """States of all blocks by each of ``splits`` that ``rule`` and the instance's options allow."""
    length, allowed = instance.num_blocks, allowed_states(instance)
    if rule.streams_all:
        splits = [replace(split, on_gpu=0, resident=0) for split in splits]
    rows = [split.states(length) for split in dict.fromkeys(splits)]
    return [row for row in rows if all(state in own for state, own in zip(row, allowed, strict=True))]


def _edges(rule: Rule, instance: Instance) -> list[_Split]:
    """Splits with at most two kinds of state, not more than about ``COARSE`` of each where blocks are many.

    Of files, all that the host updates is in them, or nothing.
    """
    length = instance.num_blocks
    each = [*range(0, length, max(1, length // COARSE)), length]
    counts = [(n, 0) for n in each] + [(0, n) for n in each] + [(n, length - n) for n in each]
    if rule.streams_all:
        counts = [(0, 0)]
    apart = [_Split(a, b) for a, b in counts]
    return apart + [_Split(a, b, length - a, kind) for kind in _kinds_in_files(instance) for a, b in counts]


def _kinds_in_files(instance: Instance) -> list[StateChoice]:
    """How a block that streams may be in files."""
    return [kind for kind in STREAMED if kind in IN_FILES and all(kind in own for own in instance.states)]


def _beside(instance: Instance, choices: Choices) -> list[_Split]:
    """Splits that differ from that of ``choices`` in one number, or exchange one for the other."""
    length, states = len(choices.states), choices.states
    on_gpu, resident = states.count("gpu"), sum(state in RESIDENT for state in states)
    in_files = sum(state in IN_FILES for state in states)
    kinds: list[StateChoice] = [own for own in _kinds_in_files(instance) if own in states] or _kinds_in_files(instance)
    kind: StateChoice
    (kind,) = kinds[:1] or ("streamed_nvme",)
    rows = [_Split(a, resident, min(in_files, length - a), kind) for a in range(length - resident + 1)]
    rows += [_Split(on_gpu, b, in_files, kind) for b in range(length - on_gpu + 1)]
    rows += [_Split(a, on_gpu + resident - a, min(in_files, length - a), kind) for a in range(on_gpu + resident + 1)]
    return rows + [
        _Split(on_gpu, resident, count, other)
        for other in _kinds_in_files(instance)
        for count in range(length - on_gpu + 1)
    ]
