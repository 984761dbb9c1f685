"""Time and memory of many choices at once: a replay of the step window by window, vectorised over choices.

It follows the order of ``time_rows`` but replays it for given decisions, with slots handed on exactly, so that a search
can afford thousands of evaluations. It ranks; the judge stays ``simulate`` on the lowered program.
Arrays: N choices, L blocks; times in seconds, sizes in GB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lazysched.solver import options
from lazysched.solver.file_replay import FileEngines, hand_on
from lazysched.solver.instance import Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.options import STATE_CHOICES, SaveOption, StageCosts, StateChoice, VocabularyOption
from lazysched.solver.plans import Choices
from lazysched.solver.segment_replay import Segments
from lazysched.staging import STATE_SLOTS

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
GPU, RESIDENT, STREAMED, NVME = map(STATE_CHOICES.index, ("gpu", "resident", "streamed", "nvme"))
ANY_STREAMED = [STATE_CHOICES.index(choice) for choice in options.STREAMED]
NUM_STEPS = 3


@dataclass(frozen=True)
class ChoiceBatch:
    """N sets of choices: ``saves`` and ``states`` are N x L, ``vocabulary`` has length N."""

    saves: Ints
    states: Ints
    vocabulary: Ints

    @classmethod
    def of(cls, choices: list[Choices]) -> ChoiceBatch:
        """Stack choices."""
        return cls(
            np.array([c.saves for c in choices], dtype=np.int64),
            np.array([[STATE_CHOICES.index(s) for s in c.states] for c in choices], dtype=np.int64),
            np.array([c.vocabulary for c in choices], dtype=np.int64),
        )

    def rows(self, which: Ints | Bools) -> ChoiceBatch:
        """Some of the sets, by index or mask."""
        return ChoiceBatch(self.saves[which], self.states[which], self.vocabulary[which])

    def choices(self, index: int) -> Choices:
        """One set of choices."""
        return Choices(
            tuple(STATE_CHOICES[s] for s in self.states[index]),
            tuple(int(o) for o in self.saves[index]),
            int(self.vocabulary[index]),
        )


@dataclass(frozen=True)
class Memory:
    """Peak GB of N choices on GPU and host, what of the host's copies read and write, and in files."""

    gpu_gb: Floats
    host_gb: Floats
    moved_gb: Floats
    nvme_gb: Floats

    def over_gb(self, budgets: Budgets) -> Floats:
        """By how much ``budgets`` are exceeded, all together."""
        over: Floats = sum((np.maximum(used - limit, 0) for used, limit in self._pairs(budgets)), 0 * self.gpu_gb)
        return over

    def fits(self, budgets: Budgets) -> Bools:
        """Which choices are within ``budgets``."""
        fits: Bools = np.all([used <= limit + 1e-9 for used, limit in self._pairs(budgets)], axis=0)
        return fits

    def _pairs(self, budgets: Budgets) -> list[tuple[Floats, float]]:
        return [
            (self.gpu_gb, budgets.gpu_gb), (self.host_gb, budgets.host_gb), (self.moved_gb, budgets.moved_gb),
            (self.nvme_gb, budgets.nvme_gb),
        ]  # fmt: skip


@dataclass(frozen=True)
class Evaluation(Memory):
    """What each of N choices costs."""

    step_s: Floats


class WindowReplay:
    """Evaluates choices for one instance."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        candidate = instance.candidate
        self.m, self.slots, self.lag = candidate.accumulation, candidate.prefetch_depth + 1, candidate.d2h_lag
        self.num_blocks = instance.num_blocks
        self._tables: dict[str, Floats] = {}

    def evaluate(self, batch: ChoiceBatch) -> Evaluation:
        """Step time and memory of every set of choices."""
        memory = self.memory(batch)
        step_s = _Steps(self, batch).steady_step_s()
        return Evaluation(memory.gpu_gb, memory.host_gb, memory.moved_gb, memory.nvme_gb, step_s)

    def fits(self, batch: ChoiceBatch, budgets: Budgets) -> Bools:
        """Which choices are within ``budgets``; much cheaper than evaluating them."""
        return self.memory(batch).fits(budgets)

    def option_table(self, attribute: str, batch: ChoiceBatch) -> Floats:
        """N x L: an attribute of the chosen save options."""
        if attribute not in self._tables:
            rows = [_column(options, attribute) for options in self.instance.saves]
            width = max(map(len, rows))
            self._tables[attribute] = np.array([np.pad(row, (0, width - len(row))) for row in rows])
        table: Floats = self._tables[attribute][np.arange(self.num_blocks), batch.saves]
        return table

    def state_table(self, cost: str, batch: ChoiceBatch) -> Floats:
        """N x L: what a method of ``StageCosts`` says of the chosen states."""
        if cost not in self._tables:
            rows = [[getattr(costs, cost)(choice) for choice in STATE_CHOICES] for costs in self.instance.blocks]
            self._tables[cost] = np.array(rows, dtype=np.float64)
        table: Floats = self._tables[cost][np.arange(self.num_blocks), batch.states]
        return table

    def vocabulary_row(self, attribute: str, batch: ChoiceBatch) -> Floats:
        """N: an attribute of the chosen joint option of embedding and head."""
        values = [getattr(option, attribute) for option in self.instance.vocabulary_options]
        row: Floats = np.array(values, dtype=np.float64)[batch.vocabulary]
        return row

    def stage_row(self, attribute: str) -> Floats:
        """L: an attribute of the blocks' costs."""
        return np.array([getattr(block, attribute) for block in self.instance.blocks])

    def ends(self, attribute: str, batch: ChoiceBatch, *, gpu: bool) -> tuple[Floats, Floats]:
        """For embedding and head, N each: the attribute where the GPU (or else the host) updates it, else 0."""
        options = self.instance.vocabulary_options

        def column(costs: StageCosts, choices: list[StateChoice]) -> Floats:
            value = float(getattr(costs, attribute))
            return np.array([value if (c == "gpu") == gpu else 0.0 for c in choices])[batch.vocabulary]

        embed = column(self.instance.embed, [o.embed for o in options])
        return embed, column(self.instance.head, [o.head for o in options])

    def traffic_gb(self, batch: ChoiceBatch) -> Floats:
        """N: what a step moves over all links; of tokens and what a step reports nothing."""
        weight = self.stage_row("weight_gb")
        again = self.backward_uploads(batch)
        own = ((batch.states != GPU) * 2 + again) * weight
        ends = sum(self.ends("weight_gb", batch, gpu=False), np.zeros(len(batch.vocabulary)))
        saved = 2 * self.m * self.option_table("offloaded_gb", batch)
        total: Floats = (own + saved).sum(1) + 2 * ends
        return total + self._file_traffic_gb(batch, again) if self.instance.uses_files else total

    def backward_uploads(self, batch: ChoiceBatch) -> Ints:
        """N x L: how often a block that streams is uploaded in the backward."""
        streamed = np.isin(batch.states, ANY_STREAMED).T
        if not self.instance.has_segments:
            return reloaded(streamed, self.slots).T.astype(np.int64)
        return Segments(self, batch, streamed).uploads.T

    def whole(self, batch: ChoiceBatch) -> Bools:
        """Which choices have no part of a segment without the rest of it."""
        if not self.instance.has_segments:
            return np.ones(len(batch.vocabulary), dtype=np.bool_)
        length, place = self.option_table("segment", batch), self.option_table("place", batch)
        together = (place[:, 1:] > 0) | (place[:, :-1] < length[:, :-1] - 1)
        whole: Bools = (~together | (batch.saves[:, 1:] == batch.saves[:, :-1])).all(1)
        return whole

    def _file_traffic_gb(self, batch: ChoiceBatch, again: Ints) -> Floats:
        """Of that, what files are read and written; ``again``: how often weights are needed once more."""
        records = 2 * self._in_tier("in_files_gb", "nvme_gb", batch)
        weights = ((batch.states == NVME) * (1 + again) * self.stage_row("weight_gb")).sum(1)
        ends = [
            sum(costs.weight_gb for choice, costs in self._ends_of(option) if choice == "nvme")
            for option in self.instance.vocabulary_options
        ]
        saved = 2 * self.m * self.option_table("nvme_gb", batch).sum(1)
        total: Floats = records + weights + np.array(ends)[batch.vocabulary] + saved
        return total

    def _ends_of(self, option: VocabularyOption) -> tuple[tuple[StateChoice, StageCosts], ...]:
        return ((option.embed, self.instance.embed), (option.head, self.instance.head))

    def memory(self, batch: ChoiceBatch) -> Memory:
        """Peaks as the memory rows have them."""
        instance, m = self.instance, self.m
        weight = self.stage_row("weight_gb")
        on_gpu, streamed = batch.states == GPU, np.isin(batch.states, ANY_STREAMED)
        base = instance.gpu_constant_gb + self.state_table("on_gpu_gb", batch).sum(1)
        base = base + self.vocabulary_row("gpu_gb", batch) + self.vocabulary_row("grads_slot_gb", batch)
        base = base + self.slots * (streamed * weight).max(1) + (self.lag + 1) * (~on_gpu * weight).max(1)
        base = base + (self.slots + self.lag + 1) * instance.moving_slot_gb
        inputs = self.option_table("kept_input_gb", batch)
        waiting = np.cumsum(inputs, axis=1) + self.option_table("inner_inputs_gb", batch)
        base = base + instance.in_flight_gb + m * waiting.max(1)
        base = base + (m + self.slots - 1) * self.option_table("segment_slot_gb", batch).max(1)
        kept = np.cumsum(m * (self.option_table("kept_gb", batch) - inputs), axis=1)
        remade = m * self.option_table("remade_gb", batch)
        blocks = (kept + remade + self.option_table("working_gb", batch)).max(1)
        head = kept[:, -1] + instance.head_variant.working_backward_bytes / 1e9
        embed = instance.embed_variant
        ends = max(embed.working_forward_bytes, embed.working_backward_bytes) / 1e9
        updates = (on_gpu * self.stage_row("gpu_update_working_gb")).max(1)
        for working in self.ends("gpu_update_working_gb", batch, gpu=True):
            updates = np.maximum(updates, working)
        staging, records = self._file_slots_gb(batch)
        moving = instance.host_constant_gb + m * self.option_table("host_gb", batch).sum(1) + staging
        host_gb = moving + records + self._in_tier("on_host_gb", "host_gb", batch)
        moved_gb = moving + self._in_tier("moved_gb", "moved_gb", batch)
        nvme_gb = self._in_tier("in_files_gb", "nvme_gb", batch) + m * self.option_table("nvme_gb", batch).sum(1)
        base = base + instance.mapping_gb_per_gb * moved_gb
        gpu_gb = base + np.maximum(np.maximum(blocks, head), np.maximum(ends, updates))
        return Memory(gpu_gb, host_gb, moved_gb, nvme_gb)

    def _in_tier(self, cost: str, attribute: str, batch: ChoiceBatch) -> Floats:
        """N: of blocks what ``cost`` says of their states, of embedding and head ``attribute``."""
        total: Floats = self.state_table(cost, batch).sum(1) + self.vocabulary_row(attribute, batch)
        return total

    def _file_slots_gb(self, batch: ChoiceBatch) -> tuple[Floats, Floats]:
        """N each: page-locked slots through which files are read and written, and those in which state is updated."""
        weights = ((batch.states == NVME) * self.stage_row("weight_gb")).max(1)
        saved = self.option_table("nvme_gb", batch).max(1)
        staging = (self.slots + 1) * weights + (self.slots + self.lag + 3) * saved
        records = np.maximum(self.state_table("in_files_gb", batch).max(1), self.vocabulary_row("record_gb", batch))
        return staging, STATE_SLOTS * records


def reloaded(streamed: Bools, num_slots: int) -> Bools:
    """Which of the streamed blocks (L x N) are uploaded again for the backward; the last still lie in their slots."""
    after: Ints = np.cumsum(streamed[::-1], axis=0)[::-1] - streamed
    again: Bools = streamed & (after >= num_slots)
    return again


def _column(options: tuple[SaveOption, ...], attribute: str) -> Floats:
    return np.array([getattr(option, attribute) for option in options], dtype=np.float64)


class _Steps:
    """State of the engines while steps are replayed; every array has length N unless said."""

    def __init__(self, replay: WindowReplay, batch: ChoiceBatch) -> None:
        self.replay, self.m, self.slots, self.lag = replay, replay.m, replay.slots, replay.lag
        self.num_blocks = replay.num_blocks
        num = len(batch.vocabulary)
        self._durations(replay, batch)
        zero: Floats = np.zeros(num)
        self.compute_s = self.h2d_s = self.d2h_s = self.cpu_s = zero
        self.waits_for_norm = replay.instance.update.waits_for_norm
        self.files = FileEngines(replay, batch) if replay.instance.uses_files else None
        self.done = self.updated
        """Per forward window, when the stage's last update had ended."""
        self.weight_slots: list[Floats] = [zero] * self.slots
        self.fetch_slots: list[Floats] = [zero] * self.slots
        self.save_slots: list[Floats] = [zero] * (self.lag + 1)
        self.grad_slots: list[Floats] = [zero] * (self.lag + 1)

    def _durations(self, replay: WindowReplay, batch: ChoiceBatch) -> None:

        def table(attribute: str, of: ChoiceBatch) -> Floats:  # L x N: the replay reads one block at a time
            return np.ascontiguousarray(replay.option_table(attribute, of).T)

        self.forward, self.backward = table("forward_s", batch), table("backward_s", batch)
        self.save, self.fetch = table("save_s", batch), table("fetch_s", batch)
        self.leaves, self.returns = table("offloaded_gb", batch) > 0, self.fetch > 0
        states = np.ascontiguousarray(batch.states.T)
        self.on_host: Bools = states != GPU
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
        self.reload = reloaded(self.streamed, self.slots) if self.segments is None else self.segments.own_upload
        if self.segments is not None:
            self.backward = self.backward - self.segments.recompute
        back = self.load * replay.backward_uploads(batch).T + self.grads + self.m * self.fetch
        copied = [self.embed_grads, *back, self.head_load + self.head_grads]
        slowdown = replay.instance.copy_slowdown
        self.early_updates = [own + slowdown * s for own, s in zip(self.cpu_updates, copied, strict=True)]

    def _updated(self, copy_slowdown: float) -> list[Floats]:
        """Per forward window, all updates up to it; weights and saved tensors of those before are on their way."""
        copied = [0 * self.embed_load, self.embed_load, *(self.load + self.m * self.save)]
        pairs = zip(self.cpu_updates, copied, strict=True)
        self.slowed_updates = [own + copy_slowdown * seconds for own, seconds in pairs]
        return list(np.cumsum(self.slowed_updates, axis=0))

    def steady_step_s(self) -> Floats:
        """Distance between the ends of the last two steps."""
        ends: list[Floats] = [self._step() for _ in range(NUM_STEPS)]
        step_s: Floats = ends[-1] - ends[-2]
        return step_s

    def _step(self) -> Floats:
        instance = self.replay.instance
        done, self.done = self.done, list(self.done)
        self._upload(self.embed_load, done[0], window=0)
        self.compute_s = self._ready() + self.m * instance.embed_forward_s
        self.save_first: list[Floats] = []
        self.save_last: list[Floats] = []
        for i in range(self.num_blocks):
            self._upload(self.load[i], done[i + 1], gated=self.streamed[i], window=i + 1)
            self._forward(i)
        self._upload(self.head_load, done[-1], window=self.num_blocks + 1)
        self.compute_s = self._ready() + instance.head_s
        self.d2h_s = np.maximum(self.d2h_s, self.compute_s) + self.head_grads
        self._update_early(self.num_blocks + 1)
        rest: Floats = np.zeros_like(self.compute_s)
        for i in reversed(range(self.num_blocks)):
            rest = self._backward(i, rest)
        self.compute_s = self.compute_s + instance.embed_backward_s
        self.d2h_s = np.maximum(self.d2h_s, self.compute_s) + self.embed_grads
        self._update_early(0)
        if self.waits_for_norm:
            self._update_all()
            self.compute_s = self.compute_s + sum(self.gpu_updates)
        return self.compute_s

    def _update_all(self) -> None:
        """All updates, in forward order, after the norm."""
        if self.files is None:
            self.done = [self.d2h_s + updated for updated in self.updated]
            return
        end_s = self.d2h_s
        for window, own_s in enumerate(self.slowed_updates):
            end_s = self.done[window] = self.files.update(window, end_s, own_s)

    def _update_early(self, window: int) -> None:
        """Update the stage of a forward window now that its gradient has arrived, unless updates wait for the norm."""
        if not self.waits_for_norm:
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
        moves, save_s, m = self.leaves[i], self.save[i], self.m
        start = self._ready()
        start = np.where(moves, np.maximum(start, self.save_slots[0]), start)
        end = start + m * self.forward[i]
        first = np.maximum(self.d2h_s, start + self.forward[i])
        saved = np.maximum(first + m * save_s, end + save_s)
        if m > self.lag + 1:
            waited = first + (m - 1 - self.lag) * save_s  # for the slot of the last micro-batch
            end = np.where(moves, np.maximum(end, waited + self.forward[i]), end)
            saved = np.maximum(saved, end + save_s)
        # Of a segment every block says when the first one's input had left.
        self.save_first.append(np.where(moves, first + save_s, self.save_first[-1] if i else 0.0))
        self.save_last.append(np.where(moves, saved, self.save_last[-1] if i else 0.0))
        self.d2h_s = np.where(moves, saved, self.d2h_s)
        if self.files is not None:
            self.d2h_s = np.maximum(self.d2h_s, self.files.write_saved_of(i, first + save_s, saved))
        hand_on(self.save_slots, moves, [saved - k * save_s for k in reversed(range(min(m, self.lag + 1)))])
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
            start = np.where(self.on_host[i], np.maximum(start, self.grad_slots[0]), start)
        end = start + m * one_s
        num_first = min(self.slots, m)
        left_s = (m - num_first) * fetch_s
        end = np.where(moves, np.maximum(end, fetched_all + left_s + one_s), end)
        hand_on(self.fetch_slots, moves, [end - k * one_s for k in range(min(m, self.slots) - 1, -1, -1)])
        if m > 1:
            end = np.where(self.on_host[i], np.maximum(end, self.grad_slots[0]), end)
        self.compute_s = end + self.norm[i]
        hand_on(self.weight_slots, self.streamed[i], [self.compute_s])
        sent = np.maximum(self.d2h_s, self.compute_s) + self.grads[i]
        self.d2h_s = np.where(self.on_host[i], sent, self.d2h_s)
        hand_on(self.grad_slots, self.on_host[i], [sent])
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
