"""Memory rows: one per window of the GPU, one each for the host, what of it is page-locked, and files. All in GB.

Legend:
    base      what exists in every window: constants, slots, resident stages, tables of page-locked memory
    K[i]      tensors kept on the GPU for the backward by blocks 0..i, all micro-batches; inputs have slots
    I[i]      inputs kept there by blocks 0..i, one micro-batch (where there are segments)
    slots     sizes of the shared slots: the largest stage that uses them decides; hidden states have one size, and as
              many slots as wait at once: the inputs kept up to a segment, and its inner ones while it runs again
    slack     budget that is missing, per tier (only when explaining infeasibility)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pulp

from lazysched.solver.decisions import Decisions, Expression
from lazysched.solver.instance import Instance
from lazysched.solver.options import ON_HOST, STREAMED, SaveOption, StageCosts, StateChoice, VocabularyOption
from lazysched.staging import STATE_SLOTS


@dataclass(frozen=True)
class Budgets:
    """What buffers may fill, in GB; for the GPU without context and fragmentation."""

    gpu_gb: float
    host_gb: float
    moved_gb: float = math.inf
    """Of the host's, most that copies read and write there: what can be page-locked, if it has to be."""
    nvme_gb: float = 0.0
    """Of files."""


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
    staging, records = _file_slots(problem, instance, decisions) if instance.uses_files else (0.0, 0.0)
    moved = _kept(instance, decisions, lambda c, s: c.moved_gb(s), lambda o: o.host_gb, lambda v: v.moved_gb)
    pinned = instance.host_constant_gb + staging + moved
    own = instance.gpu_constant_gb + _resident(instance, decisions) + instance.mapping_gb_per_gb * pinned
    problem += base == own + _slots(problem, instance, decisions)
    _add_window_rows(problem, instance, decisions, base, gpu_limit)
    host = _kept(instance, decisions, lambda c, s: c.on_host_gb(s), lambda o: o.host_gb, lambda v: v.host_gb)
    host_limit = budgets.host_gb + slack.get("host", 0)
    problem += instance.host_constant_gb + staging + records + host <= host_limit
    if math.isfinite(budgets.moved_gb):
        problem += pinned <= budgets.moved_gb
    if instance.uses_files:
        files = _kept(instance, decisions, lambda c, s: c.in_files_gb(s), lambda o: o.nvme_gb, lambda v: v.nvme_gb)
        problem += files <= budgets.nvme_gb + slack.get("nvme", 0)


def _resident(instance: Instance, decisions: Decisions) -> Expression:
    """Buffers of stages of their own: weights that stay; gradient and state where the GPU updates."""
    own = [decisions.by_state(i, lambda c, s: c.on_gpu_gb(s)) for i in range(instance.num_blocks)]
    return pulp.lpSum([*own, decisions.vocabulary(lambda option: option.gpu_gb)])


def _file_slots(problem: pulp.LpProblem, instance: Instance, decisions: Decisions) -> tuple[Expression, Expression]:
    """Slots on the host through which files are read and written, and those in which state from files is updated."""
    depth, lag = instance.candidate.prefetch_depth, instance.candidate.d2h_lag
    weights, saved, record = (problem.add_variable(f"files_{kind}_gb", 0) for kind in ("weights", "saved", "record"))
    for i in range(instance.num_blocks):
        problem += weights >= decisions.state(i, lambda c: c.weight_gb, "nvme")
        problem += saved >= decisions.save(i, lambda o: o.nvme_gb)
        problem += record >= decisions.by_state(i, lambda c, s: c.record_gb(s))
    problem += record >= decisions.vocabulary(lambda option: option.record_gb)
    return (depth + 2) * weights + (depth + lag + 4) * saved, STATE_SLOTS * record


def _slots(problem: pulp.LpProblem, instance: Instance, decisions: Decisions) -> Expression:
    """Slots for streamed weights, leaving gradients, leaving and returning saved tensors, and hidden states."""
    depth, lag = instance.candidate.prefetch_depth, instance.candidate.d2h_lag
    weights, grads = (problem.add_variable(f"slot_{kind}_gb", 0) for kind in ("weights", "grads"))
    for i in range(instance.num_blocks):
        problem += weights >= decisions.state(i, lambda c: c.weight_gb, *STREAMED)
        problem += grads >= decisions.state(i, lambda c: c.grads_gb, *ON_HOST)
    vocabulary_grads = decisions.vocabulary(lambda option: option.grads_slot_gb)
    moving_gb = (depth + lag + 2) * instance.moving_slot_gb + _segment_slots(problem, instance, decisions)
    hidden = instance.in_flight_gb + instance.candidate.accumulation * _inputs(problem, instance, decisions)
    return (depth + 1) * weights + (lag + 1) * grads + moving_gb + vocabulary_grads + hidden


def _inputs(problem: pulp.LpProblem, instance: Instance, decisions: Decisions) -> Expression:
    """Most inputs of one micro-batch that wait on the GPU at once."""
    kept: Expression = pulp.LpAffineExpression()
    if not instance.has_segments:
        return pulp.lpSum(decisions.save(i, lambda o: o.kept_input_gb) for i in range(instance.num_blocks))
    most = problem.add_variable("inputs_gb", 0)
    for i in range(instance.num_blocks):
        before, kept = kept, problem.add_variable(f"I_{i}", 0)
        problem += kept == before + decisions.save(i, lambda o: o.kept_input_gb)
        problem += most >= kept + decisions.save(i, lambda o: o.inner_inputs_gb)
    return most


def _segment_slots(problem: pulp.LpProblem, instance: Instance, decisions: Decisions) -> Expression:
    """Slots for inputs of segments on their way back."""
    if not instance.has_segments:
        return pulp.LpAffineExpression()
    slot = problem.add_variable("segment_slot_gb", 0)
    for i in range(instance.num_blocks):
        problem += slot >= decisions.save(i, lambda o: o.segment_slot_gb)
    return (instance.candidate.accumulation + instance.candidate.prefetch_depth) * slot


def _add_window_rows(
    problem: pulp.LpProblem, instance: Instance, decisions: Decisions, base: pulp.LpVariable, limit: Expression
) -> None:
    accumulation = instance.candidate.accumulation
    kept: Expression = pulp.LpAffineExpression()
    for i in range(instance.num_blocks):
        before, kept = kept, problem.add_variable(f"K_{i}", 0)
        problem += kept == before + accumulation * decisions.save(i, lambda o: o.kept_gb - o.kept_input_gb)
        # Forward ends and backward begins with the same tensors alive, so one row with the larger working set does.
        remade = accumulation * decisions.save(i, lambda o: o.remade_gb)
        problem += base + kept + remade + decisions.save(i, lambda o: o.working_gb) <= limit
        updating = decisions.state(i, lambda c: c.gpu_update_working_gb, "gpu")
        if not instance.update.waits_for_norm:  # it follows the backward, beside what the blocks before still keep
            updating = updating + before + accumulation * decisions.save(i, lambda o: o.still_remade_gb)
        problem += base + updating <= limit
    problem += base + kept + instance.head_variant.working_backward_bytes / 1e9 <= limit
    embed = instance.embed_variant
    problem += base + max(embed.working_forward_bytes, embed.working_backward_bytes) / 1e9 <= limit
    for embed_too in (True, False):
        working = decisions.ends_on(lambda c: c.gpu_update_working_gb, gpu=True, embed=embed_too, head=not embed_too)
        beside_all = not embed_too and not instance.update.waits_for_norm
        problem += base + (kept if beside_all else 0) + working <= limit


def _kept(
    instance: Instance,
    decisions: Decisions,
    of_stage: Callable[[StageCosts, StateChoice], float],
    of_option: Callable[[SaveOption], float],
    of_vocabulary: Callable[[VocabularyOption], float],
) -> Expression:
    """What is in a tier for the whole step: of each stage what ``of_stage`` counts, and saved tensors."""
    blocks = range(instance.num_blocks)
    stores = [decisions.by_state(i, of_stage) for i in blocks]
    saved = [instance.candidate.accumulation * decisions.save(i, of_option) for i in blocks]
    return pulp.lpSum([*stores, *saved, decisions.vocabulary(of_vocabulary)])
