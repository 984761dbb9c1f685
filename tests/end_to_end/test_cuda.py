"""The three steps on a GPU, from a folder to a folder, through the public functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import lazysched
from lazysched.profiles.refine import load_recording, refine
from tests.end_to_end.tiny_folder import make_data, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_where_nothing_can_be_page_locked(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model", hidden_size=64, intermediate_size=128), make_data(tmp_path / "d.jsonl")
    profile = lazysched.profile(str(model), device="cuda", seq_len=64, micro_batches=[4], pin_limit_bytes=0)
    assert profile.links["h2d"].reason == "only 0 B can be page-locked"
    assert profile.links["h2d_pageable"].points
    solution = lazysched.solve(
        profile, batch_size=8, gpu_memory_bytes=profile.context_bytes + 2 * 10**8, host_memory_bytes=10**9
    )
    assert solution.plan.host_memory == "pageable"
    result = lazysched.train(
        solution.plan, model=str(model), data=str(data), output_dir=str(tmp_path / "out"), device="cuda",
        max_steps=30, learning_rate=1e-2,
    )  # fmt: skip
    assert result.losses[-1] < 0.5 * result.losses[0]
    assert refine(profile, load_recording(tmp_path / "out"))


def test_profile_solve_train(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model", hidden_size=64, intermediate_size=128), make_data(tmp_path / "d.jsonl")
    profile = lazysched.profile(
        str(model), device="cuda", dtype=None, seq_len=64, micro_batches=[2, 4], storage_dir=str(tmp_path)
    )
    assert profile.compute_dtype == "bfloat16"
    assert not [link for link, curve in profile.links.items() if curve.reason]
    budget_bytes = profile.context_bytes + 2 * 10**8
    solution = lazysched.solve(profile, batch_size=8, gpu_memory_bytes=budget_bytes, host_memory_bytes=10**9)
    result = lazysched.train(
        solution.plan, model=str(model), data=str(data), eval_data=str(data), output_dir=str(tmp_path / "out"),
        device="cuda", max_steps=30, learning_rate=1e-2, trace=str(tmp_path / "trace.json"),
    )  # fmt: skip
    assert result.timed is not None
    assert result.timed.moved_bytes == result.predicted_moved_bytes
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {2, 3, 4}
    refined = refine(profile, load_recording(tmp_path / "out"))
    assert any(note.startswith("refined.variants.") for note in refined.notes)
    assert result.held_out_loss_before is not None
    assert result.held_out_loss_after is not None
    assert result.held_out_loss_after < 0.5 * result.held_out_loss_before
    assert result.peak_bytes["gpu"] <= budget_bytes
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_packed_rows_learn_as_flat_ones_do(tmp_path: Path) -> None:
    """The same samples, a row each or several to a row: the loss before training is the same but for rounding."""
    model = make_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    data = make_data(tmp_path / "d.jsonl", 48)
    evaluated = []
    for packing in (False, True):
        profile = lazysched.profile(str(model), device="cuda", seq_len=64, micro_batches=[4], packing=packing)
        budget_bytes = profile.context_bytes + 2 * 10**8
        solution = lazysched.solve(profile, batch_size=8, gpu_memory_bytes=budget_bytes, host_memory_bytes=10**9)
        result = lazysched.train(
            solution.plan, model=str(model), data=str(data), eval_data=str(data), output_dir=str(tmp_path / "out"),
            device="cuda", max_steps=30, learning_rate=1e-2,
        )  # fmt: skip
        assert result.losses[-1] < 0.5 * result.losses[0]
        evaluated.append(result.held_out_loss_before)
    assert evaluated[1] == pytest.approx(evaluated[0], rel=5e-3)
