"""Runs of seconds on the CPU through ``train``, by plans written by hand: nothing is profiled or solved."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoConfig

from lazysched.runtime.loop import StepRow
from lazysched.runtime.model import Model
from lazysched.runtime.progress import ProgressReport
from lazysched.runtime.train import train
from lazysched.runtime.train_result import TrainResult
from lazysched.schemas import Dtype, Plan, StagePlan, StateFormat, Tier
from lazysched.step_rows import LOG_FILE, MEASURED
from tests.end_to_end.tiny_folder import make_data, make_model
from tests.runtime.tiny import variants_of

SEQ_LEN, MICRO_BATCH, NUM_ROWS = 24, 2, 10
"""Ten rows of four a step: an epoch ends within a step."""


@dataclass(frozen=True)
class SmallRun:
    """A model and data."""

    model: Path
    data: Path

    @classmethod
    def make(cls, folder: Path) -> SmallRun:
        return cls(make_model(folder / "model"), make_data(folder / "data.jsonl", NUM_ROWS))

    def plan(
        self, tier: Tier = "host", state_format: StateFormat = "hybrid8", dtype: Dtype = "bfloat16",
        accumulation: int = 2, blocks: Tier | None = None, device: str = "cpu", trainable: Sequence[str] = (),
    ) -> Plan:  # fmt: skip
        """Everything on ``tier`` but blocks on ``blocks``; most matrices above 600 elements have 8-bit state."""
        config, where = AutoConfig.from_pretrained(self.model), torch.device(device)
        model = Model(config, dtype, where, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, trainable=trainable)
        end = StagePlan(weights=tier, state=tier, state_format=state_format)
        block = StagePlan(weights=blocks or tier, state=blocks or tier, state_format=state_format, save="input")
        return Plan(
            model_id=model.model_id, hardware_id="any", compute_dtype=dtype, batch_size=MICRO_BATCH * accumulation,
            seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, accumulation=accumulation, loss_chunk_tokens=16,
            variants=variants_of(model, MICRO_BATCH, SEQ_LEN), budget_bytes={},
            trainable=list(trainable),
            stages={s.id: block if s.is_block else end for s in model.stages}, fp32_state_elements=600,
        )  # fmt: skip

    def train(self, plan: Plan, output: Path, num_steps: int, **options: Any) -> tuple[TrainResult, str]:
        """The result, and what was shown."""
        shown = io.StringIO()
        settings: dict[str, Any] = {
            "learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.1, "save_steps": 0,
            "device": "cpu",
        }  # fmt: skip
        result = train(
            plan, model=str(self.model), data=str(self.data), output_dir=str(output),
            max_steps=num_steps, console=options.pop("console", Console(file=shown, width=300)), **settings | options,
        )  # fmt: skip
        return result, shown.getvalue()


def at_step(monkeypatch: pytest.MonkeyPatch, actions: dict[int, Callable[[], object]]) -> None:
    """Do something when the numbers of a step are shown, which is before its checkpoint is saved."""
    show = ProgressReport.__call__

    def showing(self: ProgressReport, row: StepRow) -> None:
        show(self, row)
        actions.get(row.step + 1, lambda: None)()

    monkeypatch.setattr(ProgressReport, "__call__", showing)


def weights_of(folder: Path) -> dict[str, bytes]:
    """Tensor -> bytes of every safetensors file in ``folder``; optimizer state too, where there is some."""
    files = sorted(folder.glob("*.safetensors"))
    assert files, folder
    return {
        f"{name} {tuple(tensor.shape)}": tensor.view(-1).view(torch.uint8).numpy().tobytes()
        for file in files
        for name, tensor in load_file(file).items()
    }


def log_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of the log without what was measured."""
    rows = [json.loads(line) for line in (folder / LOG_FILE).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]
