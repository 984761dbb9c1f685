"""Evenly spread mixes of two and three save options: starts for the descent where links set the pace.

Where copies to the host bind, blocks that send much and blocks that send little must take turns, and changes of single
blocks out of step with them look worse than they are. Rounding the relaxation leaves blocks that keep no such rhythm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lazysched.schemas import Tier
from lazysched.solver.choice_batch import ChoiceBatch, Ints
from lazysched.solver.instance import Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.milp import spread
from lazysched.solver.plans import Choices
from lazysched.solver.search import rank_s
from lazysched.solver.window_replay import WindowReplay

MAX_KINDS = 6
"""Save options that are mixed, those with the largest shares."""
LEAST_SHARE = 0.01
"""Of the relaxation's blocks, below which an option is left out."""
PAIRS, TRIPLES = 32, 10
"""Parts into which the blocks are divided between two options, and between three."""
Kind = tuple[str, Tier, bool]
"""Variant and tier, and whether only the input is there."""


def best_mixes(
    replay: WindowReplay, budgets: Budgets, start: Choices, shares: dict[Kind, float], count: int
) -> list[Choices]:
    """The fastest mixes that fit, at most ``count``, all else as in ``start``.

    Args:
        replay: of the instance.
        budgets: of its memory.
        start: the states of all stages.
        shares: of the blocks of a relaxation, by what they save.
        count: of mixes.
    """
    rows = _rows(replay.instance, shares)
    if not len(rows):
        return []
    alike = ChoiceBatch.of([start])
    states, vocabulary = np.repeat(alike.states, len(rows), 0), np.repeat(alike.vocabulary, len(rows))
    batch = ChoiceBatch(rows, states, vocabulary)
    batch = batch.rows(replay.fits(batch, budgets))
    if not len(batch.vocabulary):
        return []
    order = np.argsort(rank_s(replay.evaluate(batch), budgets), kind="stable")[:count]
    return [replace(start, saves=batch.choices(int(k)).saves) for k in order]


def _rows(instance: Instance, shares: dict[Kind, float]) -> Ints:
    """N x L: save options of all mixes; of segments none. Blocks without a backward have a single option."""
    before = [0] * instance.num_forward_only
    if len(before) == instance.num_blocks:
        return np.empty((0, len(before)), dtype=np.int64)
    places = [
        {(o.variant.name, o.tier, o.rest_stays): k for k, o in enumerate(options) if o.segment == 1}
        for options in instance.saves[len(before) :]
    ]
    common = [kind for kind, share in shares.items() if share >= LEAST_SHARE and all(kind in own for own in places)]
    kinds = sorted(common, key=lambda kind: -shares[kind])[:MAX_KINDS]
    table = np.array([[own[kind] for kind in kinds] for own in places], dtype=np.int64).reshape(len(places), -1)
    patterns = dict.fromkeys(itertools.chain(_of(2, PAIRS, len(places)), _of(3, TRIPLES, len(places))))
    rows = [
        table[np.arange(len(places)), np.array(chosen)[list(pattern)]]
        for pattern in patterns
        for chosen in itertools.combinations(range(len(kinds)), max(pattern) + 1)
    ]
    return np.array([[*before, *row] for row in rows], dtype=np.int64)


def _of(count: int, parts: int, length: int) -> Iterator[tuple[int, ...]]:
    """For every way to share ``parts`` out among ``count`` kinds, which kind each block is, as evenly as can be."""
    for cuts in itertools.combinations(range(1, parts), count - 1):
        edges = (0, *cuts, parts)
        yield tuple(spread([[(edges[k + 1] - edges[k]) / parts for k in range(count)]] * length))
