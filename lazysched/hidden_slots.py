"""Which slot holds which hidden state, or gradient of one, while a step runs.

Hidden states outlive the working set amid which they come to be. Taken from the allocator they would leave holes there
that nothing large fits; slots are allocated once.
"""

from __future__ import annotations

from collections import deque

from lazysched.layout import Layout


class HiddenSlots:
    """Hands out buffer ids; of the free slots the one that was given back first, whose readers finished first."""

    def __init__(self) -> None:
        self._free: deque[str] = deque()
        self.count = 0

    def take(self) -> str:
        """A slot that nobody needs any more, or a new one."""
        if self._free:
            return self._free.popleft()
        self.count += 1
        return f"gpu/hidden/slot{self.count - 1}"

    def give(self, slot: str) -> None:
        """Say that no operation from here on reads ``slot``."""
        self._free.append(slot)


def num_hidden_slots(layout: Layout, training: bool) -> int:
    """Most slots in use at once.

    That is when the loss is taken: the head's inputs and one gradient, inputs that wait on the GPU for the backward,
    and inputs that are still leaving for the host.
    """
    plan = layout.plan
    in_flight = plan.accumulation + 1
    if not training:
        return in_flight
    inputs = [layout.choice(stage).input_tier for stage in layout.blocks]
    leaving = plan.d2h_lag + 1 if "host" in inputs else 0
    return in_flight + plan.accumulation * inputs.count("gpu") + leaving
