"""Local search over choices: quick, deterministic, and the start of the mixed-integer program.

Steepest descent. Neighbours are all changes of one block's save option or state, all exchanges between two blocks, and
a random sample of changes to two blocks at once, which is what trades memory of one block for time of another. What
would leave a part of a segment is dropped; segments come and go as a whole.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lazysched.solver.choice_batch import GPU, RESIDENT, ChoiceBatch, Evaluation, Floats, Ints
from lazysched.solver.instance import Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.options import STATE_CHOICES
from lazysched.solver.plans import Choices
from lazysched.solver.stopwatch import always
from lazysched.solver.window_replay import WindowReplay

NUM_PAIRS = 500
"""Sampled changes to two blocks per round."""
MAX_EXCHANGES = 600
"""Exchanges of two blocks' options, and of their states, per round."""
MISFIT_S, MISFIT_S_PER_GB = 1e4, 1e3
"""What exceeding a budget costs, so that a start which does not fit is led back to where it does."""
TIE = 5e-4
"""Plans whose steps differ by less than this share are equally fast: no machine repeats itself so well."""
LEAST_GAIN = 5e-5
"""Relative gain below which a round has failed."""
MAX_FAILURES = 2
"""Rounds in a row, each with other samples, that fail before the descent ends."""


def improve(
    replay: WindowReplay,
    budgets: Budgets,
    start: Choices,
    *,
    seed: int,
    max_rounds: int,
    has_time: Callable[[], bool] = always,
) -> Choices:
    """The best choices that descent from ``start`` finds within ``max_rounds`` rounds; they may still not fit.

    ``has_time`` is asked before each round.
    """
    random = np.random.default_rng(seed)
    current = ChoiceBatch.of([start])
    best_s = float(rank_s(replay.evaluate(current), budgets)[0])
    num_failures = 0
    for _ in range(max_rounds):
        if num_failures == MAX_FAILURES or not has_time():
            break
        batch = _neighbours(replay, current, random)
        batch = batch.rows(replay.whole(batch))
        memory = replay.memory(batch)
        fitting = memory.fits(budgets)
        if fitting.any():
            batch, memory = batch.rows(fitting), memory.rows(fitting)
        scores = rank_s(replay.evaluate(batch, memory), budgets)
        winner = int(np.argmin(scores))
        if not scores[winner] < best_s * (1 - LEAST_GAIN):
            num_failures += 1
            continue
        num_failures, best_s = 0, float(scores[winner])
        current = batch.rows(np.array([winner]))
    return current.choices(0)


def simplified(
    replay: WindowReplay, budgets: Budgets, start: Choices, has_time: Callable[[], bool] = always, tie: float = TIE
) -> Choices:
    """Of plans as fast as ``start``, one that moves less, then one with fewer kinds of blocks.

    All blocks of one kind become another kind, or blocks get their weights, or their state too, on the GPU, from the
    first on, as long as that costs no more than ``tie`` of the step in all and ``has_time``.
    """
    current = ChoiceBatch.of([start])
    allowed_s = float(replay.evaluate(current).step_s[0]) * (1 + tie)
    while has_time():
        batch = _simpler(replay.instance, current)
        batch = batch.rows(replay.whole(batch))
        batch = batch.rows(replay.fits(batch, budgets))
        batch = batch.rows(replay.evaluate(batch).step_s <= allowed_s)
        order = np.lexsort((_num_kinds(batch), np.round(replay.traffic_gb(batch), 3)))
        if not len(order) or order[0] == 0:  # the first is what there was
            break
        current = batch.rows(order[:1])
    return current.choices(0)


def _simpler(instance: Instance, current: ChoiceBatch) -> ChoiceBatch:
    """``current``, then what it becomes by one step of ``simplified``."""
    saves, states = current.saves[0], current.states[0]
    rows = [(saves, states)]
    options, allowed = np.array(instance.layouts), allowed_states(instance)
    kinds = sorted(set(zip(options.tolist(), saves.tolist(), states.tolist(), strict=True)))
    for own, save, state in kinds:
        where = (options == own) & (saves == save) & (states == state)
        for other_own, other_save, other_state in kinds:
            if own == other_own:  # a place among other options means something else
                chosen = where & np.array([other_state in states_of for states_of in allowed])
                rows.append((np.where(chosen, other_save, saves), np.where(chosen, other_state, states)))
    for nearer in (GPU, RESIDENT):
        movable = [i for i, own in enumerate(allowed) if states[i] > nearer and nearer in own]
        for count in range(1, len(movable) + 1):
            moved = states.copy()
            moved[movable[:count]] = nearer
            rows.append((saves, moved))
    vocabulary = np.repeat(current.vocabulary, len(rows))
    return ChoiceBatch(np.array([row[0] for row in rows]), np.array([row[1] for row in rows]), vocabulary)


def _num_kinds(batch: ChoiceBatch) -> Ints:
    """How many kinds of blocks each set of choices has."""
    kinds = np.sort(batch.saves * len(STATE_CHOICES) + batch.states, axis=1)
    counts: Ints = 1 + (np.diff(kinds, axis=1) != 0).sum(1)
    return counts


def rank_s(evaluation: Evaluation, budgets: Budgets) -> Floats:
    """Step time, far behind anything that fits for what does not; of equals, the one that holds less on the GPU."""
    misfit = np.where(evaluation.fits(budgets), 0.0, MISFIT_S + MISFIT_S_PER_GB * evaluation.over_gb(budgets))
    step_s: Floats = evaluation.step_s + 1e-6 * evaluation.gpu_gb + misfit
    return step_s


def _neighbours(replay: WindowReplay, current: ChoiceBatch, random: np.random.Generator) -> ChoiceBatch:
    """All that differs from ``current`` by one move of the kinds above."""
    instance = replay.instance
    saves = [np.array([k for k, o in enumerate(options) if o.segment == 1]) for options in instance.saves]
    states = allowed_states(instance)
    rows = _single_changes(current.saves[0], saves)
    parts = [(rows, _repeat(current.states, len(rows)))]
    rows = _single_changes(current.states[0], states)
    parts.append((_repeat(current.saves, len(rows)), rows))
    swapped = _exchanges(current.saves[0], instance.layouts, random)
    parts.append((swapped, _repeat(current.states, len(swapped))))
    if instance.has_segments:
        rows = _segment_changes(current.saves[0], instance)
        parts.append((rows, _repeat(current.states, len(rows))))
    swapped = _exchanges(current.states[0], [id(options) for options in instance.states], random)
    parts.append((_repeat(current.saves, len(swapped)), swapped))
    parts.append(_pair_changes(current, saves, states, random))
    num_vocabulary = len(instance.vocabulary_options)
    parts.append((_repeat(current.saves, num_vocabulary), _repeat(current.states, num_vocabulary)))
    all_saves, all_states = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    unchanged = np.repeat(current.vocabulary, len(all_saves) - num_vocabulary)
    return ChoiceBatch(all_saves, all_states, np.concatenate([unchanged, np.arange(num_vocabulary)]))


def _repeat(row: Ints, times: int) -> Ints:
    return np.repeat(row, times, axis=0)


def allowed_states(instance: Instance) -> list[Ints]:
    """Per block, the state choices that it has, as places in ``STATE_CHOICES``."""
    return [np.array([STATE_CHOICES.index(choice) for choice in choices]) for choices in instance.states]


def _single_changes(row: Ints, values: list[Ints]) -> Ints:
    """Rows that differ from ``row`` in one place, where they have one of its ``values``."""
    places = [(i, value) for i, allowed in enumerate(values) for value in allowed if value != row[i]]
    rows = np.tile(row, (len(places), 1))
    for k, (i, value) in enumerate(places):
        rows[k, i] = value
    return rows


def _segment_changes(row: Ints, instance: Instance) -> Ints:
    """Rows in which all blocks of one segment, or of where one could be, save alike: together or each by itself."""
    rows: list[Ints] = []
    for i, options in enumerate(instance.saves):
        for length in {option.segment for option in options if option.segment > 1 and option.place == 0}:
            blocks = slice(i, i + length)
            for o, option in enumerate(options):
                if option.segment in (1, length) and len(set(instance.layouts[blocks])) == 1:
                    changed = row.copy()
                    changed[blocks] = o
                    rows.append(changed)
    return np.array(rows, dtype=row.dtype).reshape(len(rows), len(row))


def _exchanges(row: Ints, kinds: list[int], random: np.random.Generator) -> Ints:
    """Rows in which two places of one kind with different values are exchanged; a sample where they are many."""
    length = len(row)
    pairs = [(i, j) for i in range(length) for j in range(i + 1, length) if row[i] != row[j] and kinds[i] == kinds[j]]
    if len(pairs) > MAX_EXCHANGES:
        pairs = [pairs[k] for k in random.choice(len(pairs), MAX_EXCHANGES, replace=False)]
    rows = np.tile(row, (len(pairs), 1))
    for k, (i, j) in enumerate(pairs):
        rows[k, [i, j]] = rows[k, [j, i]]
    return rows


def _pair_changes(
    current: ChoiceBatch, save_values: list[Ints], state_values: list[Ints], random: np.random.Generator
) -> tuple[Ints, Ints]:
    """Random changes to two places: two save options, or one save option and one state."""
    saves, states = _repeat(current.saves, NUM_PAIRS), _repeat(current.states, NUM_PAIRS)
    rows = np.arange(NUM_PAIRS)
    places = random.integers(0, len(save_values), size=(2, NUM_PAIRS))
    half = NUM_PAIRS // 2
    saves[rows, places[0]] = _drawn(save_values, places[0], random)
    saves[rows[:half], places[1, :half]] = _drawn(save_values, places[1, :half], random)
    states[rows[half:], places[1, half:]] = _drawn(state_values, places[1, half:], random)
    return saves, states


def _drawn(values: list[Ints], places: Ints, random: np.random.Generator) -> Ints:
    """One of the values of each place."""
    counts = np.array([len(allowed) for allowed in values])
    table = np.zeros((len(values), counts.max()), dtype=np.int64)
    for row, allowed in zip(table, values, strict=True):
        row[: len(allowed)] = allowed
    return table[places, random.integers(0, counts[places])]
