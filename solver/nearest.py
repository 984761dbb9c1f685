"""Choices that need little more memory than there is, by descent on the memory rows: no clock, so that they repeat.

HiGHS may do better, or find nothing at all in its time where a machine is busy; it starts from these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lazysched.schemas import Tier
from lazysched.solver.choice_batch import ChoiceBatch, Floats, Ints
from lazysched.solver.instance import Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.options import STATE_CHOICES
from lazysched.solver.plans import Choices
from lazysched.solver.window_replay import WindowReplay

MAX_ROUNDS = 200
RIGID = 1e3
"""How much more a GB counts in a tier that may not be exceeded."""
LEAST_GAIN_GB = 1e-9


def nearest(
    instance: Instance, budgets: Budgets, elastic: Sequence[Tier], starts: Iterable[Choices]
) -> tuple[Choices, float] | None:
    """The choices that exceed the ``elastic`` tiers by fewest GB, and by how many, of the descents from ``starts``.

    Returns:
        None where all exceed another tier.
    """
    replay, best = WindowReplay(instance), None
    for start in starts:
        batch = ChoiceBatch.of([start])
        if replay.whole(batch)[0]:
            choices, missing_gb, rigid_gb = _descended(replay, budgets, elastic, batch)
            if rigid_gb <= LEAST_GAIN_GB and (best is None or missing_gb < best[1]):
                best = choices, missing_gb
    return best


def _descended(
    replay: WindowReplay, budgets: Budgets, elastic: Sequence[Tier], current: ChoiceBatch
) -> tuple[Choices, float, float]:
    """Steepest descent: choices, GB beyond the elastic tiers, GB beyond the others."""
    for _ in range(MAX_ROUNDS):
        batch = _moved(replay.instance, current)
        batch = batch.rows(replay.whole(batch))
        missing, rigid = _over_gb(replay, batch, budgets, elastic)
        costs = missing + RIGID * rigid
        winner = int(np.argmin(costs))
        if not costs[winner] < costs[0] - LEAST_GAIN_GB:  # the first is what there was
            break
        current = batch.rows(np.array([winner]))
    missing, rigid = _over_gb(replay, current, budgets, elastic)
    return current.choices(0), float(missing[0]), float(rigid[0])


def _over_gb(
    replay: WindowReplay, batch: ChoiceBatch, budgets: Budgets, elastic: Sequence[Tier]
) -> tuple[Floats, Floats]:
    """N each: GB beyond the elastic tiers, and beyond what must be kept."""
    memory = replay.memory(batch)
    used = {"gpu": memory.gpu_gb, "host": memory.host_gb, "nvme": memory.nvme_gb, "moved": memory.moved_gb}
    limits = {"gpu": budgets.gpu_gb, "host": budgets.host_gb, "nvme": budgets.nvme_gb, "moved": budgets.moved_gb}
    over = {name: np.maximum(used[name] - limits[name], 0.0) for name in used}
    none = np.zeros(len(batch.vocabulary))
    missing: Floats = sum((over[name] for name in over if name in elastic), none)
    rigid: Floats = sum((over[name] for name in over if name not in elastic), none)
    return missing, rigid


# ---- moves


def _moved(instance: Instance, current: ChoiceBatch) -> ChoiceBatch:
    """``current``, then all that differs from it by one move.

    1, 2, 4, ... of the equal blocks that are decided alike, first or last, are decided otherwise, or the vocabulary is.
    """
    saves, states = current.saves[0], current.states[0]
    rows: list[tuple[Ints, Ints]] = [(saves, states)]
    for members, num_options, allowed in _groups(instance):
        for save in set(saves[members].tolist()):
            own = members[saves[members] == save]
            for other in set(range(num_options)) - {save}:
                rows += [(_with(saves, part, other), states) for part in _parts(own)]
        for state in set(states[members].tolist()):
            own = members[states[members] == state]
            for other in set(allowed) - {state}:
                rows += [(saves, _with(states, part, other)) for part in _parts(own)]
    ends = np.arange(len(instance.vocabulary_options))
    vocabulary = np.concatenate([np.repeat(current.vocabulary, len(rows)), ends])
    rows += [(saves, states)] * len(ends)
    return ChoiceBatch(np.array([row[0] for row in rows]), np.array([row[1] for row in rows]), vocabulary)


def _groups(instance: Instance) -> Iterator[tuple[Ints, int, list[int]]]:
    """(blocks that are equal in all, how many save options they have, their states)."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, alike in enumerate(zip(instance.blocks, instance.states, strict=True)):
        groups[(instance.layouts[i], *map(id, alike))].append(i)
    for members in groups.values():
        first = members[0]
        states = [STATE_CHOICES.index(choice) for choice in instance.states[first]]
        yield np.array(members), len(instance.saves[first]), states


def _parts(blocks: Ints) -> Iterator[Ints]:
    """The first and the last 1, 2, 4, ... and all of ``blocks``."""
    count = 1
    while count < len(blocks):
        yield blocks[:count]
        yield blocks[-count:]
        count *= 2
    yield blocks


def _with(row: Ints, places: Ints, value: int) -> Ints:
    changed = row.copy()
    changed[places] = value
    return changed
