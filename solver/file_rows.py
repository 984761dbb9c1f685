"""Time rows of what lives in files: two more engines, each first in, first out, in the order of the program.

Reads: in every window the weights of its stage, then what its block saved; updates read their state, after the last
window where they wait for the norm, else in the window that ends their gradient. Writes: what forward windows save,
then the state of one update after another.

Rows that hold only for what is in files are switched off elsewhere by the longest step, and rows of host slots where
a window in between uses none: the bound stays valid.

Legend (beside that of ``time_rows``; seconds):
    tn[w]    reads of window w start               read[w]   their duration
    tv[w]    writes of what window w saves start   write[w]  duration for one micro-batch
    tu[w]    read of the state for the update of forward window w starts
    ts[w]    its write starts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pulp

from lazysched.solver.decisions import Expression
from lazysched.staging import STATE_SLOTS

if TYPE_CHECKING:
    from lazysched.solver.options import StageCosts, StateChoice
    from lazysched.solver.time_rows import TimeRows


class FileRows:
    """Adds its rows to those of ``rows``, which are complete but for them."""

    def __init__(self, rows: TimeRows) -> None:
        self.rows, self.problem, self.decisions = rows, rows.problem, rows.decisions
        self.m, self.depth, self.lag, self.windows = rows.m, rows.depth, rows.lag, rows.windows
        self.off_s = rows.longest_step_s
        self.weights = [self._read_weights_s(w) for w in self.windows]
        self.saved = [rows.of_saving(w, rows.backward_blocks, "read_s") for w in self.windows]
        self.write = [rows.of_saving(w, rows.forward_blocks, "write_s") for w in self.windows]
        order = range(rows.head + 1) if rows.waits_for_norm else range(rows.num_windows - rows.head)
        # Place in ``rows.updates`` -> forward window of the stage.
        self.updated = list(order) if rows.waits_for_norm else [rows.head - k for k in order]
        self.read_state = [self._of_stage(w, lambda c, s: c.read_update_s(s)) for w in self.updated]
        self.write_state = [self._of_stage(w, lambda c, s: c.write_update_s(s)) for w in self.updated]
        self.tn = self._starts("tn", len(self.windows), None)
        self.tv = self._starts("tv", len(self.windows), 0)
        self.tu = self._starts("tu", len(self.updated), 0)
        self.ts = self._starts("ts", len(self.updated), 0)

    def add(self) -> None:
        """All rows."""
        self._read_rows()
        self._saved_rows()
        self._write_rows()
        self._state_rows()
        self._wrap_rows()

    def _starts(self, letter: str, count: int, least: float | None) -> list[pulp.LpVariable]:
        return [self.problem.add_variable(f"{letter}_{k}", least) for k in range(count)]

    # ---- durations and switches

    def _of_stage(self, window: int, cost: Callable[[StageCosts, StateChoice], float]) -> Expression:
        """``cost`` of the stage of a forward window and its state choice."""
        block = self.rows.block(window)
        if block is None:
            return self.decisions.ends_by_state(cost, embed=window == 0, head=window != 0)
        return self.decisions.by_state(block, cost)

    def _in_files(self, window: int) -> Expression:
        """1 if the weights of the window's stage are in files, else 0."""
        block = self.rows.block(window)
        if block is None and window == self.rows.num_windows - 1:
            return pulp.LpAffineExpression()
        return self._of_stage(window, _weights_in_files)

    def _state_in_files(self, place: int) -> Expression:
        return self._of_stage(self.updated[place], _state_in_files)

    def _files_saved(self, window: int) -> Expression:
        """1 if in this window something is saved to files, or read for its backward, else 0."""
        block, forward = self.rows.block(window), window < self.rows.head
        if block is None:
            return pulp.LpAffineExpression()
        return self.decisions.save(block, lambda o: float(o.tier == "nvme" and (o.leaves if forward else o.returns)))

    def _read_weights_s(self, window: int) -> Expression:
        if window == self.rows.num_windows - 1 or self.rows.held(window):
            return pulp.LpAffineExpression()
        reads_s, block = self._of_stage(window, _read_weights_s), self.rows.block(window)
        if window < self.rows.head or block not in self.rows.waiting:
            return reads_s
        least: pulp.LpVariable = self.problem.add_variable(f"rw_{window}", 0)
        left_s = self.rows.instance.blocks[block].read_weights_s * self.rows.waiting[block]
        self.problem += least >= reads_s - left_s
        return 1 * least

    def _reads_s(self, window: int) -> Expression:
        """All reads of a window."""
        own = self.weights[window] + self.m * self.saved[window]
        if self.rows.waits_for_norm or window < self.rows.head:
            return own
        return own + self.read_state[window - self.rows.head]

    def _unless(self, switch: Expression) -> Expression:
        """What switches a row off where ``switch`` is 0."""
        return self.off_s * (1 - switch)

    # ---- rows

    def _read_rows(self) -> None:
        rows = self.rows
        for w in self.windows[:-1]:
            self.problem += self.tn[w + 1] >= self.tn[w] + self._reads_s(w)
        for w in self.windows:
            self.problem += rows.tx[w] >= self.tn[w] + self.weights[w] - self._unless(self._in_files(w))
            gate = w - self.depth - 2
            if gate >= 0:
                others = pulp.lpSum(1 - self._in_files(k) for k in range(gate, w + 1))
                self.problem += self.tn[w] >= rows.tx[gate] + rows.load[gate] - self.off_s * others

    def _saved_rows(self) -> None:
        rows = self.rows
        for w in rows.backward_blocks:
            saved, off = rows.num_windows - 1 - w, self._unless(self._files_saved(w))
            read = self.tn[w] + self.weights[w]
            self.problem += rows.fetches[w] >= read + self.saved[w] - off
            self.problem += rows.fetch_ends[w] >= read + self.m * self.saved[w] + rows.fetch[w] - off
            for first in self._first_saved(saved):
                self.problem += read >= first + self.write[saved] - off
            self.problem += read + self.m * self.saved[w] >= self._written(saved) + self.saved[w] - off

    def _written(self, window: int) -> Expression:
        return self.tv[window] + self.m * self.write[window]

    def _first_saved(self, window: int) -> list[Expression]:
        """What the first write of a window waits for: those before it, and the first copy.

        Writes stand in one piece from ``tv`` on, as late as their last must be; the first may have been long before.
        """
        rows = self.rows
        copied = rows.tc[window] + rows.comp[window] * (1 / self.m) + rows.save[window]
        return [copied, *([self._written(window - 1)] if window - 1 in rows.forward_blocks else [])]

    def _write_rows(self) -> None:
        rows = self.rows
        for w in rows.forward_blocks:
            for first in self._first_saved(w):
                self.problem += self.tv[w] >= first
                behind = self.m - self.lag - 2  # micro-batches whose slots are needed again
                if behind > 0:
                    waited = first + behind * self.write[w] + rows.save[w]
                    self.problem += rows.saves_end(w) >= waited - self._unless(self._files_saved(w))
            self.problem += self._written(w) >= rows.saves_end(w) + self.write[w]
            self._slot_row(w)

    def _slot_row(self, window: int) -> None:
        """The first copy of a window waits for a slot: for the write of lag + 2 micro-batches before."""
        back, index = divmod(-self.lag - 2, self.m)
        where = window + back
        last_of_all = index == self.m - 1
        before = where if last_of_all else where - 1
        if before not in self.rows.forward_blocks:
            return
        freed = self._written(before) + (0 if last_of_all else (index + 1) * self.write[where])
        others = pulp.lpSum(1 - self._files_saved(k) for k in range(where, window + 1))
        self.problem += self.rows.ty[window] >= freed - self.off_s * others

    def _state_rows(self) -> None:
        """The update of a stage whose state is in files waits for the read, the write for the update."""
        rows, since = self.rows, self.rows.te if self.rows.waits_for_norm else 0
        last = self.windows[-1]
        for k in range(len(self.updated)):
            updated, own = rows.updates[k]
            if rows.waits_for_norm:
                earlier = self.tu[k - 1] + self.read_state[k - 1] if k else self.tn[last] + self._reads_s(last)
                self.problem += self.tu[k] >= earlier
            else:
                window = rows.head + k
                self.problem += self.tu[k] >= self.tn[window] + self._reads_s(window) - self.read_state[k]
            off = self._unless(self._state_in_files(k))
            self.problem += since + updated >= self.tu[k] + self.read_state[k] + own - off
            self.problem += self.ts[k] >= since + updated - off  # what is not in files holds no write up
            if k:
                self.problem += self.ts[k] >= self.ts[k - 1] + self.write_state[k - 1]
            if k >= STATE_SLOTS:
                others = pulp.lpSum(1 - self._state_in_files(j) for j in range(k - STATE_SLOTS, k + 1))
                freed = self.ts[k - STATE_SLOTS] + self.write_state[k - STATE_SLOTS]
                self.problem += self.tu[k] >= freed - self.off_s * others

    def _wrap_rows(self) -> None:
        """The next step's reads and writes follow those of this one, and weights are read once they are written."""
        rows, last = self.rows, self.windows[-1]
        ends = self.tu[-1] + self.read_state[-1] if rows.waits_for_norm else self.tn[last] + self._reads_s(last)
        self.problem += self.tn[0] + rows.period >= ends
        self.problem += self.tv[1] + rows.period >= self.ts[-1] + self.write_state[-1]
        for k, w in enumerate(self.updated):
            written = self.ts[k] + self.write_state[k]
            self.problem += self.tn[w] + rows.period >= written - self._unless(self._in_files(w))


def _read_weights_s(costs: StageCosts, choice: StateChoice) -> float:
    return costs.read_weights_s if choice == "nvme" else 0.0


def _weights_in_files(_: StageCosts, choice: StateChoice) -> float:
    return float(choice == "nvme")


def _state_in_files(costs: StageCosts, choice: StateChoice) -> float:
    return float(costs.record_gb(choice) > 0)
