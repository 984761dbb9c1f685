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

from collections.abc import Callable

import pulp

from lazysched.solver.decisions import Decisions, Expression
from lazysched.solver.file_rows import FileRows
from lazysched.solver.instance import Instance
from lazysched.solver.options import ON_HOST, STREAMED, StageCosts, StateChoice
from lazysched.solver.segment_rows import SegmentRows
from lazysched.solver.slot_rows import SlotChain, freeing_place

_ZERO = pulp.LpAffineExpression()


def add_time_rows(problem: pulp.LpProblem, instance: Instance, decisions: Decisions) -> pulp.LpVariable:
    """Add all rows; returns T."""
    return TimeRows(problem, instance, decisions).build()


class TimeRows:
    """Durations per window as expressions, then the rows of each engine."""

    def __init__(self, problem: pulp.LpProblem, instance: Instance, decisions: Decisions) -> None:
        self.problem, self.instance, self.decisions = problem, instance, decisions
        candidate = instance.candidate
        self.waits_for_norm = instance.update.waits_for_norm
        self.m, self.depth, self.lag = candidate.accumulation, candidate.prefetch_depth, candidate.d2h_lag
        self.num_blocks = instance.num_blocks
        self.head = self.num_blocks + 1
        self.num_windows = 2 * self.num_blocks + 3
        self.windows = range(self.num_windows)
        self.forward_blocks = range(1, self.head)
        self.backward_blocks = range(self.head + 1, self.num_windows - 1)
        self.turn = self.num_windows - 1 - instance.num_forward_only
        """Window from which on no block computes: nothing before is trained."""
        self.trained = [costs.is_trained for costs in (instance.embed, *instance.blocks, instance.head)]
        """Per forward window, whether its stage has a gradient."""
        self.comp = [self._compute_s(w) + self._early_gpu_update_s(w) for w in self.windows]
        self.recompute = [self.m * self.of_saving(w, self.backward_blocks, "recompute_s") for w in self.windows]
        self.waiting = self._waiting_at_turn()
        self.load = [self._load_s(w) for w in self.windows]
        self.again: list[Expression] = [_ZERO] * self.num_windows
        self.grads = [self._of_gradient(w, lambda c: c.grads_s, gpu=False) for w in self.windows]
        self.save = [self.of_saving(w, self.forward_blocks, "save_s") for w in self.windows]
        self.fetch = [self.of_saving(w, self.backward_blocks, "fetch_s") for w in self.windows]
        self.longest_s = max(o.backward_s for options in instance.saves for o in options) * self.m
        self.horizon_s = (self.depth + 2) * self.longest_s
        """What a slot can be ahead of the windows that share it; rows of slots bind where all of these use them."""
        self.off_s = self.horizon_s + (self.lag + 3) * self.m * self._longest_copy_s()
        """What an engine's queue to the host can be behind those that do not wait for it."""
        self.tc = self._starts("tc")
        self.tx = self._starts("tx", may_precede_step=True)
        self.ty = self._starts("ty")
        self.period = self.problem.add_variable("T", 0)
        self.segments = SegmentRows(self) if instance.has_segments else None
        self.te = self.problem.add_variable("te", 0)
        self.fetches: dict[int, pulp.LpVariable] = {}
        """Per window, when the first fetch starts."""
        self.updates: list[tuple[pulp.LpVariable, Expression]] = []
        """End and duration of the host's updates, in forward order or, where none waits for the norm, as they come."""

    def build(self) -> pulp.LpVariable:
        """All rows; returns T."""
        self._compute_rows()
        self._upload_rows()
        self._fetch_rows()
        self._save_rows()
        self._gradient_rows()
        if self.waits_for_norm:
            self._update_rows()
        else:
            self._early_update_rows()
        if self.segments is not None:
            self.segments.add()
        if self.instance.uses_files:
            FileRows(self).add()
        return self.period

    def _starts(self, letter: str, may_precede_step: bool = False) -> list[pulp.LpVariable]:
        return [self.problem.add_variable(f"{letter}_{w}", None if may_precede_step else 0) for w in self.windows]

    # ---- durations

    def block(self, window: int) -> int | None:
        """Block of a window; None for embedding and head."""
        if window in self.forward_blocks:
            return window - 1
        return self.num_windows - 2 - window if window in self.backward_blocks else None

    def _compute_s(self, window: int) -> Expression:
        block, instance = self.block(window), self.instance
        if block is None:
            fixed = {0: self.m * instance.embed_forward_s, self.head: instance.head_s}
            return _ZERO + fixed.get(window, instance.embed_backward_s)
        if window < self.head:
            return self.decisions.save(block, lambda o: self.m * o.forward_s)
        return self.decisions.save(block, lambda o: self.m * o.backward_s) + instance.blocks[block].norm_s

    def _early_gpu_update_s(self, window: int) -> Expression:
        """Update on the GPU that follows the gradient at once."""
        return _ZERO if self.waits_for_norm else self._of_gradient(window, lambda c: c.gpu_update_s, gpu=True)

    def _of_gradient(self, window: int, cost: Callable[[StageCosts], float], *, gpu: bool) -> Expression:
        """``cost`` of the stage whose gradient ``window`` ends, if the GPU (or else the host) updates it."""
        block = self.block(window)
        if window < self.head:
            return _ZERO
        if block is None:
            is_head = window == self.head
            return self.decisions.ends_on(cost, gpu=gpu, embed=not is_head, head=is_head)
        choices: tuple[StateChoice, ...] = ("gpu",) if gpu else ON_HOST
        return self.decisions.state(block, cost, *choices)

    def _load_s(self, window: int) -> Expression:
        block = self.block(window)
        if block is None:
            if window == self.num_windows - 1:
                return _ZERO
            return self.decisions.ends_on(lambda c: c.load_s, gpu=False, embed=window == 0, head=window != 0)
        if window < self.head:
            return self.decisions.state(block, lambda c: c.load_s, *ON_HOST)
        if self.held(window):
            return _ZERO
        reload_s = self.instance.blocks[block].reload_s
        return self.decisions.state(block, lambda c: c.reload_s, *STREAMED) - reload_s * self.waiting.get(block, 0)

    def held(self, window: int) -> bool:
        """Whether the window is the backward of a block that, at the turn, still lies in its slot if it streams."""
        block = self.block(window)
        return block is not None and window > self.head and block >= self.num_blocks - self.depth - 1

    def _waiting_at_turn(self) -> dict[int, pulp.LpVariable]:
        """Block -> 1 if it is none of the last, but of the last that stream, and so still lies in a slot at the turn.

        As many are as there are slots. A block can be only if no block after it has to be uploaded again. With segments
        all are taken to be uploaded again.
        """
        first = self.num_blocks - self.depth - 1
        if self.instance.has_segments or first < 1:
            return {}
        streams = [self.decisions.state(i, lambda c: 1.0, *STREAMED) for i in range(self.num_blocks)]
        waiting = {i: self.problem.add_variable(f"wt_{i}", 0, 1) for i in range(self.instance.num_forward_only, first)}
        again: Expression = _ZERO  # 1 if a block after this one is uploaded again
        for i in reversed(waiting):
            self.problem += waiting[i] <= streams[i]
            self.problem += waiting[i] <= 1 - again
            later, again = again, self.problem.add_variable(f"ua_{i}", 0)
            self.problem += again >= later
            self.problem += again >= streams[i] - waiting[i]
        self.problem += pulp.lpSum(waiting.values()) + pulp.lpSum(streams[first:]) <= self.depth + 1
        return waiting

    def of_saving(self, window: int, blocks: range, attribute: str) -> Expression:
        """An attribute of the save option of the window's block, 0 outside ``blocks``."""
        block = self.block(window)
        if block is None or window not in blocks:
            return _ZERO
        return self.decisions.save(block, lambda option: float(getattr(option, attribute)))

    def _stays(self, window: int) -> Expression:
        """1 if in this window nothing of its block is sent to the host or fetched, else 0."""
        block, forward = self.block(window), window < self.head
        if block is None:
            return _ZERO + 1
        return self.decisions.save(block, lambda o: float(not (o.leaves if forward else o.returns)))

    def ends_segment(self, window: int) -> Expression:
        """1 if a segment of several blocks runs again in this window, before the backward of its last block, else 0."""
        block = self.block(window)
        if block is None or window < self.head or self.segments is None:
            return _ZERO
        return self.decisions.save(block, lambda o: float(o.segment > 1 and o.place == o.segment - 1))

    # ---- rows

    def _compute_rows(self) -> None:
        self.problem += self.tc[0] == 0
        for w in self.windows[:-1]:
            self.problem += self.tc[w + 1] >= self.tc[w] + self.comp[w]
            # Where a segment runs again before, ``segment_rows`` say what waits for what.
            self.problem += self.tc[w] >= self.tx[w] + self.load[w] - self.horizon_s * self.ends_segment(w)
        end = self._compute_end(self.num_windows - 1)
        if self.waits_for_norm:
            end += pulp.lpSum(self._of_gradient(w, lambda c: c.gpu_update_s, gpu=True) for w in self.windows)
        self.problem += self.period >= end

    def _compute_end(self, window: int) -> Expression:
        return self.tc[window] + self.comp[window]

    def _micro_batch_end(self, window: int, back: int) -> Expression:
        """End of the compute of the ``back``-th last micro-batch of a window."""
        again = self.recompute[window]
        return self.tc[window] + again + ((self.m - back + 1) / self.m) * (self.comp[window] - again)

    def _upload_rows(self) -> None:
        """Slots are free once the stage that streamed through them p + 1 streamed stages before has computed."""
        for w in self.windows[self.depth + 1 :]:
            if self.block(w) is None or self.held(w) or w >= self.turn:
                continue
            gate = w - self.depth - 1
            between = [self.block(k) for k in range(gate, w + 1)]
            # A stage in between that does not stream leaves its slot to this one, which may start long before.
            idle = [1 - self.decisions.state(b, lambda c: 1.0, *STREAMED) for b in between if b is not None]
            if w > self.head:
                idle += [self.waiting[b] for b in between[-1:] if b in self.waiting]
            self.problem += self.tx[w] >= self._compute_end(gate) - self.horizon_s * pulp.lpSum(idle)

    def _fetch_rows(self) -> None:
        """Uploads and fetches share one engine, in the order in which the program issues them.

        With one micro-batch: first fetches(w), upload(w). With more: upload(w), rest of fetches(w-1), first fetches(w).
        Of the uploads for a segment that runs again, one comes before its fetches.
        """
        first = min(self.depth + 1, self.m)
        place = freeing_place(self.depth + 1, self.m)
        self._fetch_slots = SlotChain(self.problem, "fs", place.windows, self.horizon_s)
        end: Expression | None = None  # of whatever the engine did last
        for w in self.windows:
            fetches = w in self.backward_blocks
            if fetches and self.m == 1:
                end = self._first_fetches(w, first, end)
            if end is not None:
                self.problem += self.tx[w] >= end
            end = self.tx[w] + self.load[w]
            if w - 1 in self.backward_blocks and self.m > first:
                end = self._remaining_fetches(w - 1, first, end)
            if fetches and self.m > 1:
                end = self._first_fetches(w, first, end)
            if fetches:  # a segment that runs again has slots for all micro-batches
                idle = self._stays(w) + self.ends_segment(w)
                self._fetch_slots.use(w, self._micro_batch_end(w, place.back), idle)
            end += self.again[w]
        if not all(self.trained):  # else uploads of the next step wait for updates, and those for all of this
            self.problem += self.tx[0] + self.period >= end
            self.problem += self.tx[0] + self.period >= self._batch_read_end()

    def _batch_read_end(self) -> Expression:
        """When the step is done with its batch: the next one's, which comes before all uploads, takes its place."""
        last, instance = (self.num_windows - 1 if self.trained[0] else self.head), self.instance
        variant = instance.embed_variant if self.trained[0] else instance.head_variant
        return self.tc[last] + self.m * variant.backward.seconds

    def _first_fetches(self, window: int, first: int, before: Expression) -> Expression:
        """The fetches of a window that may run before it computes; returns their end."""
        start = self.fetches[window] = self.problem.add_variable(f"ta_{window}", None)
        self.problem += start >= before
        if self._fetch_slots.free is not None:
            idle = self._stays(window) + self.ends_segment(window)
            self.problem += start >= self._fetch_slots.free - self.horizon_s * idle
        saved = self.num_windows - 1 - window  # the window that sent it away
        idle_s = self.off_s * self._stays(window)
        self.problem += start >= self.ty[saved] + self.save[saved] - idle_s
        self.problem += start + self.m * self.fetch[window] >= self.saves_end(saved) + self.fetch[window] - idle_s
        self.problem += self.tc[window] >= start + self.fetch[window]
        end = start + first * self.fetch[window]
        rest_s = ((self.m - first + 1) / self.m) * self.comp[window]
        self.problem += self.tc[window + 1] >= end + rest_s - self.longest_s * self._stays(window)
        return end

    def _remaining_fetches(self, window: int, first: int, before: Expression) -> Expression:
        """Fetches of a window that wait for its own micro-batches to free their slots; returns their end."""
        start = self.problem.add_variable(f"tr_{window}", 0)
        one_s = self.comp[window] * (1 / self.m)
        stays = (2 * self.longest_s / self.m) * (self._stays(window) + self.ends_segment(window))
        self.problem += start >= before
        self.problem += start >= self.tc[window] + one_s - stays
        end = start + (self.m - first) * self.fetch[window]
        self.problem += self.tc[window + 1] >= end + one_s - stays
        return end

    def saves_end(self, window: int) -> Expression:
        """When what the window saved is on the host."""
        return self.ty[window] + self.m * self.save[window]

    def _save_rows(self) -> None:
        """Inputs that leave alone are there when the block before has made them, all else after the block's forward.

        They have one slot more, for they lie among hidden states.
        """
        made, all_ = (self._outgoing_slots(letter, count) for letter, count in (("ss", 1), ("hs", 2)))
        for w in self.forward_blocks:
            stays, early = self._stays(w), self.of_saving(w, self.forward_blocks, "leaves_early")
            for slots, idle in ((made, stays + early), (all_, stays)):
                if slots.free is not None:
                    self.problem += self.tc[w] >= slots.free - self._backlog_s() * idle
            self._own_save_rows(w, stays + early)
            for slots, idle, num_slots in ((made, stays + early, self.lag + 1), (all_, stays, self.lag + 2)):
                back = freeing_place(num_slots, self.m).back
                slots.use(w, self.saves_end(w) - (back - 1) * self.save[w], idle)

    def _outgoing_slots(self, letter: str, beyond_lag: int) -> SlotChain:
        place = freeing_place(self.lag + beyond_lag, self.m)
        return SlotChain(self.problem, letter, place.windows, self._backlog_s())

    def _own_save_rows(self, w: int, early: Expression) -> None:
        """When the copies of a window run, and what the window itself waits for; ``early`` if they make nothing new."""
        begun, before = (self.tc[k] + self.comp[k] * (1 / self.m) for k in (w, w - 1))
        self.problem += self.ty[w] >= before
        self.problem += self.ty[w] >= begun - self.off_s * early
        self.problem += self.saves_end(w) >= self._compute_end(w - 1) + self.save[w]
        self.problem += self.saves_end(w) >= self._compute_end(w) + self.save[w] - self.off_s * early
        self.problem += self.ty[w + 1] >= self.saves_end(w)
        # Copies stand in one piece, as late as their last must be; the first may have been long before.
        engine = [self.saves_end(w - 1)] if w - 1 in self.forward_blocks else []
        one_s = self.comp[w] * (1 / self.m)
        for num_slots, first, idle in ((self.lag + 1, begun, early), (self.lag + 2, before, self._stays(w))):
            for start in (first, *engine) if self.m > num_slots else ():
                waited = start + (self.m - num_slots) * self.save[w]
                self.problem += self.tc[w + 1] >= waited + one_s - self._backlog_s() * idle

    def _longest_copy_s(self) -> float:
        """To the host, of what a block saves or of a gradient."""
        saves = (option.save_s for options in self.instance.saves for option in options)
        ends = (self.instance.embed, self.instance.head)
        return max(*saves, *(costs.grads_s for costs in (*self.instance.blocks, *ends)))

    def _backlog_s(self) -> float:
        """Most copying to the host that a block which sends nothing away has not to wait for."""
        return self.m * max(o.save_s + o.forward_s for options in self.instance.saves for o in options)

    def _gradient_rows(self) -> None:
        """Gradients leave after their window; their slot must be free again when ``lag + 1`` later ones need one."""
        slots = SlotChain(self.problem, "gs", self.lag + 1, self.off_s)
        for w in range(self.head, self.num_windows):
            end = self.ty[w] + self.grads[w]
            self.problem += self.ty[w] >= self._compute_end(w)
            self.problem += (self.ty[w + 1] if w + 1 < self.num_windows else self.te) >= end
            if w in self.backward_blocks and self.trained[self.num_windows - 1 - w]:
                idle = self._of_gradient(w, lambda c: 1.0, gpu=True)
                if slots.free is not None:
                    # With accumulation only the rounding at the end of the window needs the slot.
                    start = self.tc[w] + self.recompute[w] if self.m == 1 else self.tc[w + 1]
                    self.problem += start >= slots.free - self.off_s * idle
                slots.use(w, end, idle)

    def _update_rows(self) -> None:
        """The upload for the next step waits for its update, and updates wait for the clip factor."""
        self.problem += self.te >= self._compute_end(self.num_windows - 1)
        before: Expression = _ZERO
        for w in range(self.head + 1):
            block = self.block(w)
            if block is None:
                own = self.decisions.ends_on(lambda c: c.cpu_update_s, gpu=False, embed=w == 0, head=w != 0)
            else:
                own = self.decisions.state(block, lambda c: c.cpu_update_s, *ON_HOST)
            if w > 0:  # while it and those before it are updated, the weights of those before are on their way
                own += self.instance.copy_slowdown * (self.load[w - 1] + self.m * self.save[w - 1])
            updated = self.problem.add_variable(f"cc_{w}", 0)
            self.problem += updated >= before + own
            if self.trained[w]:
                self.problem += self.tx[w] + self.period >= self.te + updated
            self.updates.append((updated, own))
            before = updated
        self.problem += self.period >= before

    def _early_update_rows(self) -> None:
        """Updates follow their gradients in the order of the backward; the next step's upload waits for its own."""
        before, total = _ZERO, _ZERO
        for w in range(self.head, self.num_windows):
            own = self._of_gradient(w, lambda c: c.cpu_update_s, gpu=False)
            copied = self.again[w] + self.load[w] + self.grads[w] + self.m * self.fetch[w]
            own += self.instance.copy_slowdown * copied
            updated = self.problem.add_variable(f"cc_{w}", 0)
            self.problem += updated >= before + own
            if self.trained[self.num_windows - 1 - w]:
                self.problem += updated >= self.ty[w] + self.grads[w] + own
                # A stage that the GPU updates waits for none of this.
                free = self.longest_step_s() * self._of_gradient(w, lambda c: 1.0, gpu=True)
                self.problem += self.tx[self.num_windows - 1 - w] + self.period >= updated - free
            self.updates.append((updated, own))
            before, total = updated, total + own
        self.problem += self.period >= total

    def longest_step_s(self) -> float:
        """Longer than any sensible step: twice everything one after the other."""
        instance = self.instance
        stages = [instance.embed, instance.head, *instance.blocks]
        total_s = sum(2 * c.load_s + c.grads_s + c.norm_s + c.cpu_update_s + c.gpu_update_s for c in stages)
        total_s += sum(2 * c.read_weights_s + c.read_both_s + c.write_both_s for c in stages)
        for options in instance.saves:
            total_s += self.m * max(
                o.forward_s + o.backward_s + o.save_s + o.fetch_s + o.write_s + o.read_s for o in options
            )
        return 2 * (total_s + self.m * instance.embed_forward_s + instance.head_s + instance.embed_backward_s)
