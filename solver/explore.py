"""One combination of the outer search: a plan that may beat the incumbent, and a bound for all that it has.

A bound is taken from programs looser than that of any prefetch depth and D2H lag in question: memory of the
shallowest, time of the deepest, of a lag of 0 apart. The plan is sought with one depth and lag: descent, by the quick
replay, from the program's rounded relaxation and from the best even mixes of what blocks save there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lazysched.solver.choice_batch import ChoiceBatch
from lazysched.solver.highs import NUM_THREADS
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.milp import PlacementProgram
from lazysched.solver.mixes import best_mixes
from lazysched.solver.plans import Choices, Found
from lazysched.solver.search import improve, simplified
from lazysched.solver.stopwatch import Stopwatch, always
from lazysched.solver.window_replay import WindowReplay
from lazysched.solver.workers import each_in_processes, in_worker, usable_cores

PREFETCH_DEPTHS, D2H_LAGS = (1, 2), (0, 1, 2)
FIRST_DEPTH, FIRST_LAG = 1, 1
"""What every combination is tried with; the others are tried with the best of them."""
MAX_ROUNDS = 60
NUM_MIXES = 3
"""Even mixes that descents start from at most."""
NEAR = 3e-3
"""What a plan may be slower than its relaxation for no other start to be tried: little is left to gain."""
PARALLEL_BLOCKS = 200
"""Blocks times combinations from which on other processes, which take a second to start, are worth it."""


@dataclass(frozen=True)
class Task:
    """A combination to explore.

    Attributes:
        instance: with the first depth and lag.
        budgets: of its memory.
        incumbent_s: step time of the best plan so far.
        gap: a plan has to be faster than the incumbent by more than this share of it.
        time_limit_s: wall-clock seconds.
        seed: of HiGHS and of the descent.
    """

    instance: Instance
    budgets: Budgets
    incumbent_s: float
    gap: float
    time_limit_s: float
    seed: int


@dataclass(frozen=True)
class Explored:
    """What came of it.

    Attributes:
        found: a plan that may beat the incumbent.
        bound_s: no plan of the combination, of any depth and lag, is faster.
        fits: whether the relaxation has a solution; with fewer slots there may be one where it has none.
    """

    found: Found | None = None
    bound_s: float = -math.inf
    fits: bool = True


def explore_all(tasks: Sequence[Task]) -> list[Explored]:
    """``explore`` each of ``tasks``; see ``_each``."""
    return _each(explore, tasks)


def bound_all(tasks: Sequence[Task]) -> list[Explored]:
    """``bound`` each of ``tasks``; see ``_each``."""
    return _each(bound, tasks)


def _each(part: Callable[[Task], Explored], tasks: Sequence[Task]) -> list[Explored]:
    """All ``tasks``, in processes of their own where there are cores and it is worth it.

    One after the other, those that come when their time is up are left out.
    """
    num_workers = min(len(tasks), usable_cores() // NUM_THREADS)
    num_blocks = sum(task.instance.num_blocks for task in tasks)
    if num_workers < 2 or num_blocks < PARALLEL_BLOCKS or in_worker():
        return list(_in_turn(part, tasks))
    explored = dict(each_in_processes(part, tasks, num_workers))
    return [explored[index] for index in range(len(tasks))]


def _in_turn(part: Callable[[Task], Explored], tasks: Sequence[Task]) -> Iterable[Explored]:
    watch = Stopwatch(math.inf)
    for task in tasks:
        left_s = task.time_limit_s - watch.elapsed_s
        if left_s <= 0:
            break
        yield part(replace(task, time_limit_s=left_s))


def bound(task: Task) -> Explored:
    """Bound a combination."""
    return Explored(bound_s=loosest_bound_s(task.instance, task.budgets, Stopwatch(task.time_limit_s)))


def explore(task: Task) -> Explored:
    """Look for a plan, if the relaxation leaves room."""
    watch, instance = Stopwatch(task.time_limit_s), task.instance
    shallow = instance.at(shallowest(instance.candidate))
    program = PlacementProgram(instance, task.budgets)
    relaxed_s = program.lower_bound_s(watch.remaining_s)
    if relaxed_s == math.inf:
        return Explored(bound_s=math.inf if instance.candidate == shallow.candidate else -math.inf, fits=False)
    if relaxed_s >= task.incumbent_s * (1 - task.gap) or not watch.has_time():
        return Explored()
    hopeful_s, near_s = task.incumbent_s * (1 + task.gap), relaxed_s * (1 + NEAR)
    found = best_descent(program, task.budgets, near_s, hopeful_s, task.seed, watch.has_time)
    if found is None:  # with fewer slots there may be room
        found = polished(shallow, task.budgets, program.rounded(), task.seed, watch.has_time)
    return Explored(found)


def best_descent(
    program: PlacementProgram,
    budgets: Budgets,
    near_s: float,
    hopeful_s: float = math.inf,
    seed: int = 0,
    has_time: Callable[[], bool] = always,
) -> Found | None:
    """The best plan of descents from the rounded relaxation and from the best even mixes, if any fits.

    Args:
        program: relaxed before.
        budgets: of its memory.
        near_s: a step as fast as this ends the search.
        hopeful_s: a step must be as fast as this after one descent of each kind for more mixes to be tried.
        seed: of the descent.
        has_time: asked before each descent and each of its rounds.
    """
    instance, rounded = program.decisions.instance, program.rounded()
    mixes = best_mixes(WindowReplay(instance), budgets, rounded, program.shares(), NUM_MIXES)
    best: Found | None = None
    for k, start in enumerate([*mixes[:1], rounded, *mixes[1:]]):
        best_s = best.step_s if best else math.inf
        if not has_time() or best_s <= near_s or (k > 1 and best_s > hopeful_s):
            break
        found = polished(instance, budgets, start, seed, has_time)
        if found is not None and found.step_s < best_s:
            best = found
    return best


def polished(
    instance: Instance, budgets: Budgets, start: Choices, seed: int, has_time: Callable[[], bool] = always
) -> Found | None:
    """The best plan that descent from ``start`` finds while ``has_time``, if it fits."""
    replay = WindowReplay(instance)
    choices = improve(replay, budgets, start, seed=seed, max_rounds=MAX_ROUNDS, has_time=has_time)
    if replay.fits(ChoiceBatch.of([choices]), budgets)[0]:
        choices = simplified(replay, budgets, choices, has_time)
    evaluation = replay.evaluate(ChoiceBatch.of([choices]))
    if not evaluation.fits(budgets)[0]:
        return None
    return Found(instance.candidate, choices, float(evaluation.step_s[0]))


def loosest_bound_s(instance: Instance, budgets: Budgets, watch: Stopwatch) -> float:
    """No plan of the combination, with any depth and lag, is faster."""
    lags = (D2H_LAGS[:1], D2H_LAGS[1:])  # in one program, all had the memory of a lag of 0 without its waits
    return min(_loosest_program(instance, budgets, each).lower_bound_s(watch.remaining_s) for each in lags)


def _loosest_program(instance: Instance, budgets: Budgets, lags: Sequence[int]) -> PlacementProgram:
    """A program that has every plan of the combination, with any depth and any of the ``lags``, and more."""
    shallow, deep = (
        instance.at(replace(instance.candidate, prefetch_depth=extreme(PREFETCH_DEPTHS), d2h_lag=extreme(lags)))
        for extreme in (min, max)
    )
    return PlacementProgram(deep, budgets, memory_of=shallow)


def shallowest(candidate: Candidate) -> Candidate:
    """The combination with the fewest slots."""
    return replace(candidate, prefetch_depth=min(PREFETCH_DEPTHS), d2h_lag=min(D2H_LAGS))


def variations(candidate: Candidate) -> Iterable[Candidate]:
    """The combination with every other depth and lag; last with copies and forwards by turns, should time run out."""
    for depth, lag in itertools.product(PREFETCH_DEPTHS, sorted(D2H_LAGS, key=lambda lag: lag == 0)):
        other = replace(candidate, prefetch_depth=depth, d2h_lag=lag)
        if other != candidate:
            yield other
