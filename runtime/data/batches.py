"""Batches that a step index names: rows of whole examples, packed, grouped by length or one by one."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lazysched.errors import UsageError
from lazysched.runtime.batch import Batch
from lazysched.runtime.data.dataset import Dataset
from lazysched.runtime.data.formats import IGNORED
from lazysched.runtime.data.order import Indices, checked_seed, shuffled
from lazysched.runtime.data.store import Example
from lazysched.runtime.held_rows import HeldRows

Row = Sequence[Example]
"""Whole examples that share one row of a batch."""
_BATCHES_SORTED_TOGETHER = 50
"""With ``group_by_length``: so many batches are sorted by length at once, as in the Trainer of transformers."""


def pack(lengths: Iterable[int], seq_len: int) -> npt.NDArray[np.int64]:
    """Fill rows of ``seq_len`` tokens with examples in their order; one that does not fit begins the next row.

    Returns:
        [rows + 1] int64: row i holds the examples from element i to element i + 1.
    """
    starts, room, count = [], -1, 0
    for length in lengths:
        if length > room:
            starts.append(count)
            room = seq_len
        room -= length
        count += 1
    return np.array([*starts, count], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Examples in the order ``order``, cut into rows at ``bounds``."""

    dataset: Dataset
    order: Indices
    bounds: Indices

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def row(self, index: int) -> Row:
        examples = self.dataset.examples
        return [examples[int(i)] for i in self._chosen(index)]

    def numbers(self, index: int) -> Indices:
        """Places in the data of the examples of a row, dropped rows of the data counted too."""
        return self.dataset.rows[self._chosen(index)]

    def _chosen(self, index: int) -> Indices:
        return self.order[self.bounds[index] : self.bounds[index + 1]]


def _rows(dataset: Dataset, order: Indices, seq_len: int, packing: bool) -> _Rows:
    bounds = pack(dataset.lengths[order].tolist(), seq_len) if packing else np.arange(len(order) + 1)
    return _Rows(dataset, order, bounds)


class Batches:
    """Batches of a run: rows stream through one shuffled epoch after another, a batch may span two.

    Every batch is a function of its step and the seed alone, so resuming costs nothing and no state is kept.

    Args:
        dataset: what to train on.
        batch_size: rows of a batch.
        seq_len: tokens of a row, at least those of the longest example.
        seed: 0 or more; draws the order of each epoch.
        pad_id: fills rows up; None takes 0, as no pad is ever looked at.
        packing: whether examples share rows. Which ones do is drawn once; epochs shuffle rows.
        group_by_length: whether rows of a batch have similar lengths: of 50 shuffled batches at once, rows are sorted
            and the batches shuffled again.

    Raises:
        UsageError: the seed is negative, or packed rows shall be grouped.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seq_len: int,
        seed: int,
        pad_id: int | None,
        *,
        packing: bool = False,
        group_by_length: bool = False,
    ) -> None:
        if packing and group_by_length:
            raise UsageError("group_by_length: packed rows all have one length; leave it or packing out")
        self._batch_size, self._seq_len, self._packing = batch_size, seq_len, packing
        self._seed, self._pad_id, self._grouped = checked_seed(seed), pad_id, group_by_length
        order = np.arange(len(dataset.rows))
        if packing:
            order = shuffled(order, len(order), seed, 0, "packing")
        self._rows = _rows(dataset, order, seq_len, packing)
        # Only a memory of pure results: the next steps ask for the same batches.
        self._sorted = functools.lru_cache(maxsize=4)(self._sort_together)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return len(self._rows)

    def batch(self, step: int) -> Batch:
        """The batch of ``step``, counted from 0."""
        first = step * self._batch_size
        rows = [self._rows.row(int(index)) for index in self._indices(first, first + self._batch_size)]
        return _collate(rows, self._batch_size, self._seq_len, self._pad_id, self._packing)

    def held(self, step: int) -> HeldRows:
        """Which rows of the data the batch of ``step`` holds."""
        first = step * self._batch_size
        chosen = self._indices(first, first + self._batch_size)
        numbers = [int(number) + 1 for index in chosen for number in self._rows.numbers(int(index))]
        return HeldRows(first // self.num_rows, tuple(numbers))

    def num_steps(self, epochs: float) -> int:
        """Steps until every row was seen ``epochs`` times, at least one."""
        # Rounded, or 0.07 epochs of 100 rows would be 8 rows: the product is 7.000000000000001.
        return max(1, math.ceil(round(epochs * self.num_rows, 6) / self._batch_size))

    def _indices(self, first: int, end: int) -> Iterator[int]:
        """Rows at the positions from ``first`` on, which count through all epochs."""
        while first < end:
            epoch, place = divmod(first, self.num_rows)
            last = min(end, (epoch + 1) * self.num_rows) - epoch * self.num_rows
            yield from self._of_epoch(epoch, place, last)
            first = epoch * self.num_rows + last

    def _of_epoch(self, epoch: int, first: int, last: int) -> Indices:
        if not self._grouped:
            return shuffled(np.arange(first, last), self.num_rows, self._seed, epoch)
        # Groups begin where a batch does; what the epoch before took of its last batch is a group of its own.
        taken = -epoch * self.num_rows % self._batch_size
        size = _BATCHES_SORTED_TOGETHER * self._batch_size
        places = np.arange(first, last)
        groups = np.where(places < taken, -1, (places - taken) // size)
        parts = []
        for group in np.unique(groups).tolist():
            start = 0 if group < 0 else taken + group * size
            stop = min(taken if group < 0 else start + size, self.num_rows)
            parts.append(self._sorted(epoch, start, stop)[places[groups == group] - start])
        return np.concatenate(parts)

    def _sort_together(self, epoch: int, start: int, stop: int) -> Indices:
        """Rows of the positions from ``start`` to ``stop``, whole batches of them by length."""
        rows = shuffled(np.arange(start, stop), self.num_rows, self._seed, epoch)
        rows = rows[np.argsort(self._rows.dataset.lengths[rows], kind="stable")]
        num_whole = len(rows) // self._batch_size
        if num_whole < 2:
            return rows
        order = shuffled(np.arange(num_whole), num_whole, self._seed, epoch, f"group {start}")
        whole = rows[: num_whole * self._batch_size].reshape(num_whole, -1)[order]
        return np.concatenate([whole.ravel(), rows[num_whole * self._batch_size :]])


def evaluation_batches(
    dataset: Dataset, batch_size: int, seq_len: int, pad_id: int | None, *, packing: bool = False
) -> Iterator[Batch]:
    """Each example once, in order; masked rows fill up the last batch. Arguments as for ``Batches``."""
    rows = _rows(dataset, np.arange(len(dataset.rows)), seq_len, packing)
    for first in range(0, len(rows), batch_size):
        chosen = [rows.row(index) for index in range(first, min(first + batch_size, len(rows)))]
        yield _collate(chosen, batch_size, seq_len, pad_id, packing)


def _collate(rows: Sequence[Row], num_rows: int, seq_len: int, pad_id: int | None, packing: bool) -> Batch:
    # Padding stands on the right: causal attention never looks there from a real token, and what the pads themselves
    # compute has no target. So no padding mask is needed, and every batch has one shape.
    input_ids = np.full((num_rows, seq_len), 0 if pad_id is None else pad_id, dtype=np.int64)
    targets = np.full((num_rows, seq_len), IGNORED, dtype=np.int64)
    positions = np.tile(np.arange(seq_len), (num_rows, 1))
    for row, examples in enumerate(rows):
        start = 0
        for example in examples:
            end = start + len(example.input_ids)
            assert end <= seq_len, f"examples of {end} tokens in rows of {seq_len}"
            input_ids[row, start:end] = example.input_ids
            # The last token's target stays ignored: what follows is another example or padding.
            targets[row, start : end - 1] = example.labels[1:]
            start = end
            positions[row, start:] = np.arange(seq_len - start)
    num_trained = int(np.count_nonzero(targets != IGNORED))
    ids, wanted, places = map(torch.from_numpy, (input_ids, targets, positions))
    return Batch(ids, wanted, num_trained, places if packing else None)
