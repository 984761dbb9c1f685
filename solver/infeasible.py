"""Whether any plan fits the memory, and which choices miss it by least: an elastic program.

Only memory matters here, so the program has the memory rows alone, each budget with a slack that is minimised: one tier
at a time, or all together. The answer is then taken from the lowered plan itself, byte by byte.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import pulp

from lazysched.lower import lower
from lazysched.schemas import Profile, StateFormat, Tier
from lazysched.solver.batches import accumulations
from lazysched.solver.bounds import least_missing
from lazysched.solver.decisions import Decisions
from lazysched.solver.explore import shallowest
from lazysched.solver.highs import solve_problem
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.measured import host_memories, offload_limits
from lazysched.solver.memory_rows import Budgets, add_memory_rows
from lazysched.solver.nearest import nearest
from lazysched.solver.options import GB, SaveOption, Scope, StageCosts, StateChoice
from lazysched.solver.pins import Pin
from lazysched.solver.plans import Choices, make_plan
from lazysched.solver.simulate import peak_bytes, pinned_bytes
from lazysched.solver.stopwatch import Stopwatch

TIERS: tuple[Tier, ...] = ("gpu", "host")
_TIME_LIMIT_S = 2.0
_FILES_TIME_LIMIT_S = 6.0
"""With files there are many more ways, so many that HiGHS may find none at all by itself in time."""
_GAP = 2e-3
MARGIN_BYTES = 2000
"""Twice what HiGHS tolerates in a memory row (1e-6 GB): a plan that it calls fitting within the margin really fits."""
_ROWS_MISS_GB = 1e-3
"""What memory rows and their margin may miss while the lowered plan, counted byte by byte, fits."""
_NUM_SOLVED = 4
"""Instances whose elastic program is always solved, by a lower bound of their shortfall; further ones if these were
quick."""


@dataclass(frozen=True)
class Question:
    """What decides whether some plan fits.

    Attributes:
        profile: measurements.
        batch_size: rows of a step.
        budget_bytes: of each tier.
        state_format: of the optimizer state.
        scope: where things may be.
        make_instance: the coefficients of a candidate with state in a format, things in a scope, and what is fixed.
        seed: of HiGHS.
        pins: decisions fixed by hand.
        watch: how long may be looked; after that the descents alone answer, which take a part of a second.
    """

    profile: Profile
    batch_size: int
    budget_bytes: Mapping[Tier, int]
    state_format: StateFormat
    scope: Scope
    make_instance: Callable[[Candidate, StateFormat, Scope, tuple[Pin, ...]], Instance]
    seed: int
    pins: tuple[Pin, ...] = ()
    watch: Stopwatch = field(default_factory=lambda: Stopwatch(math.inf))

    def within(self, limit_s: float) -> Question:
        """The same question, to be answered in ``limit_s`` seconds from now on."""
        return replace(self, watch=Stopwatch(limit_s))

    @cached_property
    def instances(self) -> list[Instance]:
        """Every combination worth asking: more slots only need more, and so does memory that is page-locked."""
        return [
            instance
            for size, count in accumulations(self.profile, self.batch_size).items()
            for instance in self.instances_of(size, count)
        ]

    def instances_of(self, micro_batch: int, accumulation: int) -> list[Instance]:
        """Those of one micro-batch and accumulation that leave a choice."""
        memory = host_memories(self.profile, self.budget_bytes["host"])[-1]
        first = shallowest(Candidate(micro_batch, accumulation, host_memory=memory, segments=self.scope.segments))
        found = [
            self.make_instance(replace(first, offload_limit_bytes=limit), self.state_format, self.scope, self.pins)
            for limit in offload_limits(self.profile, micro_batch)
        ]
        return [instance for instance in found if instance.has_options]

    def budgets(self, instance: Instance) -> Budgets:
        """What buffers may fill, less a margin for what HiGHS tolerates."""
        limit_bytes = self.profile.pin_limit_bytes
        limited = limit_bytes is not None and instance.candidate.host_memory == "pinned"
        margin_gb = MARGIN_BYTES / GB
        return Budgets(
            instance.usable_gpu_gb(self.budget_bytes["gpu"]) - margin_gb,
            self.budget_bytes["host"] / GB - margin_gb,
            limit_bytes / GB - margin_gb if limited and limit_bytes is not None else math.inf,
            max(0.0, self.budget_bytes["nvme"] / GB - margin_gb),
        )

    def over_bytes(self, closest: Closest) -> dict[str, int]:
        """By how much the lowered plan exceeds each tier, and what can be page-locked; empty when it fits."""
        used = closest.used_bytes
        over = {str(tier): used[tier] - size for tier, size in self.budget_bytes.items()}
        if self.profile.pin_limit_bytes is not None:
            over["pinned"] = used["pinned"] - self.profile.pin_limit_bytes
        return {name: size for name, size in over.items() if size > 0}


@dataclass(frozen=True)
class Closest:
    """The choices that miss the budgets by the fewest GB."""

    instance: Instance
    choices: Choices
    missing_gb: float

    @cached_property
    def used_bytes(self) -> dict[str, int]:
        """Peak of each tier, and what is page-locked, in the lowered plan, which takes a while with many operations."""
        profile = self.instance.profile
        plan = make_plan(self.instance, self.choices, budget_bytes={})
        program = lower(plan, profile.stages)
        peaks = {str(tier): size for tier, size in peak_bytes(program, profile, plan.micro_batch).items()}
        return {**peaks, "pinned": pinned_bytes(program)}


@dataclass(frozen=True)
class Sought:
    """What came of looking for choices.

    Attributes:
        nearest: the choices that need least; None where none were found.
        proven: whether nothing that needs less than ``nearest``, or nothing at all, was left out for lack of time.
    """

    nearest: Closest | None
    proven: bool


Ranked: TypeAlias = tuple[float, Instance, Callable[[], Choices]]
"""A lower bound of what is missing in GB, the instance, and its choices nearest to that bound."""


def fitting(question: Question) -> Sought:
    """A plan that fits, or None; where HiGHS runs out of time, a plan that fits may be overlooked."""
    ranked = list(_ranked(question, TIERS, _ROWS_MISS_GB))
    quick = _found_quickly(question, ranked)
    if quick is not None or not ranked:
        return Sought(quick, proven=True)
    sought = _closest_of(ranked, question, TIERS, _ROWS_MISS_GB)
    if sought.nearest is None or not question.over_bytes(sought.nearest):
        return sought
    return Sought(None, sought.proven)


def _found_quickly(question: Question, ranked: Sequence[Ranked]) -> Closest | None:
    """What fits and the descents find by themselves; of several the one whose step has fewest operations."""
    for _, instance, rounded in sorted(ranked, key=lambda rank: rank[1].candidate.accumulation):
        near = nearest(instance, question.budgets(instance), TIERS, [_least_memory(instance), rounded()])
        if near is not None and near[1] <= _ROWS_MISS_GB:
            found = Closest(instance, *near)
            if not question.over_bytes(found):
                return found
    return None


def closest(question: Question, elastic: Sequence[Tier]) -> Sought:
    """The choices that need least more of the ``elastic`` tiers, which are all that may be exceeded.

    Of files, which are plenty, little more than the least is good enough.

    Returns:
        no choices where none keep the others.
    """
    return _closest_of(list(_ranked(question, elastic, math.inf)), question, elastic, math.inf)


def _closest_of(ranked: Sequence[Ranked], question: Question, elastic: Sequence[Tier], at_most_gb: float) -> Sought:
    """The same among the instances of ``ranked``; no choices where all need more than ``at_most_gb``."""
    best: Closest | None = None
    proven, watch = True, Stopwatch(_NUM_SOLVED * _TIME_LIMIT_S)
    for count, (bound_gb, instance, rounded) in enumerate(sorted(ranked, key=lambda rank: rank[0])):
        limit_gb = at_most_gb if best is None else best.missing_gb * (1 - _GAP)
        if best is not None and (bound_gb >= limit_gb or "nvme" in elastic):
            break
        if (count >= _NUM_SOLVED and not watch.has_time()) or (best is not None and not question.watch.has_time()):
            return Sought(best, proven=False)
        starts = [_least_memory(instance), rounded()]
        found = _solved(instance, question, elastic, limit_gb, bound_gb, starts)
        best, proven = found.nearest or best, proven and found.proven
    return Sought(best, proven)


def _ranked(question: Question, elastic: Sequence[Tier], at_most_gb: float) -> Iterator[Ranked]:
    """Instances that may need no more."""
    for instance in question.instances:
        bound_gb, rounded = least_missing(instance, question.budgets(instance), elastic)
        if bound_gb < math.inf and bound_gb <= at_most_gb:
            yield bound_gb, instance, rounded


def _solved(
    instance: Instance,
    question: Question,
    elastic: Sequence[Tier],
    limit_gb: float,
    bound_gb: float,
    starts: Sequence[Choices],
) -> Sought:
    """The closest choices of one candidate if they miss less than ``limit_gb``; HiGHS improves on the descent's."""
    budgets = question.budgets(instance)
    near = nearest(instance, budgets, elastic, starts)
    own = Closest(instance, *near) if near is not None and near[1] <= limit_gb else None
    if own is not None and own.missing_gb * (1 - _GAP) <= bound_gb:
        return Sought(own, proven=True)
    if not question.watch.has_time():
        return Sought(own, proven=False)
    problem = pulp.LpProblem("elastic", pulp.LpMinimize)
    decisions = Decisions(problem, instance)
    slack: dict[str, pulp.LpVariable] = {tier: problem.add_variable(f"slack_{tier}", 0) for tier in elastic}
    add_memory_rows(problem, instance, decisions, budgets, slack)
    _order_equal_blocks(problem, instance, decisions)
    problem += pulp.lpSum(slack.values())
    if limit_gb < math.inf:
        problem += pulp.lpSum(slack.values()) <= limit_gb
    values = decisions.start_values(own.choices if own is not None else starts[-1])
    most_s = _FILES_TIME_LIMIT_S if instance.uses_files else _TIME_LIMIT_S
    time_limit_s = min(most_s, question.watch.remaining_s)
    outcome = solve_problem(problem, gap=_GAP, time_limit_s=time_limit_s, seed=question.seed, start_values=values)
    proven = outcome.status in ("optimal", "infeasible")
    missing_gb = max(0.0, outcome.objective)
    if outcome.has_solution and (own is None or missing_gb < own.missing_gb):
        own = Closest(instance, decisions.choices(), missing_gb)
    return Sought(own, proven)


def _least_memory(instance: Instance) -> Choices:
    """What takes least of GPU and host together, each stage by itself: in files all that can be there."""
    ends = instance.vocabulary_options
    return Choices(
        states=tuple(_least_state(*pair) for pair in zip(instance.blocks, instance.states, strict=True)),
        saves=tuple(map(_least_option, instance.mean_saves)),  # in all blocks of a segment the same
        vocabulary=min(range(len(ends)), key=lambda k: ends[k].gpu_gb + ends[k].host_gb),
    )


def _least_state(costs: StageCosts, states: Sequence[StateChoice]) -> StateChoice:
    return min(states, key=lambda state: costs.on_gpu_gb(state) + costs.on_host_gb(state))


def _least_option(options: Sequence[SaveOption]) -> int:
    return min(range(len(options)), key=lambda o: (options[o].kept_gb + options[o].host_gb, options[o].nvme_gb))


def _order_equal_blocks(problem: pulp.LpProblem, instance: Instance, decisions: Decisions) -> None:
    """Of the many ways to give equal blocks the same choices leave one, or HiGHS would try them all.

    Memory does not ask which block has which state; what a block's window holds beside what is kept is best large while
    little is kept, in early blocks. What segments share cannot be moved block by block: there all ways are left.
    """
    if instance.has_segments:
        return
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, alike in enumerate(zip(instance.blocks, instance.saves, instance.states, strict=True)):
        groups[tuple(map(id, alike))].append(i)
    for members in groups.values():
        options = instance.saves[members[0]]
        largest_first = sorted(range(len(options)), key=lambda o: -options[o].working_gb)
        for early, late in pairwise(members):
            _order(
                problem, [decisions.x[early][o] for o in largest_first], [decisions.x[late][o] for o in largest_first]
            )
            _order(problem, list(decisions.y[early].values()), list(decisions.y[late].values()))


def _order(problem: pulp.LpProblem, early: list[pulp.LpVariable], late: list[pulp.LpVariable]) -> None:
    """``early`` takes no later one of its alternatives than ``late``."""
    for count in range(1, len(early)):
        problem += pulp.lpSum(late[:count]) <= pulp.lpSum(early[:count])
