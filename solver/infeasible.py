"""Why no plan fits: the fewest bytes by which budgets would have to grow, found by an elastic program.

Only memory matters here, so the program has the memory rows alone, each budget with a slack that is minimised: one tier
at a time, and all together. The answer is then taken from the plan itself, byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pulp

from lazysched.errors import InfeasibleError
from lazysched.schemas import HostMemory, Tier
from lazysched.solver.decisions import Decisions
from lazysched.solver.highs import solve_problem
from lazysched.solver.instance import GB, Candidate, Instance
from lazysched.solver.memory_rows import Budgets, add_memory_rows
from lazysched.solver.plans import Choices
from lazysched.units import format_bytes

TIERS: tuple[Literal["gpu", "host"], ...] = ("gpu", "host")
_FLAGS = {"gpu": "--gpu-memory", "host": "--host-memory"}
_TIME_LIMIT_S = 2.0
_GAP = 5e-3
MARGIN_BYTES = 2000
"""Twice what HiGHS tolerates in a memory row (1e-6 GB): a plan that it calls fitting within the margin really fits."""
_NUM_SOLVED = 2
"""Instances whose elastic program is solved, by relaxed shortfall: the answer suffices, and is least within the gap."""
_NUM_MICRO_BATCHES = 2
"""Smallest micro-batches that are asked: larger ones have larger working sets. The whole batch at once is asked too:
without accumulation no block needs an fp32 accumulator."""


@dataclass(frozen=True)
class Closest:
    """The choices that miss the budgets by the fewest GB."""

    instance: Instance
    choices: Choices
    missing_gb: float


def closest(
    instances: Sequence[Instance], budgets: Callable[[Instance], Budgets], elastic: Sequence[Tier], seed: int
) -> Closest | None:
    """Over all ``instances``, the choices that need least more of the ``elastic`` tiers while the others hold."""
    ranked: list[tuple[float, int]] = []
    for index, instance in enumerate(instances):
        problem, _ = _elastic_program(instance, budgets(instance), elastic)
        relaxed = solve_problem(problem, gap=0.0, time_limit_s=_TIME_LIMIT_S, seed=seed, relaxed=True)
        if relaxed.status == "optimal":
            ranked.append((relaxed.objective, index))
    best: Closest | None = None
    for bound_gb, index in sorted(ranked)[:_NUM_SOLVED]:
        if best is not None and bound_gb >= best.missing_gb * (1 - _GAP):
            break
        problem, decisions = _elastic_program(instances[index], budgets(instances[index]), elastic)
        outcome = solve_problem(problem, gap=_GAP, time_limit_s=_TIME_LIMIT_S, seed=seed)
        if outcome.has_solution and (best is None or outcome.objective < best.missing_gb):
            best = Closest(instances[index], decisions.choices(), outcome.objective)
    return best


def _elastic_program(instance: Instance, budgets: Budgets, elastic: Sequence[Tier]) -> tuple[pulp.LpProblem, Decisions]:
    problem = pulp.LpProblem("elastic", pulp.LpMinimize)
    decisions = Decisions(problem, instance)
    margin_gb = MARGIN_BYTES / GB
    budgets = Budgets(budgets.gpu_gb - margin_gb, budgets.host_gb - margin_gb, budgets.moved_gb - margin_gb)
    slack: dict[str, pulp.LpVariable] = {tier: problem.add_variable(f"slack_{tier}", 0) for tier in elastic}
    add_memory_rows(problem, instance, decisions, budgets, slack)
    problem += pulp.lpSum(slack.values())
    return problem, decisions


def memory_candidates(
    micro_batches: Mapping[int, int], limits: Mapping[int, Sequence[int]], host_memory: HostMemory
) -> list[Candidate]:
    """Candidates worth asking; a deeper prefetch only needs more.

    Args:
        micro_batches: micro-batch -> accumulation.
        limits: micro-batch -> sizes that may be sent to the host.
        host_memory: ``pageable`` where page-locking is limited: what does not fit then never will.
    """
    ascending = sorted(micro_batches.items())
    asked = ascending[:_NUM_MICRO_BATCHES]
    asked += [pair for pair in ascending[_NUM_MICRO_BATCHES:] if pair[1] == 1]
    return [
        Candidate(micro_batch, accumulation, offload_limit_bytes=limit, host_memory=host_memory)
        for micro_batch, accumulation in asked
        for limit in limits[micro_batch]
    ]


def explain(
    missing: Mapping[tuple[Tier, ...], Mapping[Tier, int]], budget_bytes: Mapping[Tier, int]
) -> InfeasibleError:
    """The error to raise.

    Args:
        missing: tiers that were allowed to grow -> tier -> bytes by which the closest plan then exceeds its budget;
            absent when growing those tiers cannot help.
        budget_bytes: the budgets.
    """
    alone: dict[Tier, int] = {tier: missing[(tier,)][tier] for tier in TIERS if (tier,) in missing}
    if alone:
        wanted = " or ".join(_needs(tier, size, budget_bytes) for tier, size in alone.items())
        helpless = [tier for tier in TIERS if tier not in alone]
        note = f" (more {helpless[0]} memory alone cannot help)" if helpless else ""
        flags = " or ".join(_FLAGS[tier] for tier in alone)
    else:
        both = missing[TIERS]
        wanted = " and ".join(_needs(tier, size, budget_bytes) for tier, size in both.items() if size > 0)
        note, flags = " (neither alone can help)", " and ".join(_FLAGS[tier] for tier in TIERS)
    message = f"no plan fits: {wanted}{note}; raise {flags}, or profile a smaller --micro-batch or --seq-len"
    return InfeasibleError(message, {str(tier): size for tier, size in alone.items()})


def _needs(tier: Tier, size: int, budget_bytes: Mapping[Tier, int]) -> str:
    return f"{tier} needs {format_bytes(size)} more than {format_bytes(budget_bytes[tier])}"
