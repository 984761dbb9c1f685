"""What the windows of a step take on each engine, as expressions of the decisions: the coefficients of ``time_rows``.

Windows w: 0 embedding, 1..L blocks forward, L+1 head, L+2..2L+1 blocks backward in reverse, 2L+2 embedding backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import pulp

from lazysched.solver.decisions import Decisions, Expression
from lazysched.solver.instance import Instance
from lazysched.solver.options import ON_HOST, STREAMED, StageCosts, StateChoice

ZERO = pulp.LpAffineExpression()


class WindowDurations:
    """Durations in seconds by window, and what tells whether a row is about a block.

    Attributes:
        comp, load, save, fetch, grads: as in the legend of ``time_rows``.
        recompute: of ``comp``, what runs again before the backward.
        trained: per forward window, whether its stage has a gradient.
        turn: window from which on no block computes: nothing before is trained.
        waiting: block -> 1 if it still lies in a slot when the backward begins, though it is none of the last.
        longest_s: the longest window of a block.
        made_slots, leaving_slots: of what forwards make and send away, and of all that leaves. Inputs alone lie among
            hidden states: with a lag of 0 they may have the slot of one that waits on the GPU later.
        horizon_s: what a slot can be ahead of the windows that share it; its rows bind where all of these use it.
        off_s: what an engine's queue to the host can be behind those that do not wait for it.
    """

    def __init__(self, problem: pulp.LpProblem, instance: Instance, decisions: Decisions) -> None:
        self.problem: pulp.LpProblem = problem
        self.instance, self.decisions = instance, decisions
        candidate = instance.candidate
        self.waits_for_norm = instance.update.waits_for_norm
        self.m, self.depth, self.lag = candidate.accumulation, candidate.prefetch_depth, candidate.d2h_lag
        self.made_slots, self.leaving_slots = self.lag + 1, max(self.lag, 1) + 2
        self.num_blocks = instance.num_blocks
        self.head = self.num_blocks + 1
        self.num_windows = 2 * self.num_blocks + 3
        self.windows = range(self.num_windows)
        self.forward_blocks = range(1, self.head)
        self.backward_blocks = range(self.head + 1, self.num_windows - 1)
        self.turn = self.num_windows - 1 - instance.num_forward_only
        self.trained = [costs.is_trained for costs in (instance.embed, *instance.blocks, instance.head)]
        self.comp = [self._compute_s(w) + self._early_gpu_update_s(w) for w in self.windows]
        self.recompute = [self.m * self.of_saving(w, self.backward_blocks, "recompute_s") for w in self.windows]
        self.waiting = self._waiting_at_turn()
        self.load = [self._load_s(w) for w in self.windows]
        self.grads = [self.of_gradient(w, lambda c: c.grads_s, gpu=False) for w in self.windows]
        self.save = [self.of_saving(w, self.forward_blocks, "save_s") for w in self.windows]
        self.fetch = [self.of_saving(w, self.backward_blocks, "fetch_s") for w in self.windows]
        each = (max(o.forward_s, o.backward_s) for options in instance.saves for o in options)
        self.longest_s = max(each) * self.m
        longest_load_s = max(costs.load_s for costs in instance.blocks)
        # A forward may wait for copies, by turns with them where there is one slot.
        self.horizon_s = (self.depth + 2) * max(self.longest_s, longest_load_s, self.backlog_s)
        self.off_s = self.horizon_s + (self.lag + 3) * self.m * self._longest_copy_s()

    def block(self, window: int) -> int | None:
        """Block of a window; None for embedding and head."""
        if window in self.forward_blocks:
            return window - 1
        return self.num_windows - 2 - window if window in self.backward_blocks else None

    def _compute_s(self, window: int) -> Expression:
        block, instance = self.block(window), self.instance
        if block is None:
            fixed = {0: self.m * instance.embed_forward_s, self.head: instance.head_s}
            return ZERO + fixed.get(window, instance.embed_backward_s)
        if window < self.head:
            return self.decisions.save(block, lambda o: self.m * o.forward_s)
        return self.decisions.save(block, lambda o: self.m * o.backward_s) + instance.blocks[block].norm_s

    def _early_gpu_update_s(self, window: int) -> Expression:
        """Update on the GPU that follows the gradient at once."""
        return ZERO if self.waits_for_norm else self.of_gradient(window, lambda c: c.gpu_update_s, gpu=True)

    def of_gradient(self, window: int, cost: Callable[[StageCosts], float], *, gpu: bool) -> Expression:
        """``cost`` of the stage whose gradient ``window`` ends, if the GPU (or else the host) updates it."""
        block = self.block(window)
        if window < self.head:
            return ZERO
        if block is None:
            is_head = window == self.head
            return self.decisions.ends_on(cost, gpu=gpu, embed=not is_head, head=is_head)
        choices: tuple[StateChoice, ...] = ("gpu",) if gpu else ON_HOST
        return self.decisions.state(block, cost, *choices)

    def _load_s(self, window: int) -> Expression:
        block = self.block(window)
        if block is None:
            if window == self.num_windows - 1:
                return ZERO
            return self.decisions.ends_on(lambda c: c.load_s, gpu=False, embed=window == 0, head=window != 0)
        if window < self.head:
            return self.decisions.state(block, lambda c: c.load_s, *ON_HOST)
        if self.held(window):
            return ZERO
        reload_s = self.instance.blocks[block].reload_s
        return self.decisions.state(block, lambda c: c.reload_s, *STREAMED) - reload_s * self.waiting.get(block, 0)

    def held(self, window: int) -> bool:
        """Whether the window is the backward of a block that, at the turn, still lies in its slot if it streams."""
        block = self.block(window)
        return block is not None and window > self.head and block >= self.num_blocks - self.depth - 1

    def _waiting_at_turn(self) -> dict[int, pulp.LpVariable]:
        """Block -> 1 if it is none of the last, but of the last that stream, and so still lies in a slot at the turn.

        As many are as there are slots. A block can be only if no block after it has to be uploaded again; with segments
        any may be.
        """
        first = self.num_blocks - self.depth - 1
        if first < 1:
            return {}
        streams = [self.decisions.state(i, lambda c: 1.0, *STREAMED) for i in range(self.num_blocks)]
        waiting = {i: self.problem.add_variable(f"wt_{i}", 0, 1) for i in range(self.instance.num_forward_only, first)}
        again: Expression = ZERO  # 1 if a block after this one is uploaded again
        for i in reversed(waiting):
            self.problem += waiting[i] <= streams[i]
            if not self.instance.has_segments:
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
            return ZERO
        return self.decisions.save(block, lambda option: float(getattr(option, attribute)))

    def stays(self, window: int) -> Expression:
        """1 if in this window nothing of its block is sent to the host or fetched, else 0."""
        block, forward = self.block(window), window < self.head
        if block is None:
            return ZERO + 1
        return self.decisions.save(block, lambda o: float(not (o.leaves if forward else o.returns)))

    def ends_segment(self, window: int) -> Expression:
        """1 if a segment of several blocks runs again in this window, before the backward of its last block, else 0."""
        block = self.block(window)
        if block is None or window < self.head or not self.instance.has_segments:
            return ZERO
        return self.decisions.save(block, lambda o: float(o.segment > 1 and o.place == o.segment - 1))

    def idle(self, window: int) -> Expression:
        """More than 0 if the slots of fetched tensors are not used by this window as by others."""
        return self.stays(window) + self.ends_segment(window)

    def _longest_copy_s(self) -> float:
        """To the host, of what a block saves or of a gradient."""
        saves = (option.save_s for options in self.instance.saves for option in options)
        ends = (self.instance.embed, self.instance.head)
        return max(*saves, *(costs.grads_s for costs in (*self.instance.blocks, *ends)))

    @cached_property
    def backlog_s(self) -> float:
        """Most copying to the host that a block which sends nothing away has not to wait for."""
        return self.m * max(o.save_s + o.forward_s for options in self.instance.saves for o in options)

    def late_s(self) -> float:
        """Most by which gradients arrive later than ``compute`` ends, if that of the embedding does not leave.

        Each block that sends one waits for a slot, and these hold so many.
        """
        grads_s = max(costs.grads_s for costs in self.instance.blocks)
        return (self.lag + 1) * grads_s + self.instance.head.grads_s

    @cached_property
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
