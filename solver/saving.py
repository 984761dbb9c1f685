"""What each block can be decided to save: every variant in every tier, alone or as part of a segment of blocks.

Segments begin at multiples of their length, counted from the first block. A place in a block's options means the same
segment, variant and tier in all blocks of a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lazysched.layout import adding_bytes
from lazysched.schemas import SaveVariant, Stage, Tier
from lazysched.solver.measured import measured_variants
from lazysched.solver.options import SaveOption, block_plan, mean_option
from lazysched.solver.pins import of_stage
from lazysched.trainable import trained_part

if TYPE_CHECKING:
    from lazysched.solver.instance import Instance

GB = 1e9


class _Kind(NamedTuple):
    """A variant in a tier, or its input alone there, in segments of some length."""

    variant: str
    tier: Tier
    segment: int
    rest_stays: bool


class Saving:
    """Save options of all blocks of ``instance``, whose stages and links are known.

    Attributes:
        options: per block; longest segments first. Blocks with equal options share one tuple.
        layouts: per block, a number that is the same where the options are of the same kinds.
        means: per block, the options of all blocks of that layout, of segments each block's mean share.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._made: dict[tuple[str, _Kind, int], SaveOption] = {}
        self._known: dict[object, list[_Kind]] = {}
        self._variants: dict[str, dict[str, SaveVariant]] = {}
        for stage in instance.block_stages:
            listed = measured_variants(instance.profile, stage.structure, instance.candidate.micro_batch)
            self._variants.setdefault(stage.structure, {variant.name: variant for variant in listed})
        self.options: list[tuple[SaveOption, ...]] = []
        self.layouts: list[int] = []
        self.means: list[tuple[SaveOption, ...]] = []
        rows: dict[object, tuple[SaveOption, ...]] = {}
        numbers: dict[object, int] = {}
        means: dict[int, tuple[SaveOption, ...]] = {}
        lengths = sorted(instance.candidate.segments, reverse=True)
        for i, stage in enumerate(instance.block_stages):
            kinds = tuple(kind for length in lengths for kind in self._of_length(i, length))
            key = (stage.structure, stage.weight_bytes, kinds)
            self.layouts.append(numbers.setdefault(key, len(numbers)))
            row = tuple(self._option(stage, kind, i % kind.segment) for kind in kinds)
            self.options.append(rows.setdefault((key, *(option.place for option in row)), row))
            if self.layouts[-1] not in means:
                means[self.layouts[-1]] = tuple(self._mean(stage, kind) for kind in kinds)
            self.means.append(means[self.layouts[-1]])

    def _mean(self, stage: Stage, kind: _Kind) -> SaveOption:
        return mean_option([self._option(stage, kind, place) for place in range(kind.segment)])

    def _of_length(self, block: int, length: int) -> list[_Kind]:
        """What the segment of that length which ``block`` is part of can save; nothing where there is none."""
        stages = self._instance.block_stages
        if length > 1 and block < self._instance.num_forward_only:
            return []
        begin = block - block % length
        segment = stages[begin : begin + length]
        if len(segment) < length or any(_differ(stage, segment[0]) for stage in segment):
            return []
        fixed = [frozenset(of_stage(self._instance.pins, stage)) for stage in segment]
        key = (segment[0].structure, segment[0].weight_bytes, *fixed)
        if key not in self._known:
            self._known[key] = self._undominated(segment, length)
        return self._known[key]

    def _undominated(self, segment: Sequence[Stage], length: int) -> list[_Kind]:
        kinds = [kind for kind in self._kinds(segment[0], length) if self._is_allowed(segment, kind)]
        means = [self._mean(segment[0], kind) for kind in kinds]
        return [k for k, mean in zip(kinds, means, strict=True) if not any(other.dominates(mean) for other in means)]

    def _kinds(self, stage: Stage, length: int) -> list[_Kind]:
        """Every variant in every tier of which no more leaves than may."""
        variants, limit = self._variants[stage.structure].values(), self._instance.candidate.offload_limit_bytes
        kinds = [_Kind(variant.name, "gpu", length, rest_stays=length > 1) for variant in variants]
        for tier in self._instance.scope.saved if self._instance.has_backward(stage) else ():
            if tier == "gpu":
                continue
            if length == 1:
                small = [v for v in variants if _leaving_bytes(v, rest_stays=False) <= limit]
                kinds += [_Kind(variant.name, tier, length, rest_stays=False) for variant in small]
            parted = [v for v in variants if length > 1 or len(v.saved) > 1]  # alone an input is all that is saved
            small = [v for v in parted if _leaving_bytes(v, rest_stays=True) <= limit]
            kinds += [_Kind(variant.name, tier, length, rest_stays=True) for variant in small]
        return kinds

    def _is_allowed(self, segment: Sequence[Stage], kind: _Kind) -> bool:
        """Whether what is fixed by hand of the blocks of ``segment`` leaves ``kind``."""
        return all(
            pin.allows(block_plan("gpu", self._option(stage, kind, place)))
            for place, stage in enumerate(segment)
            for pin in of_stage(self._instance.pins, stage)
            if pin.of_saving
        )

    def _option(self, stage: Stage, kind: _Kind, place: int) -> SaveOption:
        key = (f"{stage.structure} {stage.weight_bytes}", kind, place)
        if key not in self._made:
            is_live = self._instance.has_backward(stage)
            self._made[key] = self._make(stage, kind, place) if is_live else self._forward_alone(stage, kind)
        return self._made[key]

    def _make(self, stage: Stage, kind: _Kind, place: int) -> SaveOption:
        instance, length = self._instance, kind.segment
        variant = self._variants[stage.structure][kind.variant]
        is_first, is_last = place == 0, place == length - 1
        leaving = _leaving_bytes(variant, kind.rest_stays) if kind.tier != "gpu" else 0
        sent, fetched = leaving * is_first, leaving * is_last
        in_files = kind.tier == "nvme"
        own = sum(variant.saved.values()) if length == 1 else variant.saved["input"] * is_first
        inner = sum(variant.saved.values()) - variant.saved["input"]
        # Of a segment whose variant keeps inputs alone, the last block need not run again.
        again_s = (length if inner else length - 1) * variant.forward.seconds if length > 1 and is_last else 0.0
        return SaveOption(
            variant,
            kind.tier,
            forward_s=variant.forward.seconds,
            backward_s=variant.backward.seconds + self._add_s(stage) + again_s,
            kept_gb=(own - sent) / GB,
            kept_input_gb=variant.saved["input"] / GB if kind.tier == "gpu" and is_first else 0.0,
            offloaded_gb=sent / GB,
            save_s=instance.link_s("d2h", sent),
            fetch_s=instance.link_s("h2d", fetched),
            working_gb=max(variant.working_forward_bytes, variant.working_backward_bytes) / GB,
            write_s=instance.file_s("nvme_write", sent if in_files else 0),
            read_s=instance.file_s("nvme_read", fetched if in_files else 0),
            rest_stays=kind.rest_stays,
            segment=length,
            place=place,
            recompute_s=again_s,
            remade_gb=length * inner / GB if length > 1 and is_first else 0.0,
            inner_inputs_gb=(length - 1) * variant.saved["input"] / GB if is_first else 0.0,
            segment_slot_gb=leaving / GB if length > 1 else 0.0,
        )

    def _forward_alone(self, stage: Stage, kind: _Kind) -> SaveOption:
        """Of a block without a backward: it keeps nothing."""
        variant = self._variants[stage.structure][kind.variant]
        return SaveOption(
            variant, kind.tier, forward_s=variant.forward.seconds, backward_s=0.0, kept_gb=0.0, kept_input_gb=0.0,
            offloaded_gb=0.0, save_s=0.0, fetch_s=0.0, working_gb=variant.working_forward_bytes / GB,
        )  # fmt: skip

    def _add_s(self, stage: Stage) -> float:
        """Mean time per micro-batch to add a block's gradients up."""
        instance = self._instance
        grads_bytes = trained_part(stage, instance.element_bytes).weight_bytes
        elements, count = grads_bytes // instance.element_bytes, instance.candidate.accumulation
        each = [adding_bytes(elements, instance.element_bytes, m, count) for m in range(min(count, 2))]
        return (instance.link_s("gpu", each[0]) + (count - 1) * instance.link_s("gpu", each[-1])) / count


def _differ(stage: Stage, other: Stage) -> bool:
    return stage.structure != other.structure or stage.weight_bytes != other.weight_bytes


def _leaving_bytes(variant: SaveVariant, rest_stays: bool) -> int:
    """What leaves for another tier than the GPU: all that is saved, or the input alone."""
    return variant.saved["input"] if rest_stays else sum(variant.saved.values())
