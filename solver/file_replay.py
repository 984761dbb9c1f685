"""The two engines that files have, replayed beside ``window_replay``: for N choices at once, seconds.

Windows are forward windows: 0 the embedding, 1..L the blocks, L + 1 the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from lazysched.solver.choice_batch import Bools, ChoiceBatch, Floats
from lazysched.solver.options import STATE_CHOICES, StageCosts, StateChoice
from lazysched.staging import STATE_SLOTS

if TYPE_CHECKING:
    from lazysched.solver.window_replay import WindowReplay


def hand_on(ring: list[Floats], mask: Bools, times: list[Floats]) -> None:
    """Hand slots on, first in first out, where ``mask``; ``times`` is when the new holders leave them."""
    handed_on = [*ring, *times][-len(ring) :]
    ring[:] = [np.where(mask, new, old) for new, old in zip(handed_on, ring, strict=True)]


class FileEngines:
    """When reads and writes end; everything that is not in files passes through unchanged."""

    def __init__(self, replay: WindowReplay, batch: ChoiceBatch) -> None:
        self.m, self.lag, self.slots = replay.m, replay.lag, replay.slots
        self._replay, self._batch = replay, batch
        self.zero: Floats = np.zeros(len(batch.vocabulary))
        self.weights = self._per_window(lambda costs, choice: costs.read_weights_s if choice == "nvme" else 0.0)
        self.read_state = self._per_window(lambda costs, choice: costs.read_update_s(choice))
        self.write_state = self._per_window(lambda costs, choice: costs.write_update_s(choice))
        self.read_saved = np.ascontiguousarray(replay.option_table("read_s", batch).T)
        self.write_saved = np.ascontiguousarray(replay.option_table("write_s", batch).T)
        self.reading_s = self.writing_s = self.zero
        """When each engine is free."""
        self.weight_slots = [self.zero] * (self.slots + 1)
        self.state_slots = [self.zero] * STATE_SLOTS
        self.written = [self.zero] * len(self.weights)
        """Per window, when what its last update changed was in files again."""
        self.saved_first: dict[int, Floats] = {}
        self.saved_last: dict[int, Floats] = {}

    def _per_window(self, cost: Callable[[StageCosts, StateChoice], float]) -> list[Floats]:
        instance, batch = self._replay.instance, self._batch
        blocks = [
            np.array([cost(costs, choice) for choice in STATE_CHOICES])[batch.states[:, i]]
            for i, costs in enumerate(instance.blocks)
        ]
        options = instance.vocabulary_options
        embed = np.array([cost(instance.embed, option.embed) for option in options])[batch.vocabulary]
        head = np.array([cost(instance.head, option.head) for option in options])[batch.vocabulary]
        return [embed, *blocks, head]

    def read_weights(self, window: int, needed: Bools) -> Floats:
        """End of the read that the upload of the window's weights waits for, 0 where there is none."""
        own_s = self.weights[window] * needed
        start = np.maximum(np.maximum(self.reading_s, self.weight_slots[0]), self.written[window])
        self.reading_s = np.where(own_s > 0, start + own_s, self.reading_s)
        return np.where(own_s > 0, self.reading_s, 0.0)

    def uploaded(self, window: int, end_s: Floats, needed: Bools) -> None:
        """The window's weights have left their slot on the host at ``end_s``."""
        hand_on(self.weight_slots, self.weights[window] * needed > 0, [end_s])

    def write_saved_of(self, block: int, first_s: Floats, last_s: Floats) -> Floats:
        """Write what a block saves, there from ``first_s`` to ``last_s``; when the copies before the next may end."""
        own_s = self.write_saved[block]
        first = np.maximum(self.writing_s, first_s)
        last = np.maximum(first + self.m * own_s, last_s + own_s)
        self.writing_s = np.where(own_s > 0, last, self.writing_s)
        # Of a segment every block says when the first one's input was there.
        before = (self.saved_first[block - 1], self.saved_last[block - 1]) if block else (self.zero, self.zero)
        self.saved_first[block] = np.where(own_s > 0, first + own_s, before[0])
        self.saved_last[block] = np.where(own_s > 0, last, before[1])
        return np.where(own_s > 0, last - (self.lag + 2) * own_s, 0.0)

    def read_saved_of(self, block: int) -> tuple[Floats, Floats, Floats]:
        """Ends of the first and of all reads of what a block saved, and the duration of one; 0 where there are none."""
        own_s = self.read_saved[block]
        first = np.maximum(self.reading_s, self.saved_first[block]) + own_s
        last = np.maximum(first + (self.m - 1) * own_s, self.saved_last[block] + own_s)
        self.reading_s = np.where(own_s > 0, last, self.reading_s)
        return np.where(own_s > 0, first, 0.0), np.where(own_s > 0, last, 0.0), own_s

    def update(self, window: int, after_s: Floats, own_s: Floats) -> Floats:
        """Update the window's stage once the host is free at ``after_s``; when that has ended."""
        read_s, write_s = self.read_state[window], self.write_state[window]
        read = np.maximum(self.reading_s, self.state_slots[0]) + read_s
        in_files = read_s > 0
        self.reading_s = np.where(in_files, read, self.reading_s)
        end = np.where(in_files, np.maximum(after_s, read), after_s) + own_s
        written = np.maximum(self.writing_s, end) + write_s
        self.writing_s = np.where(in_files, written, self.writing_s)
        self.written[window] = np.where(in_files, written, self.written[window])
        hand_on(self.state_slots, in_files, [written])
        return end
