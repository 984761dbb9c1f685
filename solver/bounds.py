"""A quick lower bound for a candidate: how many blocks take which option, without order and without windows.

A relaxation of the placement program with about twenty variables, so that most candidates of the outer search need
never be built. Legend: n[g][o] and s[g][c] count the blocks of group g (equal costs) by save option and state choice;
v[k] is the share of vocabulary option k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pulp

from lazysched.schemas import Tier
from lazysched.solver.decisions import Expression
from lazysched.solver.highs import solve_problem
from lazysched.solver.instance import Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.options import ON_HOST, STREAMED, SaveOption, StageCosts, StateChoice, VocabularyOption
from lazysched.solver.plans import Choices


def count_bound_s(instance: Instance, budgets: Budgets, max_prefetch_depth: int) -> float:
    """No plan of this candidate has a shorter step; infinite if not even the memory at the turn can fit.

    It also holds for the same candidate with a prefetch depth up to ``max_prefetch_depth``, which needs more memory.
    """
    problem = pulp.LpProblem("counts", pulp.LpMinimize)
    counts = _Counts(problem, instance)
    period = problem.add_variable("T", 0)
    problem += period + 0
    _add_times(problem, instance, counts, period, max_prefetch_depth + 1)
    _add_memory(problem, instance, counts, budgets)
    return solve_problem(problem, gap=0.0, time_limit_s=5.0, seed=0, relaxed=True).bound


def least_missing_gb(instance: Instance, budgets: Budgets, elastic: Sequence[Tier]) -> float:
    """No plan of this candidate needs fewer GB of the ``elastic`` tiers beyond ``budgets``; infinite if none does."""
    return least_missing(instance, budgets, elastic)[0]


def least_missing(instance: Instance, budgets: Budgets, elastic: Sequence[Tier]) -> tuple[float, Callable[[], Choices]]:
    """The bound of ``least_missing_gb``, and what yields its counts rounded to choices, where it is finite."""
    problem = pulp.LpProblem("missing", pulp.LpMinimize)
    slack: dict[str, pulp.LpVariable] = {tier: problem.add_variable(f"slack_{tier}", 0) for tier in elastic}
    problem += pulp.lpSum(slack.values())
    grown = Budgets(
        budgets.gpu_gb + slack.get("gpu", 0), budgets.host_gb + slack.get("host", 0), budgets.moved_gb,
        budgets.nvme_gb + slack.get("nvme", 0),
    )  # fmt: skip
    counts = _Counts(problem, instance)
    _add_memory(problem, instance, counts, grown)
    return solve_problem(problem, gap=0.0, time_limit_s=5.0, seed=0, relaxed=True).bound, counts.rounded


@dataclass(frozen=True)
class _Group:
    members: list[int]
    costs: StageCosts
    options: tuple[SaveOption, ...]
    saves: list[pulp.LpVariable]
    states: dict[StateChoice, pulp.LpVariable]


class _Counts:
    """Count variables and sums over them."""

    def __init__(self, problem: pulp.LpProblem, instance: Instance) -> None:
        self.instance = instance
        blocks = list(zip(instance.blocks, instance.mean_saves, instance.states, strict=True))
        keys = [(id(costs), id(options), choices) for costs, options, choices in blocks]
        self.groups = []
        for g, (key, (costs, options, choices)) in enumerate(dict(zip(keys, blocks, strict=True)).items()):
            saves = [problem.add_variable(f"n_{g}_{o}", 0) for o in range(len(options))]
            states: dict[StateChoice, pulp.LpVariable] = {
                choice: problem.add_variable(f"s_{g}_{choice}", 0) for choice in choices
            }
            problem += pulp.lpSum(saves) == keys.count(key)
            problem += pulp.lpSum(states.values()) == keys.count(key)
            members = [i for i, other in enumerate(keys) if other == key]
            self.groups.append(_Group(members, costs, options, saves, states))
        self.v = [problem.add_variable(f"v_{k}", 0) for k in range(len(instance.vocabulary_options))]
        problem += pulp.lpSum(self.v) == 1

    def rounded(self) -> Choices:
        """Choices with about the counts of the solution just found; early blocks take what works with most memory."""
        saves = [0] * self.instance.num_blocks
        chosen: dict[int, StateChoice] = {}
        for g in self.groups:
            order = sorted(range(len(g.options)), key=lambda o: -g.options[o].working_gb)
            for i, o in zip(g.members, _shared_out([(o, g.saves[o]) for o in order]), strict=True):
                saves[i] = o
            chosen |= zip(g.members, _shared_out(list(g.states.items())), strict=True)
        ends = max(range(len(self.v)), key=lambda k: self.v[k].value() or 0.0)
        return Choices(tuple(chosen[i] for i in range(len(saves))), tuple(saves), ends)

    def save(self, coefficient: Callable[[SaveOption], float]) -> Expression:
        """Sum over all blocks' save options."""
        return pulp.lpSum(coefficient(o) * n for g in self.groups for o, n in zip(g.options, g.saves, strict=True))

    def state(self, coefficient: Callable[[StageCosts], float], *choices: StateChoice) -> Expression:
        """Sum of ``coefficient`` over the blocks whose state choice is one of ``choices``."""
        return pulp.lpSum(
            coefficient(g.costs) * var for g in self.groups for choice, var in g.states.items() if choice in choices
        )

    def by_state(self, coefficient: Callable[[StageCosts, StateChoice], float]) -> Expression:
        """Sum of ``coefficient`` over all blocks' costs and state choices."""
        return pulp.lpSum(coefficient(g.costs, choice) * var for g in self.groups for choice, var in g.states.items())

    def vocabulary(self, coefficient: Callable[[VocabularyOption], float]) -> Expression:
        """Sum over the joint options of embedding and head."""
        return pulp.lpSum(coefficient(o) * v for v, o in zip(self.v, self.instance.vocabulary_options, strict=True))

    def ends(self, coefficient: Callable[[StageCosts], float], *, gpu: bool) -> Expression:
        """Sum of ``coefficient`` over embedding and head where the GPU (or else the host) updates them."""
        instance = self.instance
        return pulp.lpSum(
            v * sum(
                coefficient(costs)
                for choice, costs in ((option.embed, instance.embed), (option.head, instance.head))
                if (choice == "gpu") == gpu
            )
            for v, option in zip(self.v, instance.vocabulary_options, strict=True)
        )  # fmt: skip


_Item = TypeVar("_Item")


def _shared_out(counts: Sequence[tuple[_Item, pulp.LpVariable]]) -> list[_Item]:
    """Each item as often as its variable says: at the end of every item as many as its running sum, rounded."""
    items: list[_Item] = []
    total = 0.0
    for item, variable in counts:
        total += variable.value() or 0.0
        items += [item] * (round(total) - len(items))
    return items


def _add_times(
    problem: pulp.LpProblem, instance: Instance, counts: _Counts, period: pulp.LpVariable, slots: int
) -> None:
    """Every engine must fit its work into T; updates that wait for the norm come between a backward and the next head.

    Updates that do not wait for it may run beside anything.
    """
    m = instance.candidate.accumulation
    ends_s = instance.head_s + instance.embed_backward_s
    backward = counts.save(lambda o: m * o.backward_s) + sum(block.norm_s for block in instance.blocks) + ends_s
    forward = m * instance.embed_forward_s + counts.save(lambda o: m * o.forward_s)
    gpu_updates = counts.state(lambda c: c.gpu_update_s, "gpu") + counts.ends(lambda c: c.gpu_update_s, gpu=True)
    problem += period >= forward + backward + gpu_updates
    updates = counts.state(lambda c: c.cpu_update_s, *ON_HOST) + counts.ends(lambda c: c.cpu_update_s, gpu=False)
    problem += period >= (backward + updates if instance.update.waits_for_norm else updates)
    loads = counts.state(lambda c: c.load_s, *ON_HOST) + counts.ends(lambda c: c.load_s, gpu=False)
    again = counts.state(lambda c: c.reload_s, *STREAMED) - slots * max(c.load_s for c in instance.blocks)
    fetches = counts.save(lambda o: m * o.fetch_s)
    problem += period >= loads + fetches
    problem += period >= loads + again + fetches
    grads = counts.state(lambda c: c.grads_s, *ON_HOST) + counts.ends(lambda c: c.grads_s, gpu=False)
    problem += period >= counts.save(lambda o: m * o.save_s) + grads
    if instance.uses_files:
        _add_file_times(problem, instance, counts, period, slots)


def _add_file_times(
    problem: pulp.LpProblem, instance: Instance, counts: _Counts, period: pulp.LpVariable, slots: int
) -> None:
    """All reads, and all writes, must fit into T."""
    m, costs = instance.candidate.accumulation, [instance.embed, instance.head]
    held_s = slots * max(c.read_weights_s for c in instance.blocks)
    weights = counts.state(lambda c: (1 + (c.reload_s > 0)) * c.read_weights_s, "nvme") - held_s
    ends = counts.vocabulary(
        lambda o: sum(c.read_update_s(s) for c, s in zip(costs, (o.embed, o.head), strict=True))
    )  # fmt: skip
    reads = counts.by_state(lambda c, s: c.read_update_s(s)) + counts.save(lambda o: m * o.read_s) + ends
    problem += period >= reads
    problem += period >= reads + weights
    ends = counts.vocabulary(
        lambda o: sum(c.write_update_s(s) for c, s in zip(costs, (o.embed, o.head), strict=True))
    )  # fmt: skip
    writes = counts.by_state(lambda c, s: c.write_update_s(s)) + counts.save(lambda o: m * o.write_s) + ends
    problem += period >= writes


def _add_memory(problem: pulp.LpProblem, instance: Instance, counts: _Counts, budgets: Budgets) -> None:
    """Memory when forward has ended, and the host."""
    candidate = instance.candidate
    m, num_blocks = candidate.accumulation, instance.num_blocks
    streamed = counts.state(lambda c: c.weight_gb, *STREAMED)
    host_grads = counts.state(lambda c: c.grads_gb, *ON_HOST)
    slots = ((candidate.prefetch_depth + 1) * streamed + (candidate.d2h_lag + 1) * host_grads) * (1 / num_blocks)
    own = counts.by_state(lambda c, s: c.on_gpu_gb(s))
    moving_gb = (candidate.prefetch_depth + candidate.d2h_lag + 2) * instance.moving_slot_gb
    vocabulary = pulp.lpSum(
        (option.gpu_gb + option.grads_slot_gb) * v
        for v, option in zip(counts.v, instance.vocabulary_options, strict=True)
    )
    working_gb = max(
        min(option.working_gb for option in instance.saves[-1]),  # of a segment, what it remakes is not counted
        instance.head_variant.working_backward_bytes / 1e9,
    )
    kept = counts.save(lambda o: m * o.kept_gb)
    constant_gb = instance.gpu_constant_gb + moving_gb + instance.in_flight_gb + working_gb
    problem += constant_gb + slots + own + vocabulary + kept <= budgets.gpu_gb
    offloaded = counts.save(lambda o: m * o.host_gb)
    host = counts.by_state(lambda c, s: c.on_host_gb(s)) + counts.vocabulary(lambda o: o.host_gb)
    problem += instance.host_constant_gb + host + offloaded <= budgets.host_gb
    if math.isfinite(budgets.moved_gb):
        moved = counts.by_state(lambda c, s: c.moved_gb(s)) + counts.vocabulary(lambda o: o.moved_gb)
        problem += instance.host_constant_gb + moved + offloaded <= budgets.moved_gb
    if instance.uses_files:
        files = counts.by_state(lambda c, s: c.in_files_gb(s)) + counts.vocabulary(lambda o: o.nvme_gb)
        problem += files + counts.save(lambda o: m * o.nvme_gb) <= budgets.nvme_gb
