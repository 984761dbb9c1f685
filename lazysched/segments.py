"""Segments: runs of consecutive blocks that keep one input between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from lazysched.errors import UsageError
from lazysched.schemas import Plan, Stage


def segments_of(plan: Plan, blocks: Sequence[Stage]) -> list[list[Stage]]:
    """The blocks cut into segments, in forward order; most have one block.

    Raises:
        UsageError: a segment is not whole, its blocks differ, or it keeps more than its first input.
    """
    segments, start = [], 0
    while start < len(blocks):
        length = plan.stages[blocks[start].id].segment
        segment = list(blocks[start : start + length])
        if len(segment) < length:
            raise UsageError(
                f"plan: stages.{segment[0].id}.segment: {length} is more than the blocks from there on; "
                f"use {len(segment)}"
            )
        if length > 1:
            _check(plan, segment)
        segments.append(segment)
        start += length
    return segments


def _check(plan: Plan, segment: Sequence[Stage]) -> None:
    first, length = segment[0], len(segment)
    save = plan.stages[first.id].save
    for stage in segment:
        choice, where = plan.stages[stage.id], f"plan: stages.{stage.id}"
        of_segment = f"in the segment of {length} blocks that {first.id} begins"
        if choice.segment != length:
            raise UsageError(f"{where}.segment: {choice.segment} {of_segment}; use {length}")
        if stage.structure != first.structure:
            raise UsageError(f"{where}.segment: another structure than {first.id}, {of_segment}; end it before")
        if choice.save != save:
            raise UsageError(f"{where}.save: {choice.save!r} {of_segment}; use {save!r}")
        if stage is not first and choice.input_tier != "gpu":
            raise UsageError(f"{where}.input_tier: {choice.input_tier} {of_segment}, which keeps no other; use gpu")
        for group, tier in choice.saved_tiers.items():
            if tier != "gpu":
                raise UsageError(f"{where}.saved_tiers.{group}: {tier} {of_segment}, which is made anew; use gpu")
