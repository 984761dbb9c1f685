"""Training data of a run: examples of at most ``seq_len`` tokens, and what became of every row."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

from lazysched.errors import UsageError
from lazysched.runtime.data.formats import IGNORED, parse_rows
from lazysched.runtime.data.order import Indices, checked_seed, shuffled
from lazysched.runtime.data.sources import Source, resolve_data
from lazysched.runtime.data.store import (
    CODE_VERSION,
    SPLIT_BOUNDARY,
    TOO_LONG,
    TRUNCATED,
    UNTRAINED,
    Example,
    StoreBuilder,
    TokenArray,
    TokenStore,
    open_rows,
    save_rows,
)
from lazysched.runtime.data.tokenizer import tokenizer_identity
from lazysched.runtime.data.tokens import Encoder, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEY_CHARACTERS = 32
MAX_DROPPED_SHARE = 0.5
"""Where more rows than these have nothing to train, length or format are wrong, and what is left are other data."""


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
    """Kept rows where the tokenizer merges the end of a prompt with the beginning of its answer."""
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
class Examples(Sequence[Example]):
    """Chosen rows of a store, made when asked for."""

    store: TokenStore
    rows: Indices

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return Examples(self.store, self.rows[index])
        return self.store.example(int(self.rows[index]))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples, each with at least one trained token, at least one of them.

    Attributes:
        store: all rows of the data, dropped ones too.
        rows: [examples] int64, which of them are trained.
        report: what became of all.
        folder: where the tokens lie; None for a dataset in memory.
    """

    store: TokenStore
    rows: Indices
    report: DataReport
    folder: Path | None = None

    @classmethod
    def load(
        cls,
        data: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        seq_len: int,
        *,
        data_format: str | None = None,
        cache_dir: Path | None = None,
    ) -> Dataset:
        """Read, tokenise and cut data, or map what an earlier call left in the cache.

        Conversations go through the tokenizer's chat template; their assistant turns are trained, of
        prompt/completion the completion, of text everything, each with the token that ends it.

        Args:
            data: see ``resolve_data``.
            tokenizer: of the model.
            seq_len: tokens of an example at most; what is beyond is cut off.
            data_format: see ``resolve_data``.
            cache_dir: for tokens; by default $LAZYSCHED_TOKENS, else ``lazysched/tokens`` in the user's cache.

        Raises:
            UsageError: the data, a row, the template or the tokenizer is not usable, or no label is left.
            RunError: the cache cannot be written.
        """
        sources = resolve_data(data, data_format)
        folder = (cache_dir or _default_cache_dir()) / _key(sources, tokenizer, seq_len)
        store = open_rows(folder)
        if store is None:
            save_rows(folder, _encoded(data, sources, tokenizer, seq_len))
            store = open_rows(folder)
            assert store is not None, f"{folder} changed while it was opened"
        return _kept(store, folder)

    @classmethod
    def of(cls, examples: Iterable[Example]) -> Dataset:
        """A dataset in memory of examples that all have something to train."""
        builder = StoreBuilder()
        for example in examples:
            builder.add(
                example.input_ids, example.labels,
                TRUNCATED * example.is_truncated | SPLIT_BOUNDARY * example.has_split_boundary,
            )  # fmt: skip
        return _kept(builder.store(), None)

    @property
    def examples(self) -> Sequence[Example]:
        """The rows that are trained, in their order."""
        return Examples(self.store, self.rows)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[examples] int64, tokens of each."""
        return self.store.lengths[self.rows]

    @property
    def fingerprint(self) -> str:
        """Of tokens, labels and which rows are trained: two runs with the same one see the same examples."""
        return hashlib.blake2b(self.store.fingerprint.encode() + self.rows.tobytes(), digest_size=16).hexdigest()


def _default_cache_dir() -> Path:
    # Imported here, since it loads transformers.
    from lazysched.runtime.sources import default_cache_dir

    return Path(os.environ.get("LAZYSCHED_TOKENS") or default_cache_dir() / "tokens")


def _key(sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, seq_len: int) -> str:
    """Name of a cache: everything that its tokens depend on."""
    formats = [source.row_format.name if source.row_format else None for source in sources]
    parts = [CODE_VERSION, seq_len, tokenizer_identity(tokenizer), formats, [source.content() for source in sources]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_KEY_CHARACTERS]


def _encoded(
    data: str | Path, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, seq_len: int
) -> Iterator[tuple[TokenArray, TokenArray, int]]:
    encoder = Encoder(tokenizer)
    num_kept, num_too_long, num_untrained = 0, 0, 0
    for source in sources:
        for row in encoder.encode(parse_rows(source.rows(), source.row_format)):
            ids, labels, flags = _cut(row, seq_len)
            num_too_long += bool(flags & TOO_LONG)
            num_untrained += bool(flags & UNTRAINED)
            num_kept += not flags & (TOO_LONG | UNTRAINED)
            yield ids, labels, flags
    num_dropped = num_too_long + num_untrained
    if num_dropped > MAX_DROPPED_SHARE * (num_kept + num_dropped):
        which = (
            f"labels of {num_dropped} of {num_kept + num_dropped} rows are masked"
            if num_kept
            else "all labels are masked"
        )
        remedy = (
            "profile and solve with a larger --seq-len, or check the format"
            if num_too_long
            else "check the format, and what leaves turns out (weight, train)"
        )
        raise UsageError(
            f"{data}: {which}: {num_too_long} rows have their answer beyond {seq_len} tokens, "
            f"{num_untrained} have none; {remedy}"
        )


def _cut(row: TokenRow, seq_len: int) -> tuple[TokenArray, TokenArray, int]:
    ids, labels = row.input_ids[:seq_len], row.labels[:seq_len]
    flags = TRUNCATED * (len(row.input_ids) > seq_len) | SPLIT_BOUNDARY * row.has_split_boundary
    if not np.any(labels != IGNORED):
        flags = TOO_LONG if np.any(row.labels != IGNORED) else UNTRAINED
    return ids, labels, flags


def _kept(store: TokenStore, folder: Path | None) -> Dataset:
    """All rows of a store that have something to train."""
    rows = np.flatnonzero((store.flags & (TOO_LONG | UNTRAINED)) == 0)
    return Dataset(store, rows, _report(store, rows, range(len(store))), folder)


def _report(store: TokenStore, kept: Indices, of: Sequence[int] | Indices) -> DataReport:
    flags, every = store.flags[kept], store.flags[np.asarray(of)]

    def count(values: npt.NDArray[np.uint8], flag: int) -> int:
        return int(np.count_nonzero(values & flag))

    return DataReport(
        num_rows=len(every),
        num_kept=len(kept),
        num_dropped_too_long=count(every, TOO_LONG),
        num_dropped_untrained=count(every, UNTRAINED),
        num_truncated=count(flags, TRUNCATED),
        num_split_boundaries=count(flags, SPLIT_BOUNDARY),
        num_tokens=int(store.lengths[kept].sum()),
        num_trained_tokens=int(store.num_trained[kept].sum()),
    )


def check_vocabulary(dataset: Dataset, num_rows: int) -> None:
    """Refuse tokens that the embedding has no row for.

    Args:
        dataset: of one tokenizer.
        num_rows: rows of the model's embedding.

    Raises:
        UsageError: a token id is ``num_rows`` or more.
    """
    largest = int(dataset.store.tokens.max())
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
    num_examples = len(dataset.rows)
    if not 0 < num_held_out < num_examples:
        raise UsageError(
            f"num_held_out: {num_held_out} of {num_examples} rows leaves a part empty; "
            f"give 1 to {num_examples - 1}"
        )  # fmt: skip
    order = shuffled(np.arange(num_examples), num_examples, checked_seed(seed), 0, "split")
    return _part(dataset, order[num_held_out:]), _part(dataset, order[:num_held_out])


def _part(dataset: Dataset, chosen: Indices) -> Dataset:
    rows = dataset.rows[np.sort(chosen)]
    return Dataset(dataset.store, rows, _report(dataset.store, rows, rows), dataset.folder)
