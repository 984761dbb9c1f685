"""The whole path on real input: SmolLM2 cut to a few layers, GSM8K, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from lazysched.cli import main
from lazysched.runtime.data import Dataset, evaluation_batches
from lazysched.step_rows import LOG_FILE
from tests.end_to_end.gsm8k_model import cut_model, first_rows

NUM_LAYERS, NUM_STEPS, SEQ_LEN = 3, 20, 256


@pytest.fixture
def model(smollm2_gguf: Path, tmp_path: Path) -> Path:
    return cut_model(smollm2_gguf, tmp_path / "cut", NUM_LAYERS)


@pytest.fixture
def data(gsm8k: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Some training rows and some held-out rows."""
    files = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    for path, rows in zip(files, first_rows(gsm8k, 60, 6), strict=True):
        path.write_text("\n".join(rows))
    return files


def held_out_loss(folder: Path, data: Path) -> float:
    """Loss per trained token as transformers computes it from the folder on disk."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    dataset = Dataset.load(data, AutoTokenizer.from_pretrained(folder), SEQ_LEN)
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in evaluation_batches(dataset, 2, SEQ_LEN, pad_id=0):
            logits = model(input_ids=batch.input_ids).logits
            total += float(F.cross_entropy(logits.flatten(0, 1).double(), batch.targets.flatten(), reduction="sum"))
            count += batch.num_trained_tokens
    return total / count


def test_profile_solve_train_and_reload(
    model: Path, data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, held_out = data
    profile, plan, output = tmp_path / "profile.json", tmp_path / "plan.json", tmp_path / "out"
    steps = [
        ["profile", str(model), "--device", "cpu", "--seq-len", str(SEQ_LEN), "--micro-batch", "1",
         "-o", str(profile)],
        ["solve", str(profile), "--batch-size", "2", "-o", str(plan)],
        ["train", "--plan", str(plan), "--model", str(model), "--data", str(train), "--eval-data", str(held_out),
         "--output-dir", str(output), "--max-steps", str(NUM_STEPS), "--learning-rate", "1e-3", "--device", "cpu",
         "--warmup-ratio", "0.1"],
    ]  # fmt: skip
    for step in steps:
        assert main(step) == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in (output / LOG_FILE).read_text().splitlines()]
    assert len(rows) == NUM_STEPS
    assert sum(row["loss"] for row in rows[-5:]) < 0.8 * sum(row["loss"] for row in rows[:5])
    before, after = held_out_loss(model, held_out), held_out_loss(output, held_out)
    assert after < before
    shown = capsys.readouterr().out
    assert f"{before:.4f}" in shown
    assert f"{after:.4f}" in shown
