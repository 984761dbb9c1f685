"""Which GPU slot holds which streamed block when, and where a block need not be uploaded again.

The blocks are used in a known order (forward, then backward in reverse), so the farthest-next-use rule is optimal
(Belady 1966): at the turn the last blocks of the forward are still in their slots and serve the backward at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SlotUse:
    """One use of a streamed block.

    Attributes:
        slot: index of the slot that holds the block.
        upload: whether the block must be copied in for this use.
        free_after: position, in the sequence of uses, of the last use of what the slot held before; -1 if none.
    """

    slot: int
    upload: bool
    free_after: int


def assign_slots(uses: Sequence[str], num_slots: int) -> list[SlotUse]:
    """Slots for ``uses``, the stage ids of streamed blocks in order of use."""
    held: list[str | None] = [None] * num_slots
    last_use = [-1] * num_slots
    result = []
    for position, stage in enumerate(uses):
        if stage in held:
            slot, upload = held.index(stage), False
        else:
            slot, upload = _farthest(held, last_use, uses, position), True
        result.append(SlotUse(slot, upload, last_use[slot]))
        held[slot], last_use[slot] = stage, position
    return result


def _farthest(held: Sequence[str | None], last_use: Sequence[int], uses: Sequence[str], position: int) -> int:
    """The slot whose content is needed last; of several that are not needed, the one free for longest."""

    def next_use(slot: int) -> int:
        stage = held[slot]
        if stage is None:
            return len(uses)
        return next((k for k in range(position, len(uses)) if uses[k] == stage), len(uses))

    return max(range(len(held)), key=lambda slot: (next_use(slot), -last_use[slot], -slot))
