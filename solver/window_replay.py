"""Time and memory of many choices at once: a replay of the step window by window, vectorised over choices.

It follows the order of ``time_rows`` but replays it for given decisions (``window_steps``), with slots handed on
exactly, so that a search can afford thousands of evaluations. It ranks; the judge stays ``simulate`` on the program.
Arrays: N choices, L blocks; times in seconds, sizes in GB.
"""

from __future__ import annotations

import numpy as np

from lazysched.solver.choice_batch import ANY_STREAMED, GPU, NVME, Bools, ChoiceBatch, Evaluation, Floats, Ints, Memory
from lazysched.solver.instance import Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.options import STATE_CHOICES, SaveOption, StageCosts, StateChoice, VocabularyOption
from lazysched.solver.segment_replay import Segments, reloaded
from lazysched.solver.window_steps import Steps
from lazysched.staging import STATE_SLOTS


class WindowReplay:
    """Evaluates choices for one instance."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        candidate = instance.candidate
        self.m, self.slots, self.lag = candidate.accumulation, candidate.prefetch_depth + 1, candidate.d2h_lag
        self.num_blocks = instance.num_blocks
        self._tables: dict[str, Floats] = {}

    def evaluate(self, batch: ChoiceBatch, memory: Memory | None = None) -> Evaluation:
        """Step time and memory of every set of choices; ``memory`` where it is known."""
        memory = memory or self.memory(batch)
        step_s = Steps(self, batch).steady_step_s()
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
        return _chosen(self._tables[attribute], batch.saves)

    def state_table(self, cost: str, batch: ChoiceBatch) -> Floats:
        """N x L: what a method of ``StageCosts`` says of the chosen states."""
        if cost not in self._tables:
            rows = [[getattr(costs, cost)(choice) for choice in STATE_CHOICES] for costs in self.instance.blocks]
            self._tables[cost] = np.array(rows, dtype=np.float64)
        return _chosen(self._tables[cost], batch.states)

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
        weight, grads = self.stage_row("weight_gb"), self.stage_row("grads_gb")
        again = self.backward_uploads(batch)
        own = (batch.states != GPU) * (weight + grads) + again * weight
        moved = (*self.ends("weight_gb", batch, gpu=False), *self.ends("grads_gb", batch, gpu=False))
        ends = sum(moved, np.zeros(len(batch.vocabulary)))
        saved = 2 * self.m * self.option_table("offloaded_gb", batch)
        total: Floats = (own + saved).sum(1) + ends
        return total + self._file_traffic_gb(batch, again) if self.instance.uses_files else total

    def backward_uploads(self, batch: ChoiceBatch) -> Ints:
        """N x L: how often a block that streams is uploaded in the backward."""
        streamed = np.isin(batch.states, ANY_STREAMED).T
        if not self.instance.has_segments:
            return reloaded(streamed, self.slots, self.instance.num_forward_only).T.astype(np.int64)
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
        weight, grads = self.stage_row("weight_gb"), self.stage_row("grads_gb")
        on_gpu, streamed = batch.states == GPU, np.isin(batch.states, ANY_STREAMED)
        base = instance.gpu_constant_gb + self.state_table("on_gpu_gb", batch).sum(1)
        base = base + self.vocabulary_row("gpu_gb", batch) + self.vocabulary_row("grads_slot_gb", batch)
        base = base + self.slots * (streamed * weight).max(1) + (self.lag + 1) * (~on_gpu * grads).max(1)
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
        updates = self._updates_gb(batch, kept)
        staging, records = self._file_slots_gb(batch)
        moving = instance.host_constant_gb + m * self.option_table("host_gb", batch).sum(1) + staging
        host_gb = moving + records + self._in_tier("on_host_gb", "host_gb", batch)
        moved_gb = moving + self._in_tier("moved_gb", "moved_gb", batch)
        nvme_gb = self._in_tier("in_files_gb", "nvme_gb", batch) + m * self.option_table("nvme_gb", batch).sum(1)
        base = base + instance.mapping_gb_per_gb * moved_gb
        gpu_gb = base + np.maximum(np.maximum(blocks, head), np.maximum(ends, updates))
        return Memory(gpu_gb, host_gb, moved_gb, nvme_gb)

    def _updates_gb(self, batch: ChoiceBatch, kept: Floats) -> Floats:
        """N: the most that a GPU update works with, and what blocks before keep beside one that is not put off.

        ``kept``: N x L, what blocks 0..i keep on the GPU, inputs aside.
        """
        own = (batch.states == GPU) * self.stage_row("gpu_update_working_gb")
        embed, head = self.ends("gpu_update_working_gb", batch, gpu=True)
        if not self.instance.update.waits_for_norm:
            own[:, 1:] += kept[:, :-1]
            own += self.m * self.option_table("still_remade_gb", batch)
            head = head + kept[:, -1]
        most: Floats = np.maximum(own.max(1), np.maximum(embed, head))
        return most

    def _in_tier(self, cost: str, attribute: str, batch: ChoiceBatch) -> Floats:
        """N: of blocks what ``cost`` says of their states, of embedding and head ``attribute``."""
        total: Floats = self.state_table(cost, batch).sum(1) + self.vocabulary_row(attribute, batch)
        return total

    def _file_slots_gb(self, batch: ChoiceBatch) -> tuple[Floats, Floats]:
        """N each: page-locked slots through which files are read and written, and those in which state is updated."""
        weights = ((batch.states == NVME) * self.stage_row("weight_gb")).max(1)
        saved = self.option_table("nvme_gb", batch).max(1)
        staging = (self.slots + 1) * weights + (self.slots + self.lag + 3) * saved
        records = np.maximum(self.state_table("record_gb", batch).max(1), self.vocabulary_row("record_gb", batch))
        return staging, STATE_SLOTS * records


def _chosen(table: Floats, which: Ints) -> Floats:
    """N x L: of each row of ``table`` what ``which`` names; flat, which takes half the time of two indices."""
    first = np.arange(len(table)) * table.shape[1]
    return table.ravel().take(first + which)


def _column(options: tuple[SaveOption, ...], attribute: str) -> Floats:
    return np.array([getattr(option, attribute) for option in options], dtype=np.float64)
