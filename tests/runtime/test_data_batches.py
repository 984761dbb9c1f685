from __future__ import annotations

import itertools
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
    pack,
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
    return Dataset.of(examples)


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

    @pytest.mark.parametrize("arrangement", [{}, {"packing": True}, {"group_by_length": True}])
    def test_rows_are_named_by_their_number_in_the_data(self, arrangement: dict[str, bool]) -> None:
        part, _ = split(dataset_of(23), 9, seed=0)  # as if the others had been dropped
        batches = Batches(part, 4, SEQ_LEN, 3, 0, **arrangement)
        for step in range(batches.num_steps(2)):
            tokens = batches.batch(step).input_ids.flatten()
            expected = [int(token) - 99 for token in torch.unique_consecutive(tokens[tokens >= 100])]
            held = batches.held(step)
            # A row that ends an epoch may begin the next, and then its tokens follow each other.
            assert [number for number, _ in itertools.groupby(held.rows)] == expected
            assert held.epoch == step * 4 // batches.num_rows

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


def samples_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Tokens and targets of every sample and every padding, row by row, as positions tell them apart."""
    assert batch.positions is not None
    found = []
    for ids, targets, positions in zip(
        batch.input_ids.tolist(), batch.targets.tolist(), batch.positions.tolist(), strict=True
    ):
        starts = [index for index, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            assert positions[start:end] == list(range(end - start))
            found.append((ids[start:end], targets[start:end]))
    return found


class TestPacking:
    @settings(deadline=None)
    @given(num=st.integers(1, 23), size=st.integers(1, 5), seq_len=st.integers(6, 20), seed=st.integers(0, 99))
    def test_an_epoch_has_every_sample_whole_and_alone(self, num: int, size: int, seq_len: int, seed: int) -> None:
        dataset = dataset_of(num)
        batches = Batches(dataset, size, seq_len, seed, 0, packing=True)
        rows_left = batches.num_rows
        found, trained = [], 0
        for step in range(batches.num_steps(1)):
            batch = batches.batch(step)
            assert batch.num_trained_tokens == int((batch.targets != -100).sum())
            assert batch.positions is not None
            rows = slice(min(size, rows_left))  # the rest of the last batch is the next epoch's
            batch = Batch(batch.input_ids[rows], batch.targets[rows], 0, batch.positions[rows])
            rows_left -= size
            trained += int((batch.targets != -100).sum())
            found += [sample for sample in samples_of(batch) if sample[0][0] >= 100]
        expected = [(e.input_ids.tolist(), [*e.labels.tolist()[1:], -100]) for e in dataset.examples]
        assert sorted(found) == sorted(expected)
        assert trained == sum(example.num_trained_tokens for example in dataset.examples)

    @settings(deadline=None)
    @given(num=st.integers(1, 23), seq_len=st.integers(6, 20))
    def test_rows_are_filled_in_order(self, num: int, seq_len: int) -> None:
        every = dataset_of(num).lengths.tolist()
        bounds = pack(every, seq_len).tolist()
        assert (bounds[0], bounds[-1]) == (0, num)
        lengths = [every[start:end] for start, end in itertools.pairwise(bounds)]
        assert all(sum(row) <= seq_len for row in lengths)
        assert all(sum(row) + after[0] > seq_len for row, after in itertools.pairwise(lengths))

    def test_padding_is_a_sample_of_its_own(self) -> None:
        batch = Batches(dataset_of(2), 1, 9, 0, 5, packing=True).batch(0)
        assert batch.positions is not None
        assert sorted(batch.positions[0].tolist()[:5]) == [0, 0, 1, 1, 2]
        assert batch.positions[0].tolist()[5:] == [0, 1, 2, 3]
        assert batch.input_ids[0].tolist()[5:] == [5] * 4
        assert batch.targets[0].tolist()[5:] == [-100] * 4

    def test_a_batch_depends_on_its_step_alone(self) -> None:
        steps = [Batches(dataset_of(20), 2, 12, 3, 0, packing=True).batch(step) for step in (7, 2)]
        again = Batches(dataset_of(20), 2, 12, 3, 0, packing=True)
        assert same(again.batch(2), steps[1])
        assert same(again.batch(7), steps[0])
        assert not same(again.batch(7), Batches(dataset_of(20), 2, 12, 4, 0, packing=True).batch(7))

    @settings(deadline=None)
    @given(num=st.integers(1, 23), size=st.integers(1, 5))
    def test_each_sample_is_evaluated_once_in_order(self, num: int, size: int) -> None:
        dataset = dataset_of(num)
        batches = list(evaluation_batches(dataset, size, 12, 0, packing=True))
        assert {tuple(batch.input_ids.shape) for batch in batches} == {(size, 12)}
        found = [ids for batch in batches for ids, _ in samples_of(batch) if ids[0] >= 100]
        assert found == [example.input_ids.tolist() for example in dataset.examples]


class TestGroups:
    @settings(deadline=None, max_examples=30)
    @given(num=st.integers(1, 120), size=st.integers(1, 9), seed=st.integers(0, 99), steps=st.permutations(range(9)))
    def test_each_epoch_has_each_row_once_in_any_order_of_asking(
        self, num: int, size: int, seed: int, steps: list[int]
    ) -> None:
        batches = Batches(dataset_of(num), size, SEQ_LEN, seed, 0, group_by_length=True)
        stream = [name for step in range(batches.num_steps(3)) for name in names(batches.batch(step))]
        for epoch in range(3):
            assert sorted(stream[epoch * num : (epoch + 1) * num]) == list(range(num))
        again = Batches(dataset_of(num), size, SEQ_LEN, seed, 0, group_by_length=True)
        for step in steps:
            assert same(again.batch(step), batches.batch(step))

    @pytest.mark.parametrize("num", [400, 403])
    def test_rows_of_a_batch_have_similar_lengths(self, num: int) -> None:
        """In the second epoch too, where batches begin amid the first one's last."""
        dataset = dataset_of(num)

        def spread(grouped: bool) -> float:
            batches = Batches(dataset, 4, SEQ_LEN, 1, 0, group_by_length=grouped)
            rows = [names(batches.batch(step)) for step in range(batches.num_steps(2))]
            return float(np.mean([np.ptp(dataset.lengths[row]) for row in rows]))

        assert spread(True) < 0.2
        assert spread(False) > 2

    def test_batches_do_not_come_by_length(self) -> None:
        dataset = dataset_of(400)
        batches = Batches(dataset, 4, SEQ_LEN, 1, 0, group_by_length=True)
        first = [int(dataset.lengths[names(batches.batch(step))[0]]) for step in range(50)]
        assert first not in (sorted(first), sorted(first, reverse=True))
        assert len(set(first)) == 5

    def test_packed_rows_are_not_grouped(self) -> None:
        with pytest.raises(UsageError, match="group_by_length: packed rows all have one length"):
            Batches(dataset_of(3), 1, SEQ_LEN, 0, 0, packing=True, group_by_length=True)


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
        assert [part.fingerprint for part in again] == [part.fingerprint for part in parts]

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
