"""Rows of what forwards send to the host: when it is copied, and what waits for its slots.

Written for ``time_rows``, whose letters these are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pulp

from lazysched.solver.decisions import Expression
from lazysched.solver.slot_rows import SlotChain, freeing_place
from lazysched.solver.window_durations import ZERO

if TYPE_CHECKING:
    from lazysched.solver.time_rows import TimeRows


class _OutgoingSlot(NamedTuple):
    """The slot that one micro-batch of a window takes for what leaves.

    Attributes:
        taken_by: which micro-batch, counted from 0.
        back: of the window that had it before, which micro-batch, counted from the last.
        chain: when the slot is free.
    """

    taken_by: int
    back: int
    chain: SlotChain


class SaveRows:
    """Inputs that leave alone are there when the block before has made them, all else after the block's forward.

    Inputs have one slot more, for they lie among hidden states.
    """

    def __init__(self, rows: TimeRows) -> None:
        self.rows, self.problem, self.decisions = rows, rows.problem, rows.decisions
        self.instance, self.m = rows.instance, rows.m
        options = [option for own in self.instance.saves for option in own]
        self._longest_input_s = max(o.save_s * o.leaves_early for o in options)

    def add(self) -> None:
        """All rows."""
        rows = self.rows
        made, all_ = self._outgoing_slots("ss", rows.made_slots), self._outgoing_slots("hs", rows.leaving_slots)
        hidden_s, made_end = self._spare_hidden_s(), rows.tc[0] + 0
        for w in rows.forward_blocks:
            stays, early = rows.stays(w), rows.of_saving(w, rows.forward_blocks, "leaves_early")
            for slots, let_off_s in ((made, rows.backlog_s * (stays + early)), (all_, hidden_s[w])):
                for slot in slots:
                    self._wait_for_slot(w, slot, let_off_s)
            self._own_save_rows(w, stays + early, made_end, hidden_s[w])
            made_end = self._made_end(w, stays + early, made_end)
            for slots, end, idle in ((made, made_end, stays + early), (all_, rows.saves_end(w), stays)):
                for slot in slots:
                    slot.chain.use(w, end - (slot.back - 1) * rows.save[w], idle)

    def _wait_for_slot(self, w: int, slot: _OutgoingSlot, let_off_s: Expression) -> None:
        """The micro-batch that takes the slot starts when it is free, or as much earlier as it is let off."""
        rows = self.rows
        if slot.chain.free is None:
            return
        free = slot.chain.free - let_off_s
        if slot.taken_by == 0:
            self.problem += rows.tc[w] >= free
        else:
            self.problem += rows.tc[w + 1] >= free + (1 - slot.taken_by / self.m) * rows.comp[w]

    def _outgoing_slots(self, letter: str, num_slots: int) -> list[_OutgoingSlot]:
        """Of a window's first micro-batch, and of its last that takes a slot from a window before."""
        found = []
        for taken_by in sorted({0, min(self.m, num_slots) - 1}):
            place = freeing_place(num_slots - taken_by, self.m)
            name = f"{letter}l" if taken_by else letter
            chain = SlotChain(self.problem, name, place.windows, self.rows.backlog_s)
            found.append(_OutgoingSlot(taken_by, place.back, chain))
        return found

    def _made_end(self, w: int, early: Expression, before: Expression) -> Expression:
        """When what blocks up to here made for the host is there.

        Inputs that leave alone may still be queued behind it, in all hidden slots that there are, and hold nothing up.
        """
        rows = self.rows
        end = self.problem.add_variable(f"me_{w}", 0)
        made_s = self.decisions.save(w - 1, lambda o: o.save_s * (not o.leaves_early))
        self.problem += end >= before + self.m * made_s
        queue_s = (rows.leaving_slots + self.m * (rows.head - w + 1)) * self._longest_input_s
        self.problem += end >= rows.saves_end(w) - queue_s * early
        return 1 * end

    def _spare_hidden_s(self) -> dict[int, Expression]:
        """Forward window -> copying to the host that it may leave undone, for hidden states have more slots yet.

        Those of all inputs that stay on the GPU are there from the start, and so are a segment's inner ones. In each an
        input may still be leaving; with all that a block saves, no more than have slots of what leaves.
        """
        rows = self.rows
        costs = [(o.save_s + o.write_s, o.leaves_early) for options in self.instance.saves for o in options]
        input_s = max((cost_s for cost_s, early in costs if early), default=0.0)
        most_s = rows.made_slots * max(0.0, *(cost_s - input_s for cost_s, _ in costs))
        sent_s, spare = ZERO, self._spare_inner()
        before_s: dict[int, Expression] = {}
        for w in rows.forward_blocks:
            before_s[w] = sent_s
            sent_s = sent_s + self.m * self.decisions.save(w - 1, lambda o: max(0.0, o.save_s + o.write_s - input_s))
        result: dict[int, Expression] = {}
        for w in reversed(rows.forward_blocks):
            spare = spare + self.decisions.save(w - 1, lambda o: float(o.kept_input_gb > 0))
            large = self.problem.add_variable(f"ls_{w}", 0, most_s)
            self.problem += large <= before_s[w]
            self.problem += large <= most_s * spare
            result[w] = self.m * input_s * spare + large
        return result

    def _spare_inner(self) -> Expression:
        """Hidden slots of what lies inside a segment."""
        if not self.instance.has_segments:
            return ZERO
        most = max(o.segment for options in self.instance.saves for o in options) - 1
        inner = self.problem.add_variable("ih", 0, most)
        blocks = range(self.rows.num_blocks)
        self.problem += inner <= pulp.lpSum(self.decisions.save(i, lambda o: float(o.place > 0)) for i in blocks)
        return 1 * inner

    def _own_save_rows(self, w: int, early: Expression, made_end: Expression, spare_s: Expression) -> None:
        """When the copies of a window run, and what the window itself waits for; ``early`` if they make nothing new."""
        rows = self.rows
        begun, before = rows.first_end(w), rows.first_end(w - 1)
        self.problem += rows.ty[w] >= before
        self.problem += rows.ty[w] >= begun - rows.off_s * early
        self.problem += rows.saves_end(w) >= rows.compute_end(w - 1) + rows.save[w]
        self.problem += rows.saves_end(w) >= rows.compute_end(w) + rows.save[w] - rows.off_s * early
        self.problem += rows.ty[w + 1] >= rows.saves_end(w)
        # Copies stand in one piece, as late as their last must be; the first may have been long before.
        one_s = rows.comp[w] * (1 / self.m)
        made = rows.made_slots, (begun, made_end), rows.backlog_s * early
        all_ = (
            rows.leaving_slots,
            (before, *rows.copied_before(w)),
            rows.backlog_s * rows.stays(w) + spare_s,
        )
        for num_slots, starts, off_s in (made, all_):
            for start in starts if self.m > num_slots else ():
                waited = start + (self.m - num_slots) * rows.save[w] + (self.m - num_slots - 1) * self._turn_s(w)
                self.problem += rows.tc[w + 1] >= waited + one_s - off_s

    def _turn_s(self, w: int) -> Expression:
        """With one slot, the forward that comes between two copies of what the window makes; else 0."""
        if self.rows.made_slots > 1:
            return ZERO
        return self.decisions.save(w - 1, lambda o: o.forward_s * (o.leaves and not o.leaves_early))
