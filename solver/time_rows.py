"""Time rows: when each window computes and when each engine serves it, over one cyclic step of period T.

Windows w: 0 embedding, 1..L blocks forward, L+1 head, L+2..2L+1 blocks backward in reverse, 2L+2 embedding backward;
the updates on the GPU follow. Where no update waits for the norm, they are part of the window that ends their gradient.
Every engine serves windows in their order, so no order has to be decided.

Legend (seconds; M micro-batches, p prefetch depth, q D2H lag):
    T        period of the step
    tc[w]    compute of window w starts              comp[w]  its duration, recomputation and gradient norm included
    tx[w]    upload of the weights of w starts       load[w]  its duration
                                                     again[w] before it, uploads for a segment that runs again in w
    ta[w]    first fetches of saved tensors for w    f[w]     duration of the fetch of one micro-batch
    tr[w]    the remaining fetches for w
    ty[w]    copies to the host for w start          save[w]  duration of one micro-batch, grads[w] of a gradient
    te       the clip factor is on the host: updates are released (exact clipping)
    cc[w]    CPU updates, slowed down by copies beside them, up to the stage of window w, in forward order; where no
             update waits for the norm: when the update of the stage whose gradient window w ends has ended, in the
             order of the backward
"""

from __future__ import annotations

import pulp

from lazysched.solver.decisions import Decisions, Expression
from lazysched.solver.file_rows import FileRows
from lazysched.solver.instance import Instance
from lazysched.solver.options import STREAMED
from lazysched.solver.save_rows import SaveRows
from lazysched.solver.segment_rows import SegmentRows
from lazysched.solver.slot_rows import SlotChain, freeing_place
from lazysched.solver.update_rows import add_update_rows
from lazysched.solver.window_durations import ZERO, WindowDurations


def add_time_rows(problem: pulp.LpProblem, instance: Instance, decisions: Decisions) -> pulp.LpVariable:
    """Add all rows; returns T."""
    return TimeRows(problem, instance, decisions).build()


class TimeRows(WindowDurations):
    """The rows of each engine.

    Attributes:
        again, tc, tx, ty, te, period: as in the legend.
        fetches: window -> when its first fetch starts.
        fetch_ends: window -> when its last fetch ends.
        updates: end and duration of the host's updates, in forward order or, where none waits for the norm, as they
            come.
    """

    def __init__(self, problem: pulp.LpProblem, instance: Instance, decisions: Decisions) -> None:
        super().__init__(problem, instance, decisions)
        self.again: list[Expression] = [ZERO] * self.num_windows
        self.tc = self._starts("tc")
        self.tx = self._starts("tx", may_precede_step=True)
        self.ty = self._starts("ty")
        self.period = self.problem.add_variable("T", 0)
        self.segments = SegmentRows(self) if instance.has_segments else None
        self.te = self.problem.add_variable("te", 0)
        self.fetches: dict[int, pulp.LpVariable] = {}
        self.fetch_ends: dict[int, Expression] = {}
        self.updates: list[tuple[pulp.LpVariable, Expression]] = []

    def build(self) -> pulp.LpVariable:
        """All rows; returns T."""
        self._compute_rows()
        self._upload_rows()
        self._fetch_rows()
        SaveRows(self).add()
        self._gradient_rows()
        add_update_rows(self)
        if self.segments is not None:
            self.segments.add()
        if self.instance.uses_files:
            FileRows(self).add()
        return self.period

    def _starts(self, letter: str, may_precede_step: bool = False) -> list[pulp.LpVariable]:
        return [self.problem.add_variable(f"{letter}_{w}", None if may_precede_step else 0) for w in self.windows]

    def _compute_rows(self) -> None:
        self.problem += self.tc[0] == 0
        for w in self.windows[:-1]:
            self.problem += self.tc[w + 1] >= self.tc[w] + self.comp[w]
            # Where a segment runs again before, ``segment_rows`` say what waits for what.
            self.problem += self.tc[w] >= self.tx[w] + self.load[w] - self.horizon_s * self.ends_segment(w)
        end = self.compute_end(self.num_windows - 1)
        if self.waits_for_norm:
            end += pulp.lpSum(self.of_gradient(w, lambda c: c.gpu_update_s, gpu=True) for w in self.windows)
        self.problem += self.period >= end

    def compute_end(self, window: int) -> Expression:
        """When the window has computed."""
        return self.tc[window] + self.comp[window]

    def _micro_batch_end(self, window: int, back: int) -> Expression:
        """End of the compute of the ``back``-th last micro-batch of a window."""
        again = self.recompute[window]
        return self.tc[window] + again + ((self.m - back + 1) / self.m) * (self.comp[window] - again)

    def _upload_rows(self) -> None:
        """Slots are free once the stage that streamed through them p + 1 streamed stages before has computed."""
        for w in self.windows[self.depth + 2 :]:
            if self.block(w) is None or self.held(w) or w >= self.turn:
                continue
            gate = w - self.depth - 1
            between = [self.block(k) for k in range(gate, w + 1)]
            # A stage in between that does not stream leaves its slot to this one, which may start long before.
            idle = [1 - self.decisions.state(b, lambda c: 1.0, *STREAMED) for b in between if b is not None]
            if w > self.head:
                idle += [self.waiting[b] for b in between[-1:] if b in self.waiting]
            self.problem += self.tx[w] >= self.compute_end(gate) - self.longest_step_s * pulp.lpSum(idle)

    def _fetch_rows(self) -> None:
        """Uploads and fetches share one engine, in the order in which the program issues them.

        A fetch is issued p + 1 micro-batches ahead, an upload p + 1 windows ahead: after the first fetches of window k,
        upload(k + shift), rest of fetches(k), first fetches(k + 1). Of the uploads for a segment that runs again, one
        comes before its fetches.
        """
        place = freeing_place(self.depth + 1, self.m)
        self._fetch_slots = SlotChain(self.problem, "fs", place.windows, self.longest_step_s)
        shift, ahead = self._order()
        # What is behind an upload for later windows must not hold up a window that fetches nothing.
        self._behind_s = self.longest_step_s if shift > 1 else 0.0
        end = self.tx[0] + self.load[0]  # of whatever the engine did last
        for w in range(1, self.num_windows + shift):
            k = w - shift
            fetches = k in self.backward_blocks
            if fetches:
                end = self._first_fetches(k, ahead, end)
                # A segment that runs again has slots for all micro-batches.
                self._fetch_slots.use(k, self._micro_batch_end(k, place.back), self.idle(k))
            if fetches and self.m > 1:
                end += self.again[k]
            if w in self.windows:
                self.problem += self.tx[w] >= end
                end = self.tx[w] + self.load[w]
            if fetches and self.m == 1:
                end += self.again[k]
            if fetches and self.m > ahead:
                end = self._remaining_fetches(k, ahead, end)
        if not all(self.trained):  # else uploads of the next step wait for updates
            self.problem += self.tx[0] + self.period >= self._batch_read_end()

    def _order(self) -> tuple[int, int]:
        """By how many windows the upload between a window's fetches is ahead, and how many of these come before it."""
        if self.instance.has_segments:
            return min(1, self.m - 1), min(self.depth + 1, self.m)
        return self.depth - self.depth // self.m, self.depth % self.m + 1

    def _batch_read_end(self) -> Expression:
        """When the step is done with its batch: the next one's, which comes before all uploads, takes its place."""
        last, instance = (self.num_windows - 1 if self.trained[0] else self.head), self.instance
        variant = instance.embed_variant if self.trained[0] else instance.head_variant
        return self.tc[last] + self.m * variant.backward.seconds

    def _first_fetches(self, window: int, first: int, before: Expression) -> Expression:
        """The ``first`` fetches of a window, which may run before it computes; returns their end."""
        start = self.fetches[window] = self.problem.add_variable(f"ta_{window}", None)
        self.problem += start >= before
        if self._fetch_slots.free is not None:
            idle = self.idle(window)
            self.problem += start >= self._fetch_slots.free - self.longest_step_s * idle
        saved = self.num_windows - 1 - window  # the window that sent it away
        idle_s = self.off_s * self.stays(window)
        # What a segment fetches was sent by its first block: ``segment_rows`` have a row for it.
        for copied in self.first_copies(saved):
            self.problem += start >= copied + self.save[saved] - idle_s - self.off_s * self.ends_segment(window)
        behind_s = self._behind_s * self.stays(window)
        self.problem += self.tc[window] >= start + self.fetch[window] - behind_s
        end = start + first * self.fetch[window]
        if 1 < self.m == first:  # the last may wait for its copy, with the first long there
            end = 1 * self.problem.add_variable(f"tf_{window}", None)
            self.problem += end >= start + first * self.fetch[window]
            self.problem += end >= self.saves_end(saved) + self.fetch[window] - idle_s
        rest_s = ((self.m - first + 1) / self.m) * self.comp[window]
        self.problem += self.tc[window + 1] >= end + rest_s - self.longest_s * self.stays(window) - behind_s
        self.fetch_ends[window] = end
        return end

    def _remaining_fetches(self, window: int, first: int, before: Expression) -> Expression:
        """The others, which wait for the window's own micro-batches to free their slots; returns their end."""
        start = self.problem.add_variable(f"tr_{window}", 0)
        one_s = self.comp[window] * (1 / self.m)
        stays = (2 * self.longest_s / self.m + self._behind_s) * self.idle(window)
        self.problem += start >= before
        if self.m > self.depth + 1:
            # An upload behind nothing may have been any time before, if its slot was free.
            self.problem += start >= self.tc[window] + one_s - self.longest_step_s * self.idle(window)
        end = start + (self.m - first) * self.fetch[window]
        saved_s = self.saves_end(self.num_windows - 1 - window)
        self.problem += end >= saved_s + self.fetch[window] - self.off_s * self.stays(window)
        self.problem += self.tc[window + 1] >= end + one_s - stays
        self.fetch_ends[window] = end
        return end

    def first_copies(self, window: int) -> list[Expression]:
        """What the first copy of a forward block's window comes after, if anything leaves there."""
        if self.m == 1:
            return [1 * self.ty[window]]
        # Copies stand in one piece, as late as their last must be; the first may have been long before.
        early = self.stays(window) + self.of_saving(window, self.forward_blocks, "leaves_early")
        begun, before = self.first_end(window), self.first_end(window - 1)
        return [before, begun - self.off_s * early, *self.copied_before(window)]

    def first_end(self, window: int) -> Expression:
        """When the window's first micro-batch has computed."""
        return self.tc[window] + self.comp[window] * (1 / self.m)

    def copied_before(self, window: int) -> list[Expression]:
        """When the copies of the block before, if there is one, are on the host."""
        return [self.saves_end(window - 1)] if window - 1 in self.forward_blocks else []

    def saves_end(self, window: int) -> Expression:
        """When what the window saved is on the host."""
        return self.ty[window] + self.m * self.save[window]

    def _gradient_rows(self) -> None:
        """Gradients leave after their window; their slot must be free again when ``lag + 1`` later ones need one."""
        slots = SlotChain(self.problem, "gs", self.lag + 1, self.off_s)
        for w in range(self.head, self.num_windows):
            end = self.ty[w] + self.grads[w]
            self.problem += self.ty[w] >= self.compute_end(w)
            self.problem += (self.ty[w + 1] if w + 1 < self.num_windows else self.te) >= end
            if w in self.backward_blocks and self.trained[self.num_windows - 1 - w]:
                idle = self.of_gradient(w, lambda c: 1.0, gpu=True)
                if slots.free is not None:
                    # With accumulation only the rounding at the end of the window needs the slot.
                    start = self.tc[w] + self.recompute[w] if self.m == 1 else self.tc[w + 1]
                    self.problem += start >= slots.free - self.off_s * idle
                slots.use(w, end, idle)
