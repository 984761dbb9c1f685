"""Tokens and trained spans of all rows in flat arrays, in memory or mapped from a folder that is made once.

The folder's name is a hash of everything that the tokens depend on. It is written under another name and renamed when
whole; what it holds is hashed once more when it is opened, so that a damaged one is never trained on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lazysched.errors import UNREADABLE_JSON, UsageError
from lazysched.runtime.data.formats import IGNORED
from lazysched.runtime.folders import new_folder

TokenArray = npt.NDArray[np.int32]
CODE_VERSION = 2
"""To be raised when the same rows would become other tokens or other files."""
TRUNCATED, SPLIT_BOUNDARY, TOO_LONG, UNTRAINED = 1, 2, 4, 8
"""Flags of a row; the last two mark rows that are dropped."""
_META = "meta.json"
_DTYPES: dict[str, type[np.generic]] = {
    "tokens": np.int32, "row_ends": np.int64, "spans": np.int32, "span_ends": np.int64, "flags": np.uint8,
}  # fmt: skip


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


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Rows of tokens, dropped ones too, in the order of the data.

    Attributes:
        tokens: [all tokens] int32.
        row_ends: [rows] int64, where each row's tokens end.
        spans: [spans, 2] int32, begin and end of trained tokens within their row.
        span_ends: [rows] int64, where each row's spans end.
        flags: [rows] uint8, see ``TRUNCATED`` and the like.
        fingerprint: hash of all of these.
    """

    tokens: TokenArray
    row_ends: npt.NDArray[np.int64]
    spans: TokenArray
    span_ends: npt.NDArray[np.int64]
    flags: npt.NDArray[np.uint8]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.row_ends)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[rows] int64, tokens of each row."""
        return np.diff(self.row_ends, prepend=0)

    @property
    def num_trained(self) -> npt.NDArray[np.int64]:
        """[rows] int64, trained tokens of each row."""
        sums = np.concatenate([[0], np.cumsum(self.spans[:, 1] - self.spans[:, 0], dtype=np.int64)])
        return np.diff(sums[self.span_ends], prepend=0)

    def example(self, row: int) -> Example:
        """Tokens and labels of ``row``; tokens are a view of what is mapped."""
        first, span = (int(ends[row - 1]) if row else 0 for ends in (self.row_ends, self.span_ends))
        ids = self.tokens[first : int(self.row_ends[row])]
        labels = np.full(len(ids), IGNORED, dtype=np.int32)
        for start, end in self.spans[span : int(self.span_ends[row])]:
            labels[start:end] = ids[start:end]
        flags = int(self.flags[row])
        return Example(ids, labels, bool(flags & TRUNCATED), bool(flags & SPLIT_BOUNDARY))


class StoreBuilder:
    """Collects rows; a row costs a few bytes of memory where tokens go to a file.

    Args:
        tokens_file: where tokens go; None keeps them in memory.
    """

    def __init__(self, tokens_file: BinaryIO | None = None) -> None:
        self._file = tokens_file
        self._tokens, self._row_ends, self._span_ends = array("i"), array("q"), array("q")
        self._spans, self._flags, self._num_tokens = array("i"), array("B"), 0

    def add(self, ids: TokenArray, labels: TokenArray, flags: int) -> None:
        """Append one row."""
        content = np.ascontiguousarray(ids, dtype=np.int32)
        if self._file is None:
            self._tokens.frombytes(content.tobytes())
        else:
            self._file.write(content.tobytes())
        self._num_tokens += len(ids)
        self._row_ends.append(self._num_tokens)
        is_trained = np.concatenate([[False], labels != IGNORED, [False]])
        self._spans.extend(np.flatnonzero(is_trained[1:] != is_trained[:-1]).tolist())
        self._span_ends.append(len(self._spans) // 2)
        self._flags.append(flags)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What was collected, by the names of the files; tokens only where they are in memory."""
        collected = {
            "tokens": self._tokens, "row_ends": self._row_ends, "spans": self._spans, "span_ends": self._span_ends,
            "flags": self._flags,
        }  # fmt: skip
        return {name: np.frombuffer(values, _DTYPES[name]) for name, values in collected.items()}

    def store(self) -> TokenStore:
        """The rows in memory."""
        assert self._file is None
        arrays = self.arrays()
        digests = {name: hashlib.blake2b(values.tobytes()).hexdigest() for name, values in arrays.items()}
        return _store(arrays, digests)


def _store(arrays: dict[str, npt.NDArray[Any]], digests: dict[str, str]) -> TokenStore:
    fingerprint = hashlib.blake2b(json.dumps(digests, sort_keys=True).encode(), digest_size=16).hexdigest()
    return TokenStore(**(arrays | {"spans": arrays["spans"].reshape(-1, 2)}), fingerprint=fingerprint)


def save_rows(folder: Path, rows: Iterable[tuple[TokenArray, TokenArray, int]]) -> None:
    """Write tokens, labels and flags of ``rows`` to a new folder, which appears when it is whole.

    Raises:
        UsageError: the folder above cannot be made.
        RunError: the disk is full or refuses.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder.parent}: cannot be made ({error.strerror}); name another folder in LAZYSCHED_TOKENS"
        ) from None
    if folder.is_dir():  # a damaged one, or it would have been opened
        shutil.rmtree(folder)
    with new_folder(folder) as target:
        with (target / "tokens").open("wb") as file:
            builder = StoreBuilder(file)
            for ids, labels, flags in rows:
                builder.add(ids, labels, flags)
        for name, values in builder.arrays().items():
            if name != "tokens":
                values.tofile(target / name)
        digests = {name: _digest(target / name) for name in _DTYPES}
        (target / _META).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def open_rows(folder: Path) -> TokenStore | None:
    """The rows of a folder, mapped; None where it is absent or damaged."""
    try:
        digests = json.loads((folder / _META).read_text(encoding="utf-8"))
        if not isinstance(digests, dict) or digests != {name: _digest(folder / name) for name in _DTYPES}:
            return None
        return _store({name: _mapped(folder / name, dtype) for name, dtype in _DTYPES.items()}, digests)
    except UNREADABLE_JSON:
        return None


def _mapped(path: Path, dtype: type[np.generic]) -> npt.NDArray[Any]:
    # An empty file cannot be mapped.
    return np.asarray(np.memmap(path, dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
