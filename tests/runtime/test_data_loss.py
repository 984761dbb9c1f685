"""Losses of a run on each kind of data are those of transformers' Trainer on the same batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from lazysched.runtime.batch import Batch
from lazysched.runtime.data import Batches, Dataset
from lazysched.runtime.model import Model
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Plan, StagePlan, Update
from tests.runtime import tiny_tokenizers as tiny
from tests.runtime.tiny import CPU, llama, variants_of
from tests.runtime.tiny_tokenizers import make_tokenizer

SEQ_LEN, ROWS, NUM_STEPS, LEARNING_RATE = 64, 4, 5, 1e-2
RELATIVE_ERROR = 1e-5
"""Sums of fp32 in another order; 2e-7 was seen."""
CONFIG = llama(tied=True, vocab_size=110, pad_token_id=0)

NUMBERS = [("one", "two"), ("three", "four"), ("five", "six"), ("seven", "eight!"), ("nine", "ten"), ("a", "b c d e")]
DATA: dict[str, list[dict[str, Any]]] = {
    "alpaca": [{"instruction": "after", "input": a, "output": b} for a, b in NUMBERS],
    "sharegpt": [
        {"conversations": [
            {"from": "human", "value": a}, {"from": "gpt", "value": b},
            {"from": "human", "value": "and"}, {"from": "gpt", "value": a + b},
        ]}
        for a, b in NUMBERS
    ],
    "messages": [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in NUMBERS
    ],
    "tokens": [{"input_ids": [5 + i, 9, 12, 7], "labels": [-100, 9, -100, 7]} for i, _ in enumerate(NUMBERS)],
}  # fmt: skip


def batches_of(folder: Path, kind: str, *, packing: bool = False) -> list[Batch]:
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in DATA[kind]))
    dataset = Dataset.load(path, make_tokenizer(tiny.CHAT, eos="<|end|>", pad="<|end|>"), SEQ_LEN)
    batches = Batches(dataset, ROWS, SEQ_LEN, 0, 0, packing=packing)
    return [batches.batch(step) for step in range(NUM_STEPS)]


def our_losses(batches: list[Batch], *, micro_batch: int = 2) -> list[float]:
    packing = batches[0].positions is not None
    model = Model(CONFIG, "float32", CPU, micro_batch=micro_batch, seq_len=SEQ_LEN, packing=packing)
    end = StagePlan(weights="host", state="host", state_format="fp32")
    stages = {s.id: end.model_copy(update={"save": "input"}) if s.is_block else end for s in model.stages}
    plan = Plan(
        model_id=model.model_id, hardware_id="any", compute_dtype="float32", batch_size=ROWS, seq_len=SEQ_LEN,
        micro_batch=micro_batch, accumulation=ROWS // micro_batch, loss_chunk_tokens=32,
        variants=variants_of(model, micro_batch, SEQ_LEN), budget_bytes={}, stages=stages, fp32_state_elements=1000,
        update=Update(), packing=packing, argument_bytes=model.argument_bytes if packing else 0,
    )  # fmt: skip
    weights = {name: value.detach() for name, value in their_model().named_parameters()}
    settings = AdamWSettings()
    with Session(plan, CONFIG, CPU, settings=settings, max_grad_norm=1.0, host_limit_bytes=10**9) as session:
        session.load(lambda key, target: target.copy_(weights[key]))
        return [session.executor.step(batch, LEARNING_RATE).loss for batch in batches]


def their_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


class _Rows(TorchDataset[dict[str, torch.Tensor]]):
    """Rows of all batches, one after another; labels unshifted, as transformers wants them."""

    def __init__(self, batches: list[Batch]) -> None:
        self._rows = list(self._made(batches))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._rows[index]

    def _made(self, batches: list[Batch]) -> Iterator[dict[str, torch.Tensor]]:
        for batch in batches:
            for row in range(ROWS):
                made = {"input_ids": batch.input_ids[row], "labels": batch.targets[row].roll(1)}
                if batch.positions is not None:
                    made["position_ids"] = batch.positions[row]
                yield made


class _Ordered(Trainer):
    def _get_train_sampler(self, *args: Any, **options: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class _Losses(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def their_losses(batches: list[Batch], folder: Path) -> list[float]:
    """By their own loop with two rows a micro-batch."""
    arguments = TrainingArguments(
        output_dir=str(folder / "theirs"), per_device_train_batch_size=2, gradient_accumulation_steps=ROWS // 2,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=1.0, num_train_epochs=1,
        logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, weight_decay=0.0,
    )  # fmt: skip
    seen = _Losses()
    trainer = _Ordered(
        model=their_model().eval(), args=arguments, train_dataset=_Rows(batches), callbacks=[seen],
        data_collator=lambda rows: {key: torch.stack([row[key] for row in rows]) for key in rows[0]},
    )  # fmt: skip
    trainer.train()
    return seen.losses


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("kind", "packing"), [*((kind, False) for kind in DATA), ("messages", True)])
def test_losses_are_those_of_transformers(kind: str, packing: bool, tmp_path: Path) -> None:
    batches = batches_of(tmp_path, kind, packing=packing)
    ours, theirs = our_losses(batches), their_losses(batches, tmp_path)
    assert len(ours) == len(theirs) == NUM_STEPS
    assert ours[-1] < ours[0] - 0.1, "weights must have moved, or the optimizer is not compared"
    assert ours == pytest.approx(theirs, rel=RELATIVE_ERROR)


def test_packed_samples_have_the_loss_that_they_have_alone(tmp_path: Path) -> None:
    batch = batches_of(tmp_path, "messages", packing=True)[0]
    dataset = Dataset.load(tmp_path / "messages.jsonl", make_tokenizer(tiny.CHAT, eos="<|end|>"), SEQ_LEN)
    model, total = their_model(), 0.0
    for example in dataset.examples:
        tokens = example.input_ids.tolist()
        # A batch of more rows than there are has some samples twice.
        count = sum(
            row[start : start + len(tokens)] == tokens
            for row in batch.input_ids.tolist()
            for start in range(SEQ_LEN - len(tokens) + 1)
        )
        ids, labels = (torch.from_numpy(part.astype("int64"))[None] for part in (example.input_ids, example.labels))
        with torch.no_grad():
            loss = model(input_ids=ids, labels=labels).loss
        total += count * float(loss) * example.num_trained_tokens
    assert our_losses([batch])[0] == pytest.approx(total / batch.num_trained_tokens, rel=RELATIVE_ERROR)


def test_how_a_batch_is_split_does_not_matter(tmp_path: Path) -> None:
    batches = batches_of(tmp_path, "sharegpt")
    assert len({batch.num_trained_tokens for batch in batches}) > 1, "a mean of means would hide behind equal counts"
    wanted = our_losses(batches, micro_batch=ROWS)
    for micro_batch in (1, 2):
        assert our_losses(batches, micro_batch=micro_batch) == pytest.approx(wanted, rel=RELATIVE_ERROR)


def test_a_batch_with_nothing_to_train_has_no_loss_and_no_nan(tmp_path: Path) -> None:
    batches = batches_of(tmp_path, "messages")[:2]
    masked = Batch(batches[0].input_ids, torch.full_like(batches[0].targets, -100), 0)
    losses = our_losses([batches[0], masked, batches[1]])
    assert losses[1] == 0.0
    assert all(torch.tensor(losses).isfinite())
