"""Time rows of segments: uploads for blocks that run again before their segment's backward.

A segment runs again in the window of its last block's backward, before it. Uploads of that window are those of the
segment's other blocks, in order, then the last block's own; the last k of all stay in their slots (k = p + 1) and
serve their backwards, the others are uploaded again. Whether a block streams and whether it is in a segment are two
decisions, so uploads are variables with rows from below.

Legend (beside that of ``time_rows``):
    str[i]    1 if the weights of block i stream
    u[w]      load[w] of a block's backward where segments are possible (s)
    g[w][i]   upload of block i for the segment that runs again in w (s)
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pulp

from lazysched.solver.decisions import Expression
from lazysched.solver.options import STREAMED, SaveOption
from lazysched.solver.window_durations import ZERO

if TYPE_CHECKING:
    from lazysched.solver.time_rows import TimeRows


class SegmentRows:
    """Adds its rows to those of ``rows``; ``load`` and ``again`` of backward windows are its variables.

    Args:
        rows: whose decisions and starts exist.
    """

    def __init__(self, rows: TimeRows) -> None:
        self.rows, self.problem, self.decisions = rows, rows.problem, rows.decisions
        self.num_slots = rows.depth + 1
        self.lengths = sorted({o.segment for options in rows.instance.saves for o in options} - {1})
        self.streams = [self.decisions.state(i, lambda c: 1.0, *STREAMED) for i in range(rows.num_blocks)]
        self.load_s = [costs.reload_s for costs in rows.instance.blocks]
        for w in rows.backward_blocks:
            if not rows.held(w) or self._block(w) == rows.num_blocks - 1:
                rows.load[w] = self.problem.add_variable(f"u_{w}", 0)
            rows.again[w] = pulp.lpSum(self._before(w))

    def add(self) -> None:
        """All rows."""
        for w in self.rows.backward_blocks:
            self._own_rows(w)
            self._order_rows(w)
            self._fetch_rows(w)

    def _block(self, window: int) -> int:
        block = self.rows.block(window)
        assert block is not None
        return block

    def _in(self, block: int, length: int, place: int) -> Expression:
        """1 if the block has that place in a segment of that length, else 0."""

        def is_there(option: SaveOption) -> float:
            return float(option.segment == length and option.place == place)

        return self.decisions.save(block, is_there)

    def _at_turn(self, window: int, length: int) -> bool:
        """Whether blocks of the segment that runs again in ``window`` still lie in slots from their forward."""
        return self._block(window) == self.rows.num_blocks - 1 and length <= self.num_slots

    def _before(self, window: int) -> list[pulp.LpVariable]:
        """Uploads of the other blocks of a segment that runs again in this window."""
        last, uploads = self._block(window), []
        for length in self.lengths:
            if last % length != length - 1 or self._at_turn(window, length):
                continue
            for block in range(last - length + 1, last):
                uploads.append(self.problem.add_variable(f"g_{window}_{length}_{block}", 0))
                self._first_use_rows(uploads[-1], block, last, length)
        return uploads

    def _first_use_rows(self, upload: pulp.LpVariable, block: int, last: int, length: int) -> None:
        """``upload`` lasts as long as that of ``block`` if it is needed in the segment that ``last`` ends."""
        for needed in self._needs(block, last, length):
            self.problem += upload >= self.load_s[block] * needed

    def _needs(self, block: int, last: int, length: int) -> list[Expression]:
        """Expressions of which one is 1 if ``block`` is uploaded for the segment's second run, else all are 0 or less.

        It streams in that segment, and lies in no slot any more since its forward: of the blocks from the segment's
        first on, as many others as there are slots stream. Near the end these are few enough to go through all.
        """
        streams_there = self.streams[block] + self._in(last, length, length - 1) - 1
        if last < self.rows.num_blocks - 1 and block < self.rows.num_blocks - self.num_slots:
            return [streams_there - self._left(block)]
        others = [other for other in range(last - length + 1, self.rows.num_blocks) if other != block]
        return [
            streams_there + pulp.lpSum(self.streams[other] - 1 for other in used)
            for used in itertools.combinations(others, self.num_slots)
        ]

    def _own_rows(self, window: int) -> None:
        """Upload for the backward itself: of a segment's blocks but the last only where it has left its slot since."""
        rows, block = self.rows, self._block(window)
        if rows.held(window):
            for length in self.lengths if block == rows.num_blocks - 1 else ():
                if block % length == length - 1:
                    self._first_use_rows(rows.load[window], block, block, length)
            return
        load_s, stream = self.load_s[block], self.streams[block]

        def ran_again(option: SaveOption) -> float:
            return float(option.place < option.segment - 1)

        again = stream - self._left(block) - self.decisions.save(block, ran_again)
        self.problem += rows.load[window] >= load_s * again
        for length in self.lengths:
            place = block % length
            end = block - place + length
            after = range(block + 1, end if end <= rows.num_blocks else block + 1)  # no segment ends beyond the blocks
            for others in itertools.combinations(after, self.num_slots):
                used = pulp.lpSum(self.streams[other] for other in others)
                all_of = self._in(block, length, place) + stream + used - (1 + len(others))
                self.problem += rows.load[window] >= load_s * all_of

    def _left(self, block: int) -> Expression | pulp.LpVariable:
        """1 if the block still lies in its slot from the forward, else 0."""
        return self.rows.waiting.get(block, ZERO)

    def _order_rows(self, window: int) -> None:
        """The first block waits for its upload, the last block's backward for all of them."""
        rows, last = self.rows, self._block(window)
        own_s = rows.comp[window] - rows.recompute[window]
        uploaded = rows.tx[window] + rows.again[window] + rows.load[window]
        self.problem += rows.tc[window + 1] >= uploaded + own_s
        for length in self.lengths:
            if last % length != length - 1 or self._at_turn(window, length):
                continue
            first = last - length + 1
            ready = rows.tx[window] + self.load_s[first]
            for needed in self._needs(first, last, length):
                self.problem += rows.tc[window] >= ready - (rows.horizon_s + self.load_s[first]) * (1 - needed)

    def _fetch_rows(self, window: int) -> None:
        """The input that a segment runs again from is fetched once its first block has sent it."""
        rows, last = self.rows, self._block(window)
        for length in self.lengths:
            if last % length != length - 1:
                continue
            sent = rows.num_windows - 1 - window - (length - 1)
            off_s = rows.off_s * (1 - self._in(last, length, length - 1) + rows.stays(sent))
            for copied in rows.first_copies(sent):
                self.problem += rows.fetches[window] >= copied + rows.save[sent] - off_s
