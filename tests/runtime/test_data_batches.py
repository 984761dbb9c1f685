from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazysched.errors import UsageError
from lazysched.runtime.batch import Batch
from lazysched.runtime.data import (
    Batches,
    DataReport,
    Dataset,
    Example,
    check_vocabulary,
    evaluation_batches,
    split,
)
from tests.runtime import tiny_tokenizers as tiny
from tests.runtime.tiny_tokenizers import make_tokenizer

SEQ_LEN = 6


def dataset_of(num_examples: int) -> Dataset:
    """Example i has 2 to 6 tokens, all of them i + 100; the first and every third is not trained."""
    examples = []
    for index in range(num_examples):
        ids = np.full(2 + index % 5, index + 100, dtype=np.int32)
        labels = np.where(np.arange(len(ids)) % 3 == 0, np.int32(-100), ids)
        examples.append(Example(ids, labels))
    return Dataset(tuple(examples), DataReport(num_examples, num_examples, 0, 0, 0, 0, 0, 0))


def names(batch: Batch) -> list[int]:
    """Which example each row holds; -100 for a row of padding."""
    return [int(row[0]) - 100 if row[0] >= 100 else -100 for row in batch.input_ids]


def same(left: Batch, right: Batch) -> bool:
    return torch.equal(left.input_ids, right.input_ids) and torch.equal(left.targets, right.targets)


class TestBatches:
    @settings(deadline=None)
    @given(num=st.integers(1, 23), size=st.integers(1, 9), seed=st.integers(0, 2**40), epochs=st.integers(1, 3))
    def test_each_epoch_has_each_row_once(self, num: int, size: int, seed: int, epochs: int) -> None:
        batches = Batches(dataset_of(num), size, SEQ_LEN, seed, 0)
        num_steps = batches.num_steps(epochs)
        stream = [name for step in range(num_steps) for name in names(batches.batch(step))]
        for epoch in range(epochs):
            assert sorted(stream[epoch * num : (epoch + 1) * num]) == list(range(num))
        assert 0 <= len(stream) - epochs * num < size

    @settings(deadline=None)
    @given(num=st.integers(1, 23), size=st.integers(1, 9), seed=st.integers(0, 99), steps=st.permutations(range(8)))
    def test_a_batch_depends_on_its_step_alone(self, num: int, size: int, seed: int, steps: list[int]) -> None:
        asked_in_any_order = Batches(dataset_of(num), size, SEQ_LEN, seed, 0)
        for step in steps:
            assert same(asked_in_any_order.batch(step), Batches(dataset_of(num), size, SEQ_LEN, seed, 0).batch(step))

    @settings(deadline=None)
    @given(num=st.integers(1, 23), size=st.integers(1, 9), step=st.integers(0, 10**9))
    def test_rows_and_targets(self, num: int, size: int, step: int) -> None:
        dataset = dataset_of(num)
        batch = Batches(dataset, size, SEQ_LEN, 7, 5).batch(step)
        assert batch.input_ids.shape == batch.targets.shape == (size, SEQ_LEN)
        assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
        for row, targets, name in zip(batch.input_ids.tolist(), batch.targets.tolist(), names(batch), strict=True):
            example = dataset.examples[name]
            pads = SEQ_LEN - len(example.input_ids)
            assert row == example.input_ids.tolist() + [5] * pads
            assert targets == example.labels.tolist()[1:] + [-100] * (pads + 1)
        assert batch.num_trained_tokens == int((batch.targets != -100).sum()) > 0

    def test_epochs_and_seeds_have_orders_of_their_own(self) -> None:
        def order(seed: int, epoch: int) -> list[int]:
            return names(Batches(dataset_of(50), 50, SEQ_LEN, seed, 0).batch(epoch))

        assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4

    def test_without_a_pad_token_rows_are_filled_with_0(self) -> None:
        assert Batches(dataset_of(1), 1, SEQ_LEN, 0, None).batch(0).input_ids.tolist() == [[100, 100, 0, 0, 0, 0]]

    @pytest.mark.parametrize(("epochs", "num_steps"), [(1, 4), (2, 7), (0.5, 2), (1.1, 4), (0.01, 1)])
    def test_num_steps(self, epochs: float, num_steps: int) -> None:
        assert Batches(dataset_of(10), 3, SEQ_LEN, 0, 0).num_steps(epochs) == num_steps

    def test_fractions_of_an_epoch_are_not_rounded_up_twice(self) -> None:
        assert Batches(dataset_of(100), 1, SEQ_LEN, 0, 0).num_steps(0.07) == 7

    def test_refuses_a_negative_seed(self) -> None:
        with pytest.raises(UsageError, match="seed: -1 is negative"):
            Batches(dataset_of(3), 1, SEQ_LEN, -1, 0)


class TestHeldOut:
    @settings(deadline=None)
    @given(num=st.integers(1, 23), size=st.integers(1, 9))
    def test_each_row_is_evaluated_once_in_order(self, num: int, size: int) -> None:
        dataset = dataset_of(num)
        batches = list(evaluation_batches(dataset, size, SEQ_LEN, None))
        assert {tuple(batch.input_ids.shape) for batch in batches} == {(size, SEQ_LEN)}
        padded = [name for batch in batches for name in names(batch)]
        assert padded == list(range(num)) + [-100] * (-num % size)
        trained = sum(example.num_trained_tokens for example in dataset.examples)
        assert sum(batch.num_trained_tokens for batch in batches) == trained
        assert sum(int((batch.targets != -100).sum()) for batch in batches) == trained

    @settings(deadline=None)
    @given(num=st.integers(2, 23), seed=st.integers(0, 99), data=st.data())
    def test_split_keeps_every_row_once(self, num: int, seed: int, data: st.DataObject) -> None:
        num_held_out = data.draw(st.integers(1, num - 1))
        dataset = dataset_of(num)
        parts = split(dataset, num_held_out, seed)
        rows = [[int(example.input_ids[0]) - 100 for example in part.examples] for part in parts]
        assert sorted(rows[0] + rows[1]) == list(range(num))
        assert rows == [sorted(part) for part in rows]
        assert [part.report.num_kept for part in parts] == [num - num_held_out, num_held_out]
        again = split(dataset, num_held_out, seed)
        assert [part.examples for part in again] == [part.examples for part in parts]

    @pytest.mark.parametrize("num_held_out", [-1, 0, 5, 6])
    def test_split_refuses_an_empty_part(self, num_held_out: int) -> None:
        with pytest.raises(UsageError, match=rf"num_held_out: {num_held_out} of 5 rows .* give 1 to 4"):
            split(dataset_of(5), num_held_out, 0)


def load(tmp_path: Path, rows: list[dict[str, Any]], seq_len: int, tokenizer: Any = None) -> Dataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Dataset.load(path, tokenizer or make_tokenizer(), seq_len)


class TestLoad:
    def test_reports_what_became_of_each_row(self, tmp_path: Path) -> None:
        rows = [
            {"prompt": "ab", "completion": "cd"},
            {"prompt": "abc", "completion": "defgh"},
            {"prompt": "abcdef", "completion": "g"},
            {"prompt": "", "completion": ""},
        ]
        dataset = load(tmp_path, rows, seq_len=6)
        assert dataset.report == DataReport(
            num_rows=4, num_kept=2, num_dropped_too_long=1, num_dropped_untrained=1, num_truncated=1,
            num_split_boundaries=0, num_tokens=5 + 6, num_trained_tokens=3 + 3,
        )  # fmt: skip
        assert dataset.report.summary() == (
            "2 of 4 rows: 11 tokens, 6 of them trained, 1 dropped, answer beyond the sequence length, "
            "1 dropped, nothing to train, 1 truncated"
        )
        assert [len(example.input_ids) for example in dataset.examples] == [5, 6]

    def test_a_cut_row_keeps_no_memory_of_the_rest(self, tmp_path: Path) -> None:
        (example,) = load(tmp_path, [{"text": "a" * 1000}], seq_len=8).examples
        assert example.input_ids.base is None
        assert example.labels.base is None

    def test_the_last_token_that_fits_can_be_the_only_trained_one(self, tmp_path: Path) -> None:
        dataset = load(tmp_path, [{"prompt": "abc", "completion": "de"}], seq_len=4)
        batch = Batches(dataset, 1, 4, 0, 0).batch(0)
        assert (batch.targets != -100).tolist() == [[False, False, True, False]]
        assert batch.num_trained_tokens == 1

    @pytest.mark.parametrize("seq_len", [3, 1])
    def test_refuses_data_whose_answers_are_all_cut_off(self, tmp_path: Path, seq_len: int) -> None:
        with pytest.raises(UsageError, match=r"all labels are masked: 1 rows .* larger --seq-len, or check"):
            load(tmp_path, [{"prompt": "abc", "completion": "de"}], seq_len)

    def test_refuses_conversations_without_an_assistant(self, tmp_path: Path) -> None:
        rows = [{"messages": [{"role": "user", "content": "hi"}]}]
        with pytest.raises(UsageError, match=r"all labels are masked: 0 rows .* 1 have none"):
            load(tmp_path, rows, 99, make_tokenizer(tiny.CHAT))

    def test_a_pad_that_is_the_end_of_turn_stays_a_target(self, tmp_path: Path) -> None:
        tokenizer = make_tokenizer(tiny.CHAT, eos="<|end|>", pad="<|end|>")
        dataset = load(tmp_path, [{"question": "hi", "answer": "yes"}], 99, tokenizer)
        batch = Batches(dataset, 1, 99, 0, tiny.SPECIAL.index("<|end|>")).batch(0)
        assert tokenizer.decode(batch.targets[batch.targets != -100]) == "yes<|end|>"

    def test_vocabulary(self, tmp_path: Path) -> None:
        dataset = load(tmp_path, [{"text": "ab"}, {"text": "az"}], 9)
        largest = max(int(example.input_ids.max()) for example in dataset.examples)
        check_vocabulary(dataset, largest + 1)
        with pytest.raises(UsageError, match=rf"token id {largest}, the model's embedding only {largest} rows"):
            check_vocabulary(dataset, largest)
