"""Whether any plan fits the memory, and which choices miss it by least: an elastic program.

Only memory matters here, so the program has the memory rows alone, each budget with a slack that is minimised: one tier
at a time, or all together. The answer is then taken from the lowered plan itself, byte by byte.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import pulp

from lazysched.lower import lower
from lazysched.schemas import Profile, StateFormat, Tier
from lazysched.solver.batches import accumulations
from lazysched.solver.bounds import least_missing_gb
from lazysched.solver.decisions import Decisions
from lazysched.solver.explore import shallowest
from lazysched.solver.highs import solve_problem
from lazysched.solver.instance import GB, Candidate, Instance
from lazysched.solver.measured import host_memories, offload_limits
from lazysched.solver.memory_rows import Budgets, add_memory_rows
from lazysched.solver.options import SaveOption, Scope, StageCosts, StateChoice
from lazysched.solver.plans import Choices, make_plan
from lazysched.solver.simulate import peak_bytes, pinned_bytes

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
"""Instances whose elastic program is solved at most, by a lower bound of their shortfall."""


@dataclass(frozen=True)
class Question:
    """What decides whether some plan fits.

    Attributes:
        profile: measurements.
        batch_size: rows of a step.
        budget_bytes: of each tier.
        state_format: of the optimizer state.
        scope: where things may be.
        make_instance: the coefficients of a candidate with state in a format and things in a scope.
        seed: of HiGHS.
    """

    profile: Profile
    batch_size: int
    budget_bytes: Mapping[Tier, int]
    state_format: StateFormat
    scope: Scope
    make_instance: Callable[[Candidate, StateFormat, Scope], Instance]
    seed: int

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
            self.make_instance(replace(first, offload_limit_bytes=limit), self.state_format, self.scope)
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
        plan = make_plan(closest.instance, closest.choices, budget_bytes=self.budget_bytes)
        program = lower(plan, self.profile.stages)
        peaks = peak_bytes(program, self.profile, plan.micro_batch)
        over = {str(tier): peaks[tier] - self.budget_bytes[tier] for tier in peaks}
        if self.profile.pin_limit_bytes is not None:
            over["pinned"] = pinned_bytes(program) - self.profile.pin_limit_bytes
        return {name: size for name, size in over.items() if size > 0}


@dataclass(frozen=True)
class Closest:
    """The choices that miss the budgets by the fewest GB."""

    instance: Instance
    choices: Choices
    missing_gb: float


def fitting(question: Question) -> Closest | None:
    """A plan that fits, or None; where HiGHS runs out of time, a plan that fits may be overlooked."""
    nearest = closest(question, TIERS, at_most_gb=_ROWS_MISS_GB)
    return nearest if nearest is not None and not question.over_bytes(nearest) else None


def closest(
    question: Question, elastic: Sequence[Tier], at_most_gb: float = math.inf, start: Closest | None = None
) -> Closest | None:
    """The choices that need least more of the ``elastic`` tiers, which are all that may be exceeded.

    Of files, which are plenty, little more than the least is good enough.

    Returns:
        None where no choices keep the others, or where all need more than ``at_most_gb``.
    """
    ranked: list[tuple[float, int]] = []
    for index, instance in enumerate(question.instances):
        bound_gb = least_missing_gb(instance, question.budgets(instance), elastic)
        if bound_gb < math.inf and bound_gb <= at_most_gb:
            ranked.append((bound_gb, index))
    best: Closest | None = None
    for bound_gb, index in sorted(ranked)[:_NUM_SOLVED]:
        limit_gb = at_most_gb if best is None else best.missing_gb * (1 - _GAP)
        if best is not None and (bound_gb >= limit_gb or "nvme" in elastic):
            break
        instance = question.instances[index]
        here = start is not None and start.instance.candidate == instance.candidate
        choices = start.choices if start is not None and here else None
        best = _solved(instance, question, elastic, limit_gb, choices) or best
    return best


def _solved(
    instance: Instance, question: Question, elastic: Sequence[Tier], limit_gb: float, start: Choices | None
) -> Closest | None:
    """The closest choices of one candidate if they miss less than ``limit_gb``; with files, sought from ``start``."""
    problem = pulp.LpProblem("elastic", pulp.LpMinimize)
    decisions = Decisions(problem, instance)
    slack: dict[str, pulp.LpVariable] = {tier: problem.add_variable(f"slack_{tier}", 0) for tier in elastic}
    add_memory_rows(problem, instance, decisions, question.budgets(instance), slack)
    _order_equal_blocks(problem, instance, decisions)
    problem += pulp.lpSum(slack.values())
    if limit_gb < math.inf:
        problem += pulp.lpSum(slack.values()) <= limit_gb
    values = decisions.start_values(start or _least_memory(instance)) if "nvme" in elastic else None
    time_limit_s = _FILES_TIME_LIMIT_S if instance.uses_files else _TIME_LIMIT_S
    outcome = solve_problem(problem, gap=_GAP, time_limit_s=time_limit_s, seed=question.seed, start_values=values)
    if not outcome.has_solution:
        return None
    return Closest(instance, decisions.choices(), max(0.0, outcome.objective))


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
