"""Coefficients of one candidate: what every decision costs in seconds and GB at one micro-batch and accumulation.

Nothing is decided here. All times are seconds per micro-batch or per step as named; all sizes are GB = 1e9 bytes,
because raw bytes beside milliseconds would span more orders of magnitude than a mixed-integer solver tolerates.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from lazysched.layout import (
    MASTER_BYTES,
    SCALE_ELEMENTS,
    TOTAL_ELEMENTS,
    batch_bytes,
    gpu_update_working_bytes,
    link_name,
    mapping_bytes,
)
from lazysched.optimizer_state import FP32_STATE_ELEMENTS, state_bytes
from lazysched.schemas import (
    BYTES_PER_ELEMENT,
    HostMemory,
    Profile,
    SaveVariant,
    Stage,
    StateFormat,
    Update,
)
from lazysched.solver.measured import curve_of, measured_variants, update_rate
from lazysched.solver.options import (
    EXECUTABLE,
    GB,
    IN_FILES,
    PLACES,
    SaveOption,
    Scope,
    StageCosts,
    StateChoice,
    VocabularyOption,
    stage_plan,
)
from lazysched.solver.pins import Pin, of_stage
from lazysched.solver.saving import Saving
from lazysched.solver.vocabulary import vocabulary_option, vocabulary_pairs
from lazysched.timeline import BUSY_SHARE
from lazysched.trainable import first_trained, trained_part


@dataclass(frozen=True)
class Candidate:
    """One point of the outer search."""

    micro_batch: int
    accumulation: int
    prefetch_depth: int = 1
    d2h_lag: int = 1
    offload_limit_bytes: int = 0
    """Most that a block may send to the host per micro-batch; the slots for it have this size. It is searched outside
    because as a decision it would make every slot fractional in the relaxation, and the bound worthless."""
    host_memory: HostMemory = "pinned"
    segments: tuple[int, ...] = (1,)
    """Lengths of segments that are among the options."""


class Instance:
    """All coefficients of ``candidate`` on the machine and model of ``profile``.

    Args:
        profile: measurements.
        candidate: the point of the outer search.
        state_format: of the optimizer state of all stages.
        update: how a step ends.
        pins: decisions fixed by hand.
        scope: where things may be.

    Raises:
        UsageError: the profile lacks a figure that the candidate needs.
    """

    def __init__(
        self,
        profile: Profile,
        candidate: Candidate,
        state_format: StateFormat,
        update: Update,
        pins: tuple[Pin, ...] = (),
        scope: Scope = EXECUTABLE,
    ) -> None:
        self.profile, self.candidate, self.pins, self.scope = profile, candidate, pins, scope
        self.state_format: StateFormat = state_format
        self.update = update
        self.element_bytes = BYTES_PER_ELEMENT[profile.compute_dtype]
        self.embed_stage, self.head_stage = profile.stages[0], profile.stages[-1]
        self.block_stages = profile.stages[1:-1]
        self.tied = self.head_stage.shares is not None
        self._forward_only = {stage.id for stage in profile.stages[: first_trained(profile.stages)]}
        self.num_forward_only = sum(not self.has_backward(stage) for stage in self.block_stages)
        """The first so many blocks have no backward: nothing is trained in them or before them."""
        self.embed, self.head = self._costs(self.embed_stage), self._costs(self.head_stage)
        by_shape: dict[tuple[str, int, int], StageCosts] = {}
        self.blocks: list[StageCosts] = []
        for stage in self.block_stages:
            shape = (stage.structure, stage.weight_bytes, stage.num_trained)
            if shape not in by_shape:
                by_shape[shape] = self._costs(stage)
            self.blocks.append(by_shape[shape])
        states_of: dict[object, tuple[StateChoice, ...]] = {}
        self.states: list[tuple[StateChoice, ...]] = []
        for stage in self.block_stages:
            own = of_stage(pins, stage)
            states_key = frozenset((pin.field, pin.value) for pin in own)
            if states_key not in states_of:
                states_of[states_key] = _allowed(self._state_choices, own)
            self.states.append(states_of[states_key])
        saving = Saving(self)
        self.saves: list[tuple[SaveOption, ...]] = saving.options
        self.layouts: list[int] = saving.layouts
        """Per block, a number that blocks share whose options mean the same, so that they may be exchanged."""
        self.mean_saves: list[tuple[SaveOption, ...]] = saving.means
        """Per block, its options, of segments with each block's mean share; one tuple for each layout."""
        self.embed_variant, self.head_variant = self._only(self.embed_stage), self._only(self.head_stage)

    def at(self, candidate: Candidate) -> Instance:
        """The same with other slots: ``candidate`` may differ in prefetch depth and D2H lag alone."""
        assert replace(candidate, prefetch_depth=1, d2h_lag=1) == replace(self.candidate, prefetch_depth=1, d2h_lag=1)
        other = copy(self)
        other.candidate = candidate
        return other

    # ---- sizes that no decision changes

    @property
    def num_blocks(self) -> int:
        """Number of decoder blocks."""
        return len(self.blocks)

    def has_backward(self, stage: Stage) -> bool:
        """Whether the backward of ``stage`` runs: something is trained in it or before it."""
        return stage.id not in self._forward_only

    @cached_property
    def hidden_gb(self) -> float:
        """A block's input, one micro-batch."""
        return self.saves[0][0].variant.saved["input"] / GB

    @cached_property
    def in_flight_gb(self) -> float:
        """Slots for hidden states or gradients of all micro-batches, and for one more, which is being written."""
        return (self.candidate.accumulation + 1) * self.hidden_gb

    @cached_property
    def batch_gb(self) -> float:
        """Tokens, targets and, where rows are packed, positions of a step."""
        rows = self.candidate.micro_batch * self.candidate.accumulation
        return batch_bytes(rows, self.profile.seq_len, self.profile.packing) / GB

    @cached_property
    def gpu_constant_gb(self) -> float:
        """Batch, arguments of packed rows, loss, norms, what a step reports and accumulators."""
        small = self.host_constant_gb + MASTER_BYTES * (self._num_tensors + 1) / GB
        arguments_bytes = self.profile.argument_bytes.get(self.candidate.micro_batch, 0)
        small += self.candidate.accumulation * arguments_bytes / GB
        if self.candidate.accumulation > 1:
            small += max(block.accumulator_gb for block in self.blocks)
        if self.tied:
            return small + 2 * self.embed.accumulator_gb + self.head.accumulator_gb
        return small + max(self.embed.accumulator_gb, self.head.accumulator_gb)

    @cached_property
    def moving_slot_gb(self) -> float:
        """One slot for saved tensors on their way to or from the host."""
        return max(option.offloaded_gb for options in self.saves for option in options)

    @cached_property
    def host_constant_gb(self) -> float:
        """Batch, what updates read and what a step reports."""
        return self.batch_gb + MASTER_BYTES * (SCALE_ELEMENTS + TOTAL_ELEMENTS + self._num_tensors) / GB

    @cached_property
    def _num_tensors(self) -> int:
        return sum(len(stage.trained_params) for stage in self.profile.stages)

    @cached_property
    def vocabulary_options(self) -> tuple[VocabularyOption, ...]:
        """Every joint choice for embedding and head that differs in cost."""
        pairs = vocabulary_pairs(self.tied)
        ends = (self.embed_stage, self.head_stage)
        embeds, heads = (_allowed(self._state_choices, of_stage(self.pins, stage)) for stage in ends)
        return tuple(
            vocabulary_option((embed, self.embed), (head, self.head))
            for embed, head in pairs
            if embed in embeds and head in heads
        )

    @property
    def _state_choices(self) -> tuple[StateChoice, ...]:
        scope = self.scope
        return tuple(c for c, (weights, state) in PLACES.items() if weights in scope.weights and state in scope.state)

    @cached_property
    def uses_files(self) -> bool:
        """Whether any choice has something in files."""
        states = {choice for choices in self.states for choice in choices}
        saves = {option.tier for options in self.saves for option in options}
        ends = {choice for option in self.vocabulary_options for choice in (option.embed, option.head)}
        return bool((states | ends) & set(IN_FILES)) or "nvme" in saves

    @cached_property
    def has_segments(self) -> bool:
        """Whether any block can be in a segment of several."""
        return any(option.segment > 1 for options in self.saves for option in options)

    @property
    def has_options(self) -> bool:
        """Whether what is fixed by hand leaves every stage a choice."""
        return all(self.saves) and all(self.states) and bool(self.vocabulary_options)

    def usable_gpu_gb(self, budget_bytes: int) -> float:
        """What buffers may fill of ``budget_bytes`` once the driver context and fragmentation are taken off."""
        fragmentation_bytes = self.profile.fragmentation_bytes.get(self.candidate.micro_batch, 0)
        return (budget_bytes - self.profile.context_bytes - fragmentation_bytes) / GB

    @cached_property
    def mapping_gb_per_gb(self) -> float:
        """GPU memory that each GB of the host's that copies read and write takes, where it is page-locked."""
        pinned = self.profile.device == "cuda" and self.candidate.host_memory == "pinned"
        return mapping_bytes(10**9) / GB if pinned else 0.0

    # ---- times that no decision changes

    @cached_property
    def embed_forward_s(self) -> float:
        """One micro-batch."""
        return self.embed_variant.forward.seconds

    @cached_property
    def head_s(self) -> float:
        """The head window of a step: loss and gradient of all micro-batches, then the norm."""
        return self.candidate.accumulation * self.head_variant.backward.seconds + self.head.norm_s

    @cached_property
    def embed_backward_s(self) -> float:
        """The embedding's backward window of a step, the sum with a tied head included; 0 if it is frozen."""
        if not self.embed_stage.is_trained:
            return 0.0
        total = self.candidate.accumulation * self.embed_variant.backward.seconds + self.embed.norm_s
        if self.tied:
            total += self.link_s("gpu", round(3 * self.embed.accumulator_gb * GB))
        return total

    @cached_property
    def copy_slowdown(self) -> float:
        """Of an update's own seconds, what each direction that copies adds while it does."""
        return self.profile.copy_slowdown(self.state_format)

    @cached_property
    def least_lost_s(self) -> float:
        """Seconds that the host's update loses at least for each second in which one direction copies; at most 1/2.

        That is half of what it loses where both do.
        """
        return self.copy_slowdown / (1 + 2 * self.copy_slowdown)

    @cached_property
    def compute_bound_s(self) -> float:
        """No plan of this candidate is faster: every block in its fastest variant, nothing ever waits."""
        m = self.candidate.accumulation
        blocks = sum(min(o.forward_s + o.backward_s for o in options) for options in self.saves)
        norms = sum(block.norm_s for block in self.blocks)
        return m * (self.embed_forward_s + blocks) + norms + self.head_s + self.embed_backward_s

    @cached_property
    def _one_way(self) -> bool:
        """Whether plans may keep one direction alone busy: what streams has few gradients, and no block need send more.

        A bound must not count the slower rates of both then; the simulation knows what a plan moves.
        """
        sizes = [(stage.weight_bytes, trained_part(stage, self.element_bytes)) for stage in self.profile.stages]
        return any(trained.weight_bytes < 2 * BUSY_SHARE * size for size, trained in sizes)

    def link_s(self, link: Literal["h2d", "d2h", "gpu", "nvme_read", "nvme_write"], num_bytes: int) -> float:
        """Time of one request; links between GPU and host count as busy both ways."""
        if link == "h2d" or link == "d2h":
            name = link_name(link, self.candidate.host_memory)
            return curve_of(self.profile, name, one_way=self._one_way).seconds(num_bytes)
        return curve_of(self.profile, link).seconds(num_bytes)

    def file_s(self, link: Literal["nvme_read", "nvme_write"], num_bytes: int) -> float:
        """Time of one request to files; 0 where none may be used."""
        return self.link_s(link, num_bytes) if self.scope.has_files else 0.0

    # ---- making

    def _costs(self, stage: Stage) -> StageCosts:
        weight_bytes, grads_bytes = stage.weight_bytes, trained_part(stage, self.element_bytes).weight_bytes
        elements = grads_bytes // self.element_bytes
        accumulator_bytes = MASTER_BYTES * elements
        accumulates = self.candidate.accumulation > 1 or not stage.is_block
        norm_bytes = (accumulator_bytes + grads_bytes if accumulates else 0) + grads_bytes
        record_bytes = weight_bytes if stage.is_trained else 0
        own_bytes = state_bytes(stage, self.element_bytes, self.state_format, FP32_STATE_ELEMENTS)
        return StageCosts(
            weight_gb=weight_bytes / GB,
            grads_gb=grads_bytes / GB,
            state_gb=own_bytes / GB,
            accumulator_gb=accumulator_bytes / GB,
            load_s=self.link_s("h2d", weight_bytes),
            reload_s=self.link_s("h2d", weight_bytes if self.has_backward(stage) else 0),
            grads_s=self.link_s("d2h", grads_bytes),
            norm_s=self.link_s("gpu", norm_bytes),
            cpu_update_s=stage.num_trained / update_rate(self.profile, "cpu", self.state_format),
            gpu_update_s=stage.num_trained / update_rate(self.profile, "gpu", self.state_format),
            gpu_update_working_gb=gpu_update_working_bytes(elements, self.state_format) / GB,
            read_weights_s=self.file_s("nvme_read", weight_bytes),
            read_state_s=self.file_s("nvme_read", own_bytes),
            write_state_s=self.file_s("nvme_write", own_bytes),
            read_both_s=self.file_s("nvme_read", own_bytes + record_bytes),
            write_both_s=self.file_s("nvme_write", own_bytes + record_bytes),
        )

    def _only(self, stage: Stage) -> SaveVariant:
        return measured_variants(self.profile, stage.structure, self.candidate.micro_batch)[0]


def _allowed(choices: Sequence[StateChoice], pins: Sequence[Pin]) -> tuple[StateChoice, ...]:
    """Those of ``choices`` that agree with ``pins``."""
    fixing = [pin for pin in pins if not pin.of_saving]
    return tuple(choice for choice in choices if all(pin.allows(stage_plan(choice, "all")) for pin in fixing))
