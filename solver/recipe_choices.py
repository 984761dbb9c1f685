"""What a rule leaves open: the save options of all blocks, and how many blocks have weights and state where."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lazysched.schemas import Tier
from lazysched.solver.instance import Instance
from lazysched.solver.options import IN_FILES, RESIDENT, STATE_CHOICES, STREAMED, SaveOption, StateChoice
from lazysched.solver.plans import Choices
from lazysched.solver.recipe_rules import Rule
from lazysched.solver.search import allowed_states

COARSE = 32
"""Numbers of blocks that are tried at first; what lies between them is tried beside the best."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, are evenly spread however many they are."""


def saves_of(rule: Rule, instance: Instance) -> list[list[int]]:
    """Save options of all blocks, one list per possibility; blocks without a backward have one that saves nothing."""
    blocks, before = instance.saves[instance.num_forward_only :], [0] * instance.num_forward_only
    rows = _saves_of_trained(rule, blocks, rule.length(instance.num_blocks)) if blocks else [[]]
    return [before + row for row in rows]


def _saves_of_trained(rule: Rule, blocks: Sequence[Sequence[SaveOption]], length: int) -> list[list[int]]:
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


def saving_bound_s(instance: Instance, saves: list[int]) -> float:
    """No plan that saves so is faster: nothing ever waits."""
    chosen = [options[k] for options, k in zip(instance.saves, saves, strict=True)]
    fastest = [min(options, key=lambda o: o.forward_s + o.backward_s) for options in instance.saves]
    more_s = sum(o.forward_s + o.backward_s - f.forward_s - f.backward_s for o, f in zip(chosen, fastest, strict=True))
    return instance.compute_bound_s + instance.candidate.accumulation * more_s


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


def state_rows(rule: Rule, instance: Instance, splits: Iterable[_Split]) -> list[list[int]]:
    """States of all blocks by each of ``splits`` that ``rule`` and the instance's options allow."""
    length, allowed = instance.num_blocks, allowed_states(instance)
    if rule.streams_all:
        splits = [replace(split, on_gpu=0, resident=0) for split in splits]
    rows = [split.states(length) for split in dict.fromkeys(splits)]
    return [row for row in rows if all(state in own for state, own in zip(row, allowed, strict=True))]


def edge_splits(rule: Rule, instance: Instance) -> list[_Split]:
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


def splits_beside(instance: Instance, choices: Choices) -> list[_Split]:
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
