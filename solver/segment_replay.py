"""What the window replay knows of uploads in the backward, and of segments: which blocks run again when.

All arrays are L x N, for L blocks and N choices; times in seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lazysched.solver.choice_batch import Bools, ChoiceBatch, Floats, Ints

if TYPE_CHECKING:
    from lazysched.solver.window_replay import WindowReplay


class Segments:
    """Segments of the choices in ``batch``.

    Args:
        replay: of the instance.
        batch: the choices.
        streamed: blocks that pass through slots.

    Attributes:
        length: of the segment that each block is in.
        place: of each block in it.
        longest: length of the longest.
        runs_again: blocks before whose backward their segment runs again.
        recompute: how long that takes, one micro-batch.
        last_again_s: of that the block's own part, all micro-batches.
        first_upload: blocks that are uploaded for their first use after the loss.
        own_upload: blocks that are uploaded for their own backward.
        uploads: number of both.
    """

    def __init__(self, replay: WindowReplay, batch: ChoiceBatch, streamed: Bools) -> None:
        self._num_forward_only = replay.instance.num_forward_only
        self.length, self.place = _table(replay, "segment", batch), _table(replay, "place", batch)
        self.longest = int(self.length.max())
        is_last = self.place == self.length - 1
        self.runs_again: Bools = is_last & (self.length > 1)
        self.recompute: Floats = np.ascontiguousarray(replay.option_table("recompute_s", batch).T)
        forward: Floats = replay.option_table("forward_s", batch).T
        others = (self.length - 1) * forward
        self.last_again_s: Floats = np.where(self.runs_again, np.maximum(self.recompute - others, 0.0), 0.0) * replay.m
        self.first_upload, again = self._uploads(streamed, replay.slots)
        self.own_upload: Bools = np.where(is_last, self.first_upload, again)
        self.uploads: Ints = self.first_upload.astype(np.int64) + again

    def _uploads(self, streamed: Bools, num_slots: int) -> tuple[Bools, Bools]:
        """Streamed blocks that have left their slots since their forward, and since they ran again.

        A slot is taken from the block used least recently, so a block has left its own once as many others were used.
        """
        before: Ints = np.cumsum(streamed, axis=0) - streamed
        until: Ints = np.concatenate([before, before[-1:] + streamed[-1:]])
        blocks = np.arange(len(streamed))[:, None]
        begin = np.take_along_axis(until, blocks - self.place, axis=0)
        end = np.take_along_axis(until, blocks - self.place + self.length, axis=0)
        first: Bools = streamed & (until[-1] - begin > num_slots)
        again: Bools = streamed & (self.place < self.length - 1) & (end - until[1:] >= num_slots)
        first[: self._num_forward_only] = False
        return first, again


def reloaded(streamed: Bools, num_slots: int, num_forward_only: int) -> Bools:
    """Which of the streamed blocks (L x N) are uploaded again for the backward; the last still lie in their slots.

    The first ``num_forward_only`` have none.
    """
    after: Ints = np.cumsum(streamed[::-1], axis=0)[::-1] - streamed
    again: Bools = streamed & (after >= num_slots)
    again[:num_forward_only] = False
    return again


def _table(replay: WindowReplay, attribute: str, batch: ChoiceBatch) -> Ints:
    return np.ascontiguousarray(replay.option_table(attribute, batch).T).astype(np.int64)
