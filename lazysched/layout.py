"""A plan resolved against the stages of its model: choices checked, sizes worked out, buffers named.

``lower`` orders operations; this module knows what exists. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Literal

from lazysched.errors import UsageError
from lazysched.optimizer_state import NUM_COEFFICIENTS, state_bytes
from lazysched.schemas import (
    BYTES_PER_ELEMENT,
    HostMemory,
    Phase,
    Plan,
    SaveVariant,
    Stage,
    StagePlan,
    StateFormat,
    Tier,
    variant_key,
)
from lazysched.segments import segments_of
from lazysched.trainable import first_trained, trained_part

MASTER_BYTES = 4
"""fp32 accumulators and master weights."""
SCALE_ELEMENTS = NUM_COEFFICIENTS + 1
"""What updates read, fp32: the coefficients, skip and number of updates among them, then the factor alone."""
TOTAL_ELEMENTS = 3
"""What a step reports, fp32: loss, gradient norm, skip; the norms of all tensors follow."""
GPU_UPDATE_CHUNK = 1 << 24
"""Elements that a GPU update in format ``fp32`` converts at a time."""


class Layout:
    """Stages, choices, variants and buffer sizes of one plan.

    Raises:
        UsageError: the plan does not fit the model or contradicts itself.
    """

    def __init__(self, plan: Plan, stages: Sequence[Stage]) -> None:
        self.plan = plan
        self.stages = list(stages)
        self.by_id = {stage.id: stage for stage in stages}
        _check_stages(plan, self.stages)
        self.embed, self.blocks, self.head = self.stages[0], self.stages[1:-1], self.stages[-1]
        self.tied = self.head.shares is not None
        self.element_bytes = BYTES_PER_ELEMENT[plan.compute_dtype]
        self.trained = {stage.id: trained_part(stage, self.element_bytes) for stage in stages}
        self._with_backward = {stage.id for stage in self.stages[first_trained(stages) :]}
        self.variants = {stage.id: self._variant(stage) for stage in stages}
        for stage in self.stages:
            _check_choice(stage, plan.stages[stage.id], self.variants[stage.id], self.has_backward(stage))
        self.segments = segments_of(plan, self.blocks)
        self._begins_segment = {segment[0].id for segment in self.segments}
        self._next_of_segment = {s.id: after for segment in self.segments for s, after in pairwise(segment)}
        self.hidden_bytes = self.variants[self.blocks[0].id].saved["input"]
        self.num_slots = plan.prefetch_depth + 1
        self.shared_vocabulary_slot = not self.tied and "gpu" not in {
            self.choice(s).weights for s in (self.embed, self.head)
        }

    def choice(self, stage: Stage) -> StagePlan:
        """The plan's decisions for ``stage``."""
        return self.plan.stages[stage.id]

    def _variant(self, stage: Stage) -> SaveVariant:
        key = variant_key(stage.structure, self.plan.stages[stage.id].save)
        if key not in self.plan.variants:
            names = ", ".join(k.partition(":")[2] for k in self.plan.variants if k.startswith(f"{stage.structure}:"))
            save = self.plan.stages[stage.id].save
            raise UsageError(
                f"plan: stages.{stage.id}.save: {save!r} is not among the plan's variants ({names}); "
                f"solve again with {_pin_for(stage, save)}"
            )
        variant = self.plan.variants[key]
        if variant.name != self.plan.stages[stage.id].save:
            raise UsageError(f"plan: variants.{key}.name: is {variant.name!r}; solve again")
        return variant

    def streamed(self, stage: Stage) -> bool:
        """Whether a block's weights pass through the shared slots."""
        return stage.is_block and self.choice(stage).weights != "gpu"

    def has_own_weights(self, stage: Stage) -> bool:
        """Whether a GPU buffer of its own holds the stage's weights."""
        return not self.streamed(stage) and (stage.is_block or not self.shared_vocabulary_slot)

    @property
    def batch_bytes(self) -> int:
        """Token ids, targets and, where rows are packed, positions of a step, int64."""
        return batch_bytes(self.plan.batch_size, self.plan.seq_len, self.plan.packing)

    def on_host(self, stage: Stage) -> bool:
        """Whether the host updates the stage, from gradients in its memory and state there or in files."""
        return self.choice(stage).state != "gpu"

    def has_backward(self, stage: Stage) -> bool:
        """Whether the stage's backward runs: something is trained in it or before it."""
        return stage.id in self._with_backward

    def grad_bytes(self, stage: Stage) -> int:
        """The stage's gradient in the computing dtype, of what is trained alone; laid out as ``trained[stage.id]``."""
        return self.trained[stage.id].weight_bytes

    def elements(self, stage: Stage) -> int:
        """Elements of the stage's gradient, alignment included."""
        return self.grad_bytes(stage) // self.element_bytes

    def state_bytes(self, stage: Stage) -> int:
        """The stage's optimizer state in the format that the plan chose for it."""
        state_format, small = self.choice(stage).state_format, self.plan.fp32_state_elements
        return state_bytes(stage, self.element_bytes, state_format, small)

    def record_bytes(self, stage: Stage) -> int:
        """What an update reads from files and writes back: the state and, where they live there too, the weights."""
        if not stage.is_trained:
            return 0
        return self.state_bytes(stage) + (stage.weight_bytes if self.choice(stage).weights == "nvme" else 0)

    def update_working_bytes(self, stage: Stage) -> int:
        """GPU memory beside weights, gradient and state while the stage is updated."""
        if self.on_host(stage):
            return 0
        return gpu_update_working_bytes(self.elements(stage), self.choice(stage).state_format)

    @property
    def norms_bytes(self) -> int:
        """One fp32 norm for each trained tensor."""
        return MASTER_BYTES * sum(len(stage.trained_params) for stage in self.stages)

    def _tiers(self, stage: Stage) -> dict[str, Tier]:
        """Tensor group that waits for the backward -> where; what a segment makes anew is not among them."""
        if not self.has_backward(stage):
            return {}
        choice = self.choice(stage)
        tiers: dict[str, Tier] = {} if self.in_segment(stage) else dict(choice.saved_tiers)
        if self.keeps_input(stage):
            tiers["input"] = choice.input_tier
        return tiers

    def offloaded_bytes(self, stage: Stage) -> int:
        """Bytes per micro-batch that the stage sends to the host in forward and fetches in backward."""
        saved = self.variants[stage.id].saved
        return sum(saved[group] for group, tier in self._tiers(stage).items() if tier != "gpu")

    def offload_tier(self, stage: Stage) -> Tier | None:
        """Where what is offloaded waits; None where nothing is."""
        return next((tier for tier in self._tiers(stage).values() if tier != "gpu"), None)

    def outgoing_bytes(self, stage: Stage) -> int:
        """Bytes per micro-batch, the input excepted, that the stage sends to the host."""
        choice, variant = self.choice(stage), self.variants[stage.id]
        return sum(size for group, size in variant.saved.items() if choice.saved_tiers.get(group, "gpu") != "gpu")

    def kept_bytes(self, stage: Stage) -> int:
        """Bytes per micro-batch, the input excepted, that stay on the GPU until the backward.

        They are made in the forward, or in a segment's recompute.
        """
        choice, variant = self.choice(stage), self.variants[stage.id]
        return sum(size for group, size in variant.saved.items() if choice.saved_tiers.get(group) == "gpu")

    def in_segment(self, stage: Stage) -> bool:
        """Whether the stage is a block of a segment of several, whose forward keeps the first input alone."""
        return self.choice(stage).segment > 1

    def keeps_input(self, stage: Stage) -> bool:
        """Whether the input of the stage's forward waits for the backward."""
        return stage.id in self._begins_segment and self.has_backward(stage)

    def next_of_segment(self, stage: Stage) -> Stage | None:
        """The block that follows ``stage`` in its segment; None after the last."""
        return self._next_of_segment.get(stage.id)

    def recomputed(self, stage: Stage) -> bool:
        """Whether the stage's forward runs again: for what it saves, or as input of the next block of its segment."""
        return self.in_segment(stage) and (self.kept_bytes(stage) > 0 or self.next_of_segment(stage) is not None)

    @cached_property
    def backward_order(self) -> list[tuple[Stage, Phase]]:
        """What the blocks run after the loss, each entry for all micro-batches."""
        order: list[tuple[Stage, Phase]] = []
        for segment in reversed(self.segments):
            if not self.has_backward(segment[0]):
                break
            order.extend((stage, "recompute") for stage in segment if self.recomputed(stage))
            order.extend((stage, "backward") for stage in reversed(segment))
        return order

    def accumulates(self, stage: Stage) -> bool:
        """Whether the stage's gradient is summed in an fp32 accumulator before it is rounded.

        The head adds up over chunks of tokens even with one micro-batch; the embedding does as the head.
        """
        return self.plan.accumulation > 1 or not stage.is_block

    def adding_bytes(self, stage: Stage, micro_batch: int) -> int:
        """Traffic inside GPU memory that accumulation adds to a block's backward."""
        return adding_bytes(self.elements(stage), self.element_bytes, micro_batch, self.plan.accumulation)

    def accumulator(self, stage: Stage) -> str:
        """Buffer id of the accumulator that the stage's backward adds to."""
        if stage.is_block:
            return "gpu/accumulator/block"
        return f"gpu/accumulator/{stage.id if self.tied else 'vocabulary'}"


def batch_bytes(rows: int, seq_len: int, packing: bool) -> int:
    """Token ids and targets of ``rows`` and, where they are packed, positions, int64."""
    return (3 if packing else 2) * 8 * rows * seq_len


def adding_bytes(elements: int, element_bytes: int, micro_batch: int, accumulation: int) -> int:
    """Bytes that a block's ``micro_batch``-th backward moves beyond what its measured time holds.

    That time holds one write of each gradient in the computing dtype, as without accumulation. With it the first
    backward writes fp32 and every later one reads and writes fp32. That is as much for products that are summed where
    they belong as for gradients that are added from a tensor of their own, which is read in either case. Where products
    are made apart (``runtime.straight.sums_in_place``), writing and reading them is not counted.
    """
    if accumulation == 1:
        return 0
    return (MASTER_BYTES * (1 if micro_batch == 0 else 2) - element_bytes) * elements


def link_name(direction: Literal["h2d", "d2h"], host_memory: HostMemory) -> str:
    """Name of the link, in a profile and in the costs of a program, that copies to and from such host memory take."""
    return direction if host_memory == "pinned" else f"{direction}_pageable"


def mapping_bytes(pinned_bytes: int) -> int:
    """GPU memory that the driver takes to reach so much page-locked host memory: 8 bytes in its tables per 4 KiB page.

    Seen on an H200: 0.15 GB for 77 GB, 0.06 for 29.
    """
    return round(pinned_bytes * 8 / 4096)


def gpu_update_working_bytes(elements: int, state_format: StateFormat) -> int:
    """GPU memory that updating so many elements takes for a while: format ``fp32`` widens the gradient in chunks."""
    return MASTER_BYTES * min(elements, GPU_UPDATE_CHUNK) if state_format == "fp32" else 0


def _check_stages(plan: Plan, stages: Sequence[Stage]) -> None:
    ids = [stage.id for stage in stages]
    if set(plan.stages) != set(ids):
        odd = sorted(set(plan.stages) ^ set(ids))[0]
        raise UsageError(f"plan: stages: {odd!r} is not in both plan and model; solve a plan for this model")
    if len(ids) < 3 or ids[0] != "embed" or ids[-1] != "head":
        raise UsageError(f"model: stages {ids[:1]}..{ids[-1:]} are not embed, blocks, head")
    if not any(stage.is_trained for stage in stages):
        raise UsageError("model: trainable: no parameter is trained; name some")
    if plan.update.mode != "exact":
        raise UsageError(f"plan: update.mode: {plan.update.mode!r} cannot be lowered yet; use exact")


def _check_choice(stage: Stage, choice: StagePlan, variant: SaveVariant, has_backward: bool) -> None:
    """Refuse decisions that do not fit the stage's variant, or a backward that it does not have."""
    where = f"plan: stages.{stage.id}"
    if stage.is_block and not has_backward and (choice.segment, choice.input_tier) != (1, "gpu"):
        raise UsageError(f"{where}: has no backward, nothing before it is trained; use segment 1 and input_tier gpu")
    groups = set(variant.saved) - {"input"}
    if groups != set(choice.saved_tiers):
        raise UsageError(
            f"{where}.saved_tiers: names {sorted(choice.saved_tiers)}, the variant saves {sorted(groups)}; give each "
            f"of these a tier, or solve again with {_pin_for(stage, choice.save)}"
        )
    if stage.is_block and "input" not in variant.saved:
        raise UsageError(f"{where}.save: variant {variant.name!r} has no group 'input'; profile and solve again")
    _check_tiers(where, stage, choice)


def _pin_for(stage: Stage, save: str) -> str:
    """What makes ``solve`` decide so."""
    index = stage.id.removeprefix("block.")
    return f"--pin 'block[{index}].save={save}'" if stage.is_block else "the same profile"


def _check_tiers(where: str, stage: Stage, choice: StagePlan) -> None:
    if not stage.is_block and choice.segment != 1:
        raise UsageError(f"{where}.segment: {choice.segment}, but only blocks form segments; use 1")
    tiers = {"input_tier": choice.input_tier} | {f"saved_tiers.{g}": tier for g, tier in choice.saved_tiers.items()}
    if {"host", "nvme"} <= set(tiers.values()):
        field = next(field for field, tier in tiers.items() if tier == "nvme")
        raise UsageError(f"{where}.{field}: nvme beside host in one block; use one of the two for all that leaves")
