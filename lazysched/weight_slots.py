"""Which GPU slot holds which streamed block when, and where a block need not be uploaded again.

A slot is taken from the block that was used least recently. Blocks come back in reverse order, so that is also the
block that is needed last (what Belady, 1966, would take), and the slot that has been free for longest, so that its
upload has as many windows to hide behind as there are slots. In the backward of segments the two differ: the block that
is needed last may be the one just used, and an upload into its slot could not start before that use has ended.
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
        upload = stage not in held
        slot = min(range(num_slots), key=last_use.__getitem__) if upload else held.index(stage)
        result.append(SlotUse(slot, upload, last_use[slot]))
        held[slot], last_use[slot] = stage, position
    return result
