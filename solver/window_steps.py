"""The engines of the window replay, step after step; every array has length N (choices) unless said, in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lazysched.solver.choice_batch import ANY_STREAMED, GPU, Bools, ChoiceBatch, Floats
from lazysched.solver.file_replay import FileEngines, hand_on
from lazysched.solver.segment_replay import Segments, reloaded

if TYPE_CHECKING:
    from lazysched.solver.window_replay import WindowReplay

NUM_STEPS = 3


def slowed_s(own_s: Floats, to_gpu_s: Floats, to_host_s: Floats, copy_slowdown: float) -> Floats:
    """How long updates of ``own_s`` take from now on, with copies of both directions from now on beside them.

    They need ``1 + n copy_slowdown`` times as long while n directions copy, so the time is the one at which an
    increasing concave function, which says how much of them would be lost by then, takes its own value: the least of
    those that its three straight pieces have, which end with the shorter and with the longer of the copies.
    """
    one, both = (n * copy_slowdown / (1 + n * copy_slowdown) for n in (1, 2))  # lost in each second of them
    shorter, longer = np.minimum(to_gpu_s, to_host_s), np.maximum(to_gpu_s, to_host_s)
    all_s = own_s + both * shorter + one * (longer - shorter)
    result: Floats = np.minimum(np.minimum(all_s, (own_s + (both - one) * shorter) / (1 - one)), own_s / (1 - both))
    return result


class Steps:
    """State of the engines while steps are replayed."""

    def __init__(self, replay: WindowReplay, batch: ChoiceBatch) -> None:
        self.replay, self.m, self.slots, self.lag = replay, replay.m, replay.slots, replay.lag
        self.num_blocks = replay.num_blocks
        num = len(batch.vocabulary)
        self._durations(replay, batch)
        zero: Floats = np.zeros(num)
        self.compute_s = self.h2d_s = self.d2h_s = self.cpu_s = zero
        self.batch_read_s = zero
        """When the last step was done with its batch: uploads of the next one come after its batch."""
        self.waits_for_norm = replay.instance.update.waits_for_norm
        self.files = FileEngines(replay, batch) if replay.instance.uses_files else None
        self.done = self.updated
        """Per forward window, when the stage's last update had ended."""
        self.weight_slots: list[Floats] = [zero] * self.slots
        self.fetch_slots: list[Floats] = [zero] * self.slots
        self.save_slots: list[Floats] = [zero] * (self.lag + 1)
        self.leaving_slots: list[Floats] = [zero] * (self.lag + 2)
        """Of all that leaves, inputs alone too: they lie among hidden states, where there is one slot more."""
        self.grad_slots: list[Floats] = [zero] * (self.lag + 1)

    def _durations(self, replay: WindowReplay, batch: ChoiceBatch) -> None:

        def table(attribute: str, of: ChoiceBatch) -> Floats:  # L x N: the replay reads one block at a time
            return np.ascontiguousarray(replay.option_table(attribute, of).T)

        self.forward, self.backward = table("forward_s", batch), table("backward_s", batch)
        self.save, self.fetch = table("save_s", batch), table("fetch_s", batch)
        self.leaves, self.returns = table("offloaded_gb", batch) > 0, self.fetch > 0
        self.early: Bools = table("leaves_early", batch) > 0
        states = np.ascontiguousarray(batch.states.T)
        self.on_host: Bools = states != GPU
        instance = replay.instance
        stages = [instance.embed, *instance.blocks, instance.head]
        self.trained = [costs.is_trained for costs in stages]
        """Per forward window."""
        self.sends: Bools = self.on_host & np.array(self.trained[1:-1])[:, None]
        self.streamed: Bools = np.isin(states, ANY_STREAMED)
        self.load: Floats = self.on_host * replay.stage_row("load_s")[:, None]
        self.grads: Floats = self.on_host * replay.stage_row("grads_s")[:, None]
        self.norm = replay.stage_row("norm_s")
        self.embed_load, self.head_load = replay.ends("load_s", batch, gpu=False)
        self.embed_grads, self.head_grads = replay.ends("grads_s", batch, gpu=False)
        embed_update, head_update = replay.ends("cpu_update_s", batch, gpu=False)
        updates = self.on_host * replay.stage_row("cpu_update_s")[:, None]
        self.cpu_updates: list[Floats] = [embed_update, *updates, head_update]
        self.updated = self._updated(replay.instance.copy_slowdown)
        embed_update, head_update = replay.ends("gpu_update_s", batch, gpu=True)
        updates = ~self.on_host * replay.stage_row("gpu_update_s")[:, None]
        self.gpu_updates: list[Floats] = [embed_update, *updates, head_update]
        self.segments = Segments(replay, batch, self.streamed) if replay.instance.has_segments else None
        self.reload = (
            reloaded(self.streamed, self.slots, replay.instance.num_forward_only)
            if self.segments is None
            else self.segments.own_upload
        )
        if self.segments is not None:
            self.backward = self.backward - self.segments.recompute
        uploads = self.reload if self.segments is None else self.segments.uploads
        # An update during the backward has copies of the next window beside it: its own are over, or to come.
        none = 0 * self.embed_load
        to_gpu = [none, none, *(self.load * uploads + self.m * self.fetch)]
        to_host = [none, self.embed_grads, *self.grads]
        self.early_updates: list[Floats] = [
            slowed_s(*seconds, replay.instance.copy_slowdown)
            for seconds in zip(self.cpu_updates, to_gpu, to_host, strict=True)
        ]

    def _updated(self, copy_slowdown: float) -> list[Floats]:
        """Per forward window, all updates up to it; weights and saved tensors of those before are on their way."""
        none = 0 * self.embed_load
        to_gpu = np.cumsum([none, self.embed_load, *self.load], axis=0)
        to_host = np.cumsum([none, none, *(self.m * self.save)], axis=0)
        updated: Floats = slowed_s(np.cumsum(self.cpu_updates, axis=0), to_gpu, to_host, copy_slowdown)
        self.slowed_updates: list[Floats] = list(np.diff(updated, axis=0, prepend=0))
        return list(updated)

    def steady_step_s(self) -> Floats:
        """Distance between the ends of the last two steps."""
        ends: list[Floats] = [self._step() for _ in range(NUM_STEPS)]
        step_s: Floats = ends[-1] - ends[-2]
        return step_s

    def _step(self) -> Floats:
        instance = self.replay.instance
        done, self.done = self.done, list(self.done)
        self.h2d_s = np.maximum(self.h2d_s, self.batch_read_s)
        self._upload(self.embed_load, done[0], window=0)
        self.begun_s = self._ready() + instance.embed_forward_s
        """When the last window's first micro-batch had computed."""
        self.compute_s = self._ready() + self.m * instance.embed_forward_s
        self.save_first: list[Floats] = []
        self.save_last: list[Floats] = []
        for i in range(self.num_blocks):
            self._upload(self.load[i], done[i + 1], gated=self.streamed[i], window=i + 1)
            self._forward(i)
        self._upload(self.head_load, done[-1], window=self.num_blocks + 1)
        self.compute_s = self.batch_read_s = self._ready() + instance.head_s
        self.d2h_s = np.maximum(self.d2h_s, self.compute_s) + self.head_grads
        self._update_early(self.num_blocks + 1)
        rest: Floats = np.zeros_like(self.compute_s)
        for i in reversed(range(instance.num_forward_only, self.num_blocks)):
            rest = self._backward(i, rest)
        self.compute_s = self.compute_s + instance.embed_backward_s
        if self.trained[0]:
            self.batch_read_s = self.compute_s
        self.d2h_s = np.maximum(self.d2h_s, self.compute_s) + self.embed_grads
        self._update_early(0)
        if self.waits_for_norm:
            self._update_all()
            self.compute_s = self.compute_s + sum(self.gpu_updates)
        return self.compute_s

    def _update_all(self) -> None:
        """All updates, in forward order, after the norm."""
        if self.files is None:
            ends = [self.d2h_s + updated for updated in self.updated]
            self.done = [end if is_trained else 0 * end for end, is_trained in zip(ends, self.trained, strict=True)]
            return
        end_s = self.d2h_s
        for window, own_s in enumerate(self.slowed_updates):
            end_s = self.files.update(window, end_s, own_s)
            self.done[window] = end_s if self.trained[window] else 0 * end_s

    def _update_early(self, window: int) -> None:
        """Update the stage of a forward window now that its gradient has arrived, unless updates wait for the norm."""
        if not self.trained[window]:  # its copies slow down the updates of others
            self.cpu_s = self.cpu_s + (0.0 if self.waits_for_norm else self.early_updates[window])
        elif not self.waits_for_norm:
            self.compute_s = self.compute_s + self.gpu_updates[window]
            start_s, own_s = np.maximum(self.cpu_s, self.d2h_s), self.early_updates[window]
            self.cpu_s = start_s + own_s if self.files is None else self.files.update(window, start_s, own_s)
            self.done[window] = self.cpu_s

    def _ready(self) -> Floats:
        return np.maximum(self.compute_s, self.loaded_s)

    def _upload(self, duration_s: Floats, after_s: Floats | float, *, window: int, gated: Bools | None = None) -> None:
        """Upload a forward window's weights; ``loaded_s`` says when they are there, 0 for those that need no upload."""
        start = np.maximum(self.h2d_s, after_s)
        if self.files is not None:
            start = np.maximum(start, self.files.read_weights(window, duration_s > 0))
        if gated is not None:
            start = np.where(gated, np.maximum(start, self.weight_slots[0]), start)
        needed = duration_s > 0
        self.h2d_s = np.where(needed, start + duration_s, self.h2d_s)
        self.loaded_s: Floats = np.where(needed, self.h2d_s, 0.0)
        if self.files is not None:
            self.files.uploaded(window, self.h2d_s, needed)

    def _forward(self, i: int) -> None:
        moves, early, save_s, m = self.leaves[i], self.early[i], self.save[i], self.m
        makes, before_s = moves & ~early, self.compute_s
        start = self._ready()
        start = np.where(makes, np.maximum(start, self.save_slots[0]), start)
        start = np.where(moves, np.maximum(start, self.leaving_slots[0]), start)
        end = start + m * self.forward[i]
        for slots, waits in ((self.save_slots, makes), (self.leaving_slots, moves)):
            last = min(m, len(slots)) - 1  # of the micro-batches that take slots of windows before
            end = np.where(waits, np.maximum(end, slots[last] + (m - last) * self.forward[i]), end)
        first = np.maximum(self.d2h_s, np.where(early, self.begun_s, start + self.forward[i]))
        saved = np.maximum(first + m * save_s, np.where(early, before_s, end) + save_s)
        # With one slot they take turns: a forward comes between any two copies.
        turn_s = save_s + self.forward[i] * makes if self.lag == 0 else save_s
        for num_slots, waits in ((self.lag + 1, makes), (self.lag + 2, moves)):
            if m > num_slots:
                waited = first + save_s + (m - num_slots - 1) * turn_s  # for the slot of the last micro-batch
                end = np.where(waits, np.maximum(end, waited + self.forward[i]), end)
                saved = np.where(early, saved, np.maximum(saved, end + save_s))
        self.begun_s = start + self.forward[i]
        # Of a segment every block says when the first one's input had left.
        self.save_first.append(np.where(moves, first + save_s, self.save_first[-1] if i else 0.0))
        self.save_last.append(np.where(moves, saved, self.save_last[-1] if i else 0.0))
        self.d2h_s = np.where(moves, saved, self.d2h_s)
        if self.files is not None:
            self.d2h_s = np.maximum(self.d2h_s, self.files.write_saved_of(i, first + save_s, saved))
        hand_on(self.save_slots, makes, [saved - k * turn_s for k in reversed(range(min(m, self.lag + 1)))])
        hand_on(self.leaving_slots, moves, [saved - k * turn_s for k in reversed(range(min(m, self.lag + 2)))])
        self.compute_s = end
        hand_on(self.weight_slots, self.streamed[i], [end])

    def _backward(self, i: int, rest_s: Floats) -> Floats:
        """One block's backward; ``rest_s`` is the fetching of the block before that still shares the engine."""
        m, moves, fetch_s = self.m, self.returns[i], self.fetch[i]
        reload_s: Floats = self.load[i] * self.reload[i]
        again = None if self.segments is None else self.segments.runs_again[i]
        if m > 1:
            self._upload(reload_s if again is None else reload_s * ~again, 0.0, gated=self.streamed[i], window=i + 1)
            self.h2d_s = self.h2d_s + rest_s
        fetched, fetched_all = self._fetch(i)
        if again is not None and again.any():
            moves = moves & ~again
            self._run_again(i, again, fetched, fetched_all)
        if m == 1:
            self._upload(reload_s, 0.0, gated=self.streamed[i], window=i + 1)
        one_s = self.backward[i]
        start = np.where(moves, np.maximum(self._ready(), fetched), self._ready())
        if self.segments is not None:
            start = start + self.segments.last_again_s[i]
        if m == 1:
            start = np.where(self.sends[i], np.maximum(start, self.grad_slots[0]), start)
        end = start + m * one_s
        num_first = min(self.slots, m)
        left_s = (m - num_first) * fetch_s
        end = np.where(moves, np.maximum(end, fetched_all + left_s + one_s), end)
        hand_on(self.fetch_slots, moves, [end - k * one_s for k in range(min(m, self.slots) - 1, -1, -1)])
        if m > 1:
            end = np.where(self.sends[i], np.maximum(end, self.grad_slots[0]), end)
        self.compute_s = end + self.norm[i]
        hand_on(self.weight_slots, self.streamed[i], [self.compute_s])
        sent = np.maximum(self.d2h_s, self.compute_s) + self.grads[i]
        self.d2h_s = np.where(self.sends[i], sent, self.d2h_s)
        hand_on(self.grad_slots, self.sends[i], [sent])
        self._update_early(i + 1)
        still_s: Floats = left_s * self.returns[i]
        return still_s

    def _run_again(self, last: int, again: Bools, fetched_s: Floats, fetched_all_s: Floats) -> None:
        """Where ``again``, forwards of the segment that ``last`` ends but its own; then the upload for its backward.

        The input of the first may come back: ``fetched_s`` and ``fetched_all_s`` are ends of the first and all fetches.
        """
        segments, loaded_s, own_s = self.segments, self.loaded_s if self.m > 1 else 0.0, self.load[last]
        assert segments is not None
        for block in range(max(0, last - segments.longest + 1), last):
            runs = again & (segments.length[last] > last - block)
            first = runs & (segments.place[block] == 0) & self.returns[last]
            upload_s = self.load[block] * (runs & segments.first_upload[block])
            self._upload(upload_s, 0.0, gated=runs & self.streamed[block], window=block + 1)
            start, one_s = self._ready(), self.forward[block]
            end = np.where(first, np.maximum(start, fetched_s), start) + self.m * one_s
            end = np.where(first, np.maximum(end, fetched_all_s + one_s), end)
            self.compute_s = np.where(runs, end, self.compute_s)
            hand_on(self.weight_slots, runs & self.streamed[block], [end])
        if self.m > 1:
            self._upload(own_s * (again & self.reload[last]), 0.0, gated=self.streamed[last], window=last + 1)
            self.loaded_s = np.where(again, self.loaded_s, loaded_s)

    def _fetch(self, i: int) -> tuple[Floats, Floats]:
        """Fetches that may run before the block computes; ends of the first and of all of them."""
        moves, fetch_s = self.returns[i], self.fetch[i]
        alone = True if self.segments is None else ~self.segments.runs_again[i]  # segments have slots enough
        time = np.maximum(self.h2d_s, self.save_first[i])
        first, first_read, last_read, read_s = time, 0.0 * time, 0.0 * time, 0.0 * time
        if self.files is not None:
            first_read, last_read, read_s = self.files.read_saved_of(i)
        for k in range(min(self.slots, self.m)):
            time = np.maximum(np.maximum(time, first_read + k * read_s), self.fetch_slots[k] * alone) + fetch_s
            first = time if k == 0 else first
        last_read = np.where(read_s > 0, last_read + fetch_s, 0.0)
        time = np.maximum(np.maximum(time, self.save_last[i]), last_read)
        self.h2d_s = np.where(moves, time, self.h2d_s)
        return first, time
