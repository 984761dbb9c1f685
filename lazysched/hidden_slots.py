"""Which slot holds which hidden state, or gradient of one, while a step runs.

Hidden states outlive the working set amid which they come to be. Taken from the allocator they would leave holes there
that nothing large fits; slots are allocated once.
"""

from __future__ import annotations

from collections import deque

from lazysched.layout import Layout


class HiddenSlots:
    """Hands out buffer ids; of the free slots the one that was given back first, whose readers finished first.

    Args:
        count: of slots, all of them free: one that was never used waits for nobody.
    """

    def __init__(self, count: int) -> None:
        self._free = deque(f"gpu/hidden/slot{k}" for k in range(count))

    def take(self) -> str:
        """A slot that nobody needs any more."""
        return self._free.popleft()

    def give(self, slot: str) -> None:
        """Say that no operation from here on reads ``slot``."""
        self._free.append(slot)


def num_hidden_slots(layout: Layout, training: bool) -> int:
    """Most slots in use at once.

    That is when the loss is taken: the head's inputs and one gradient, inputs that wait on the GPU for the backward,
    and inputs that are still leaving. Or it is when a segment runs again, whose inner inputs come on top of
    the inputs that wait for what is left of the backward.
    """
    plan = layout.plan
    in_flight = plan.accumulation + 1
    if not training:
        return in_flight
    waiting, most, leaving = 0, 0, 0
    for segment in layout.segments:
        if not layout.has_backward(segment[0]):
            continue
        if layout.choice(segment[0]).input_tier == "gpu":
            waiting += 1
        else:
            leaving = plan.d2h_lag + 1
        most = max(most, waiting + len(segment) - 1)
    return in_flight + plan.accumulation * most + leaving


def num_segment_slots(layout: Layout) -> int:
    """Slots for fetched inputs of segments: those of all micro-batches are held until the first block's backward.

    As many more as elsewhere are fetched ahead.
    """
    return layout.plan.accumulation + layout.plan.prefetch_depth
