"""The last round: the winner with one decision changed, again and again, as long as the simulation calls it faster.

The window replay ranks thousands of changes, but is a little apart from the simulation: so it proposes, and the
simulation decides. In the end one that moves less takes the place of a plan that is no faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lazysched.solver.choice_batch import ChoiceBatch, Ints
from lazysched.solver.explore import variations
from lazysched.solver.instance import Instance
from lazysched.solver.judge import Judge, Judged
from lazysched.solver.plans import Choices, Found
from lazysched.solver.search import TIE, allowed_states, simplified
from lazysched.solver.window_replay import WindowReplay

GROUPS = (1, 2, 4)
"""Aligned neighbours that are changed together, as segments lie, beside runs of equal blocks and all of a kind."""
MAX_FAILURES = 8
"""Changes that are simulated without a gain before the round ends: gains were among the first six."""
HOPELESS = 0.01
"""Share of the step by which the replay may call a change slower that is simulated all the same."""
SAME = 1e-9
"""Share of a step by which two equal ones may differ; not more, or a recipe could be faster than the plan."""


def improved(judge: Judge, start: Judged, has_time: Callable[[], bool]) -> Judged:
    """``start``, or what single changes make of it; budgets and pins are kept.

    Args:
        judge: simulates.
        start: a plan that keeps its budgets.
        has_time: asked before each change.
    """
    best, tried = start, {start.found}
    while has_time():
        better = _first_better(judge, best, tried, has_time)
        if better is None:
            break
        best = better
    return _lighter(judge, best, has_time)


def _lighter(judge: Judge, best: Judged, has_time: Callable[[], bool]) -> Judged:
    """``best``, or what is as fast and moves less."""
    candidate = best.found.candidate
    instance = judge.space.instance(candidate)
    replay, budgets = WindowReplay(instance), judge.space.budgets(instance)
    for tie in (TIE, SAME):
        if not has_time():
            break
        choices = simplified(replay, budgets, best.found.choices, has_time, tie)
        judged = judge.simulated(Found(candidate, choices, best.found.step_s))
        is_as_fast = judged.timeline.step_s <= best.timeline.step_s * (1 + SAME)
        if is_as_fast and _moved(judged) < _moved(best) and not judge.over_budget(judged.timeline):
            return judged
    return best


def _moved(judged: Judged) -> int:
    """Bytes of a step, both ways and to files."""
    return sum(judged.timeline.moved_bytes.values())


def _first_better(judge: Judge, best: Judged, tried: set[Found], has_time: Callable[[], bool]) -> Judged | None:
    """The first of the most promising changes that is faster and fits; what was simulated is put into ``tried``."""
    waiting = [found for found in _ranked(judge, best) if found not in tried]
    for found in waiting[:MAX_FAILURES]:
        if not has_time():
            break
        tried.add(found)
        judged = judge.simulated(found)
        if judged.timeline.step_s < best.timeline.step_s * (1 - TIE) and not judge.over_budget(judged.timeline):
            return judged
    return None


def _ranked(judge: Judge, best: Judged) -> list[Found]:
    """All changes that may fit and gain, the most promising first."""
    own, choices = best.found.candidate, best.found.choices
    current = ChoiceBatch.of([choices])
    before_s = float(WindowReplay(judge.space.instance(own)).evaluate(current).step_s[0])
    changes: list[Found] = []
    for candidate in (own, *variations(own)):
        instance = judge.space.instance(candidate)
        replay = WindowReplay(instance)
        batch = single_changes(instance, choices) if candidate == own else current
        batch = batch.rows(replay.whole(batch))
        batch = batch.rows(replay.fits(batch, judge.space.budgets(instance)))
        if not len(batch.vocabulary):
            continue
        step_s = replay.evaluate(batch).step_s
        hopeful = np.flatnonzero(step_s < before_s * (1 + HOPELESS))
        changes += [Found(candidate, batch.choices(int(k)), float(step_s[k])) for k in hopeful]
    return sorted(dict.fromkeys(changes), key=lambda found: found.step_s)


def single_changes(instance: Instance, choices: Choices) -> ChoiceBatch:
    """Everything that differs from ``choices`` in one decision.

    That is the save option, or the state, of one group of blocks, or the choice for embedding and head.
    """
    current = ChoiceBatch.of([choices])
    saves, states = current.saves[0], current.states[0]
    rows: list[tuple[Ints, Ints, int]] = []
    for group in groups(instance, choices):
        for save in range(len(instance.saves[group[0]])):
            rows.append((_with(saves, group, save), states, choices.vocabulary))
        for state in allowed_states(instance)[group[0]]:
            rows.append((saves, _with(states, group, int(state)), choices.vocabulary))
    rows += [(saves, states, k) for k in range(len(instance.vocabulary_options))]
    batch = ChoiceBatch(*(np.array(part, dtype=np.int64) for part in zip(*rows, strict=True)))
    same = (batch.saves == saves).all(1) & (batch.states == states).all(1) & (batch.vocabulary == choices.vocabulary)
    return batch.rows(~same)


def _with(row: Ints, group: Sequence[int], value: int) -> Ints:
    changed = row.copy()
    changed[list(group)] = value
    return changed


def groups(instance: Instance, choices: Choices) -> list[tuple[int, ...]]:
    """Blocks that are changed together; all of a group have the same options."""
    length = instance.num_blocks
    found = [tuple(range(i, min(i + size, length))) for size in GROUPS for i in range(0, length, size)]
    found += _alike(instance, choices)
    return [group for group in dict.fromkeys(found) if len({_options(instance, i) for i in group}) == 1]


def _options(instance: Instance, block: int) -> tuple[object, ...]:
    """What the block can choose among, whatever its place in a segment, so that blocks of one are changed together."""
    saves = ((id(o.variant), o.tier, o.rest_stays, o.segment) for o in instance.saves[block])
    return *saves, instance.states[block]


def _alike(instance: Instance, choices: Choices) -> Iterator[tuple[int, ...]]:
    """Runs of blocks that are decided alike, and all blocks that are."""
    length = instance.num_blocks
    kinds = [(_options(instance, i), choices.saves[i], choices.states[i]) for i in range(length)]
    edges = [i for i in range(1, length) if kinds[i] != kinds[i - 1]]
    for begin, end in zip([0, *edges], [*edges, length], strict=True):
        yield tuple(range(begin, end))
    for kind in dict.fromkeys(kinds):
        yield tuple(i for i, other in enumerate(kinds) if other == kind)
