"""Memory rows: one per window of the GPU, one for the host and one for what of it is page-locked. All in GB.

Legend:
    base      what exists in every window: constants, slots, resident stages, tables of page-locked memory
    K[i]      tensors kept on the GPU for the backward by blocks 0..i, all micro-batches; inputs have slots
    slots     sizes of the shared slots: the largest stage that uses them decides; hidden states have one size
    slack     budget that is missing, per tier (only when explaining infeasibility)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pulp

from lazysched.solver.decisions import Decisions, Expression
from lazysched.solver.instance import Instance, StageCosts, VocabularyOption


@dataclass(frozen=True)
class Budgets:
    """What buffers may fill, in GB; for the GPU without context and fragmentation."""

    gpu_gb: float
    host_gb: float
    moved_gb: float = math.inf
    """Of the host's, most that copies read and write there: what can be page-locked, if it has to be."""


def add_memory_rows(
    problem: pulp.LpProblem,
    instance: Instance,
    decisions: Decisions,
    budgets: Budgets,
    slack: Mapping[str, pulp.LpVariable] | None = None,
) -> None:
    """Keep every window of the step within ``budgets`` plus ``slack``."""
    slack = slack or {}
    gpu_limit = budgets.gpu_gb + slack.get("gpu", 0)
    base = problem.add_variable("base_gb", 0)
    moved = _host(instance, decisions, lambda c: c.moved_gb, lambda o: o.moved_gb)
    own = instance.gpu_constant_gb + _resident(instance, decisions) + instance.mapping_gb_per_gb * moved
    problem += base == own + _slots(problem, instance, decisions)
    _add_window_rows(problem, instance, decisions, base, gpu_limit)
    problem += _host(instance, decisions, lambda c: c.stored_gb, lambda o: o.host_gb) <= (
        budgets.host_gb + slack.get("host", 0)
    )
    if math.isfinite(budgets.moved_gb):
        problem += moved <= budgets.moved_gb


def _resident(instance: Instance, decisions: Decisions) -> Expression:
    """Buffers of stages of their own: weights that stay; gradient and state where the GPU updates."""
    own = [decisions.state(i, lambda c: c.weight_gb, "resident") for i in range(instance.num_blocks)]
    updated = [decisions.state(i, lambda c: c.stored_gb, "gpu") for i in range(instance.num_blocks)]
    return pulp.lpSum([*own, *updated, decisions.vocabulary(lambda option: option.gpu_gb)])


def _slots(problem: pulp.LpProblem, instance: Instance, decisions: Decisions) -> Expression:
    """Slots for streamed weights, leaving gradients, leaving and returning saved tensors, and hidden states."""
    depth, lag = instance.candidate.prefetch_depth, instance.candidate.d2h_lag
    weights, grads = (problem.add_variable(f"slot_{kind}_gb", 0) for kind in ("weights", "grads"))
    for i in range(instance.num_blocks):
        problem += weights >= decisions.state(i, lambda c: c.weight_gb, "streamed")
        problem += grads >= decisions.state(i, lambda c: c.weight_gb, "resident", "streamed")
    vocabulary_grads = decisions.vocabulary(lambda option: option.grads_slot_gb)
    moving_gb = (depth + lag + 2) * instance.moving_slot_gb
    inputs = pulp.lpSum(decisions.save(i, lambda o: o.kept_input_gb) for i in range(instance.num_blocks))
    hidden = instance.in_flight_gb + instance.candidate.accumulation * inputs
    return (depth + 1) * weights + (lag + 1) * grads + moving_gb + vocabulary_grads + hidden


def _add_window_rows(
    problem: pulp.LpProblem, instance: Instance, decisions: Decisions, base: pulp.LpVariable, limit: Expression
) -> None:
    accumulation = instance.candidate.accumulation
    kept: Expression = pulp.LpAffineExpression()
    for i in range(instance.num_blocks):
        before, kept = kept, problem.add_variable(f"K_{i}", 0)
        problem += kept == before + accumulation * decisions.save(i, lambda o: o.kept_gb - o.kept_input_gb)
        # Forward ends and backward begins with the same tensors alive, so one row with the larger working set does.
        problem += base + kept + decisions.save(i, lambda o: o.working_gb) <= limit
        problem += base + decisions.state(i, lambda c: c.gpu_update_working_gb, "gpu") <= limit
    problem += base + kept + instance.head_variant.working_backward_bytes / 1e9 <= limit
    embed = instance.embed_variant
    problem += base + max(embed.working_forward_bytes, embed.working_backward_bytes) / 1e9 <= limit
    for embed_too in (True, False):
        working = decisions.ends_on(lambda c: c.gpu_update_working_gb, gpu=True, embed=embed_too, head=not embed_too)
        problem += base + working <= limit


def _host(
    instance: Instance,
    decisions: Decisions,
    store: Callable[[StageCosts], float],
    vocabulary_store: Callable[[VocabularyOption], float],
) -> Expression:
    """What is on the host for the whole step: saved tensors, and of each stage there what ``store`` counts."""
    stores = [decisions.state(i, store, "resident", "streamed") for i in range(instance.num_blocks)]
    saved = [
        instance.candidate.accumulation * decisions.save(i, lambda o: o.offloaded_gb)
        for i in range(instance.num_blocks)
    ]
    vocabulary = decisions.vocabulary(vocabulary_store)
    return instance.host_constant_gb + pulp.lpSum([*stores, *saved, vocabulary])
