"""Profile, solve and train with graphs that Inductor compiles: the whole path on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazysched.profiles.measure import profile
from lazysched.runtime.train import train
from lazysched.solver import solve
from tests.end_to_end.tiny_folder import make_data, make_model

pytestmark = pytest.mark.slow


def test_a_compiled_plan_trains(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model", tied=False), make_data(tmp_path / "data.jsonl")
    measured = profile(
        str(model), device="cpu", seq_len=16, micro_batches=(1, 2), loss_chunk_tokens=12, repeats=2, compiled=True
    )
    assert not [note for note in measured.notes if note.startswith("compile.")]
    blocks = measured.variants["LlamaDecoderLayer"]
    assert all(variant.compiled for variants in blocks.values() for variant in variants)
    assert [v.name for v in blocks[1]] == [v.name for v in blocks[2]]
    plan = solve(measured, batch_size=4, time_limit_s=5).plan
    assert plan.variants["head:all"].compiled
    result = train(
        plan, model=str(model), data=str(data), eval_data=str(data), output_dir=str(tmp_path / "out"), max_steps=8,
        learning_rate=1e-2, device="cpu",
    )  # fmt: skip
    assert result.held_out_loss_before is not None
    assert result.held_out_loss_after is not None
    assert result.held_out_loss_after < result.held_out_loss_before
