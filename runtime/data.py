"""Training data: examples of at most ``seq_len`` tokens, and the batches that a step index names."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from lazysched.errors import UsageError
from lazysched.runtime.batch import Batch
from lazysched.runtime.data_formats import parse_rows, read_rows
from lazysched.runtime.data_tokens import IGNORED, Encoder, TokenArray, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Example:
    """One row, cut to the sequence length.

    Attributes:
        input_ids: [tokens] int32.
        labels: [tokens] int32, -100 where nothing is trained, not shifted; the first is always -100.
        is_truncated: tokens were cut off its end.
        has_split_boundary: see ``TokenRow``.
    """

    input_ids: TokenArray
    labels: TokenArray
    is_truncated: bool = False
    has_split_boundary: bool = False

    @property
    def num_trained_tokens(self) -> int:
        """Labels that count in the loss."""
        return int(np.count_nonzero(self.labels != IGNORED))


@dataclass(frozen=True)
class DataReport:
    """What became of the rows of a file."""

    num_rows: int
    num_kept: int
    num_dropped_too_long: int
    """Rows whose whole answer lies beyond the sequence length."""
    num_dropped_untrained: int
    """Rows with nothing to train at any length, such as a conversation without an assistant."""
    num_truncated: int
    """Kept rows that lost their end."""
    num_split_boundaries: int
    """Rows where the tokenizer merges the end of a prompt with the beginning of its answer."""
    num_tokens: int
    """Of the kept rows, padding not counted."""
    num_trained_tokens: int

    def summary(self) -> str:
        """One line for a person."""
        notes = {
            "dropped, answer beyond the sequence length": self.num_dropped_too_long,
            "dropped, nothing to train": self.num_dropped_untrained,
            "truncated": self.num_truncated,
            "with a prompt merged into its answer": self.num_split_boundaries,
        }
        parts = "".join(f", {count} {text}" for text, count in notes.items() if count)
        tokens = f"{self.num_tokens} tokens, {self.num_trained_tokens} of them trained"
        return f"{self.num_kept} of {self.num_rows} rows: {tokens}{parts}"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples, each with at least one trained token, at least one of them."""

    examples: tuple[Example, ...]
    report: DataReport

    @classmethod
    def load(cls, path: str | Path, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> Dataset:
        """Read, tokenise and cut a file.

        Conversations go through the tokenizer's chat template; their assistant turns are trained, of
        prompt/completion the completion, of text everything, each with the token that ends it.

        Args:
            path: JSON list or JSONL; for formats see ``parse_rows``.
            tokenizer: of the model.
            seq_len: tokens of an example at most; what is beyond is cut off.

        Raises:
            UsageError: the file, a row, the template or the tokenizer is not usable, or no label is left.
        """
        rows = Encoder(tokenizer, str(path)).encode(parse_rows(read_rows(path), str(path)))
        examples, num_too_long, num_untrained = [], 0, 0
        for row in rows:
            example = _cut(row, seq_len)
            if example.num_trained_tokens:
                examples.append(example)
            elif np.any(row.labels != IGNORED):
                num_too_long += 1
            else:
                num_untrained += 1
        if not examples:
            raise UsageError(
                f"{path}: all labels are masked: {num_too_long} rows have their answer beyond {seq_len} tokens, "
                f"{num_untrained} have none; profile and solve with a larger --seq-len, or check the format"
            )
        return cls(tuple(examples), _report(examples, num_too_long, num_untrained))


def _cut(row: TokenRow, seq_len: int) -> Example:
    ids, labels = row.input_ids, row.labels
    is_truncated = len(ids) > seq_len
    if is_truncated:
        # Copies, since a slice would keep the whole row in memory.
        ids, labels = ids[:seq_len].copy(), labels[:seq_len].copy()
    return Example(ids, labels, is_truncated, row.has_split_boundary)


def _report(examples: Sequence[Example], num_too_long: int, num_untrained: int) -> DataReport:
    return DataReport(
        num_rows=len(examples) + num_too_long + num_untrained,
        num_kept=len(examples),
        num_dropped_too_long=num_too_long,
        num_dropped_untrained=num_untrained,
        num_truncated=sum(example.is_truncated for example in examples),
        num_split_boundaries=sum(example.has_split_boundary for example in examples),
        num_tokens=sum(len(example.input_ids) for example in examples),
        num_trained_tokens=sum(example.num_trained_tokens for example in examples),
    )


def check_vocabulary(dataset: Dataset, num_rows: int) -> None:
    """Refuse tokens that the embedding has no row for.

    Args:
        dataset: of one tokenizer.
        num_rows: rows of the model's embedding.

    Raises:
        UsageError: a token id is ``num_rows`` or more.
    """
    largest = max(int(example.input_ids.max()) for example in dataset.examples)
    if largest >= num_rows:
        raise UsageError(
            f"tokenizer: the data has the token id {largest}, the model's embedding only {num_rows} rows; use the "
            f"model's own tokenizer, or resize its embedding first"
        )


def split(dataset: Dataset, num_held_out: int, seed: int) -> tuple[Dataset, Dataset]:
    """Training part and held-out part of ``dataset``, both in its order.

    Args:
        dataset: at least ``num_held_out`` + 1 examples.
        num_held_out: examples of the second part, at least one.
        seed: 0 or more; draws them.

    Raises:
        UsageError: one of the parts would be empty, or the seed is negative.
    """
    num_examples = len(dataset.examples)
    if not 0 < num_held_out < num_examples:
        raise UsageError(
            f"num_held_out: {num_held_out} of {num_examples} rows leaves a part empty; "
            f"give 1 to {num_examples - 1}"
        )  # fmt: skip
    # Three words, so that no epoch's order is drawn from the same stream.
    order = np.random.default_rng([_checked_seed(seed), 0, 1]).permutation(num_examples)
    return _part(dataset, order[num_held_out:]), _part(dataset, order[:num_held_out])


def _part(dataset: Dataset, indices: npt.NDArray[np.int64]) -> Dataset:
    examples = tuple(dataset.examples[index] for index in np.sort(indices))
    return Dataset(examples, _report(examples, num_too_long=0, num_untrained=0))


def _checked_seed(seed: int) -> int:
    if seed < 0:
        raise UsageError(f"seed: {seed} is negative; give 0 or more")
    return seed


Row = tuple[Example, ...]
"""Whole examples that share one row of a batch."""


def pack(examples: Iterable[Example], seq_len: int) -> tuple[Row, ...]:
    """Fill rows of ``seq_len`` tokens with examples in their order; one that does not fit begins the next row."""
    rows: list[list[Example]] = []
    room = 0
    for example in examples:
        if len(example.input_ids) > room or not rows:
            rows.append([])
            room = seq_len
        rows[-1].append(example)
        room -= len(example.input_ids)
    return tuple(map(tuple, rows))


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

    Raises:
        UsageError: the seed is negative.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, seq_len: int, seed: int, pad_id: int | None, *, packing: bool = False
    ) -> None:
        self._batch_size, self._seq_len, self._packing = batch_size, seq_len, packing
        self._seed, self._pad_id = _checked_seed(seed), pad_id
        self._rows = _single(dataset.examples)
        if packing:
            # Three words, as in ``split``, and another last one.
            order = np.random.default_rng([seed, 0, 2]).permutation(len(dataset.examples))
            self._rows = pack((dataset.examples[index] for index in order), seq_len)
        # Only a memory of pure results: steps mostly ask for the same epoch, or two beside each other.
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return len(self._rows)

    def batch(self, step: int) -> Batch:
        """The batch of ``step``, counted from 0."""
        first = step * self._batch_size
        rows = [self._rows[self._index(position)] for position in range(first, first + self._batch_size)]
        return _collate(rows, self._batch_size, self._seq_len, self._pad_id, self._packing)

    def num_steps(self, epochs: float) -> int:
        """Steps until every row was seen ``epochs`` times, at least one."""
        # Rounded, or 0.07 epochs of 100 rows would be 8 rows: the product is 7.000000000000001.
        return max(1, math.ceil(round(epochs * self.num_rows, 6) / self._batch_size))

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, self.num_rows)
        return int(self._order(epoch)[place])

    def _draw_order(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_rows)


def evaluation_batches(
    dataset: Dataset, batch_size: int, seq_len: int, pad_id: int | None, *, packing: bool = False
) -> Iterator[Batch]:
    """Each example once, in order; masked rows fill up the last batch. Arguments as for ``Batches``."""
    rows = pack(dataset.examples, seq_len) if packing else _single(dataset.examples)
    for first in range(0, len(rows), batch_size):
        yield _collate(rows[first : first + batch_size], batch_size, seq_len, pad_id, packing)


def _single(examples: Iterable[Example]) -> tuple[Row, ...]:
    return tuple((example,) for example in examples)


def _collate(rows: Sequence[Row], num_rows: int, seq_len: int, pad_id: int | None, packing: bool) -> Batch:
    # Padding stands on the right: causal attention never looks there from a real token, and what the pads themselves
    # compute has no target. So no padding mask is needed, and every batch has one shape.
    input_ids = torch.full((num_rows, seq_len), 0 if pad_id is None else pad_id, dtype=torch.int64)
    targets = torch.full((num_rows, seq_len), IGNORED, dtype=torch.int64)
    positions = torch.arange(seq_len).repeat(num_rows, 1)
    for row, examples in enumerate(rows):
        start = 0
        for example in examples:
            end = start + len(example.input_ids)
            assert end <= seq_len, f"examples of {end} tokens in rows of {seq_len}"
            input_ids[row, start:end] = torch.from_numpy(example.input_ids)
            # The last token's target stays ignored: what follows is another example or padding.
            targets[row, start : end - 1] = torch.from_numpy(example.labels[1:])
            start = end
            positions[row, start:] = torch.arange(seq_len - start)
    num_trained = sum(example.num_trained_tokens for examples in rows for example in examples)
    return Batch(input_ids, targets, num_trained, positions if packing else None)
