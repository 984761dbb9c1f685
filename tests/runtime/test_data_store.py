"""Tokens in a folder: mapped, made once, made anew when damaged or when anything they depend on has changed."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazysched.errors import RunError, UsageError
from lazysched.runtime.data import Dataset, Example
from lazysched.runtime.data import dataset as dataset_module
from lazysched.runtime.data.store import StoreBuilder, open_rows, save_rows
from lazysched.runtime.data.tokens import Encoder
from tests.runtime import tiny_tokenizers as tiny
from tests.runtime.tiny_tokenizers import make_tokenizer

ROWS = [{"prompt": "ab", "completion": "cd"}, {"prompt": "abcdefgh", "completion": "i"}, {"text": "x"}]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    return path


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One element for each time that data are tokenised."""
    calls: list[int] = []

    class Counting(Encoder):
        def encode(self, texts: Any) -> Iterator[Any]:
            calls.append(1)
            return super().encode(texts)

    monkeypatch.setattr(dataset_module, "Encoder", Counting)
    return calls


def load(data: Path, cache: Path, *, seq_len: int = 7, template: str | None = None, **options: Any) -> Dataset:
    return Dataset.load(data, make_tokenizer(template, **options), seq_len, cache_dir=cache)


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6))
def test_labels_are_kept_as_spans(rows: list[list[bool]]) -> None:
    builder = StoreBuilder()
    for marks in rows:
        ids = np.arange(5, 5 + len(marks), dtype=np.int32)
        builder.add(ids, np.where([False, *marks[1:]], ids, np.int32(-100)), 0)
    store = builder.store()
    for index, marks in enumerate(rows):
        example = store.example(index)
        assert example.input_ids.tolist() == list(range(5, 5 + len(marks)))
        assert (example.labels != -100).tolist() == [False, *marks[1:]]
        assert store.num_trained[index] == example.num_trained_tokens == sum(marks[1:])


def test_the_second_load_tokenises_nothing_and_sees_the_same(data: Path, tmp_path: Path, encoded: list[int]) -> None:
    first, second = (load(data, tmp_path / "cache") for _ in range(2))
    assert len(encoded) == 1
    assert first.report == second.report
    assert (first.report.num_kept, first.report.num_dropped_too_long) == (1, 1)
    assert first.fingerprint == second.fingerprint
    assert not second.store.tokens.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        second.examples[0].input_ids[0] = 0


@pytest.mark.parametrize("name", ["tokens", "row_ends", "spans", "span_ends", "flags", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_cache_is_made_anew(data: Path, tmp_path: Path, encoded: list[int], name: str, damage: str) -> None:
    dataset = load(data, tmp_path / "cache")
    assert dataset.folder is not None
    path = dataset.folder / name
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else bytes([content[0] ^ 1]) + content[1:])
    again = load(data, tmp_path / "cache")
    assert len(encoded) == 2
    assert again.fingerprint == dataset.fingerprint
    load(data, tmp_path / "cache")
    assert len(encoded) == 2


def test_a_run_keeps_its_rows_when_the_cache_is_removed(data: Path, tmp_path: Path) -> None:
    dataset = load(data, tmp_path / "cache")
    assert dataset.folder is not None
    before = dataset.examples[0].input_ids.tolist()
    (dataset.folder / "tokens").unlink()
    load(data, tmp_path / "cache")
    assert dataset.examples[0].input_ids.tolist() == before


def test_whatever_the_tokens_depend_on_has_a_cache_of_its_own(
    data: Path, tmp_path: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    folders = [
        load(data, cache).folder,
        load(data, cache, seq_len=8).folder,
        load(data, cache, template=tiny.CHAT).folder,
    ]
    folders += [load(data, cache, adds_bos=True).folder, load(data, cache, pad="</s>").folder]
    folders += [load(data, cache, merges=(("a", "b"),)).folder]
    data.write_text(data.read_text().replace("cd", "ce"))
    folders.append(load(data, cache).folder)
    monkeypatch.setattr(dataset_module, "CODE_VERSION", 0)
    folders.append(load(data, cache).folder)
    assert len(set(folders)) == len(folders) == len(encoded)
    copy = data.with_name("copy.jsonl")
    copy.write_bytes(data.read_bytes())
    assert load(copy, cache).folder == folders[-1]


def test_a_bad_row_leaves_nothing_behind(data: Path, tmp_path: Path) -> None:
    data.write_text(data.read_text() + '{"prompt": 1, "completion": "a"}\n')
    with pytest.raises(UsageError, match=r"rows.jsonl: row 3: 'prompt' is a int"):
        load(data, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    def rows() -> Iterator[Any]:
        yield np.ones(3, np.int32), np.ones(3, np.int32), 0
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"cannot be written \(No space left on device\); free disk space"):
        save_rows(tmp_path / "cache" / "key", rows())
    assert list((tmp_path / "cache").iterdir()) == []
    assert open_rows(tmp_path / "cache" / "key") is None


def test_refuses_a_cache_that_cannot_be_made(data: Path) -> None:
    with pytest.raises(
        UsageError, match=r"cannot be made \(Not a directory\); name another folder in LAZYSCHED_TOKENS"
    ):
        load(data, data / "cache")


def test_rows_cost_no_python_lists(tmp_path: Path) -> None:
    """5,000 rows of 500 tokens: as lists of integers 20 MB of pointers alone, here 1 MB."""
    num_rows, ids = 5_000, np.arange(500, dtype=np.int32)
    tracemalloc.start()
    try:
        save_rows(tmp_path / "rows", ((ids, ids, 0) for _ in range(num_rows)))
        store = open_rows(tmp_path / "rows")
        assert store is not None
        dataset = dataset_module._kept(store, None)
        assert dataset.report.num_tokens == num_rows * 500
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200 * num_rows


def test_examples_in_memory_and_on_disk_are_alike(data: Path, tmp_path: Path) -> None:
    dataset = load(data, tmp_path / "cache", seq_len=99)
    again = Dataset.of(dataset.examples)
    assert again.report == dataset.report
    assert again.fingerprint == dataset.fingerprint
    assert Dataset.of(dataset.examples[1:]).fingerprint != dataset.fingerprint
    assert isinstance(again.examples[0], Example)
