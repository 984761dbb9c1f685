"""Estimated profiles: bytes against compiled graphs, times against what was measured on an H200, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from lazysched.errors import UsageError
from lazysched.profiles.estimate import estimate
from lazysched.profiles.library_files import library_names, load_hardware
from lazysched.profiles.shapes import ModelShape, shape_of
from lazysched.profiles.variants import candidates, kept_bytes
from lazysched.runtime.model import Model
from lazysched.schemas import Figure, Hardware, Profile, SaveVariant
from lazysched.solver import solve

SHAPE_7B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip
SHAPE_3B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 2, "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
TIME_TOLERANCE = 0.06
"""The worst figure of the profiles that the constants were read off is 5.5 % off."""
STEP_TOLERANCE = 0.05
"""The worst step of ``benchmarks/estimates.py`` is 3.4 % off."""


def of(shape: dict[str, Any]) -> ModelShape:
    return shape_of(shape, "bfloat16")


def h200(**changes: Figure) -> Hardware:
    return load_hardware("h200").model_copy(update=changes)


def by_name(profile: Profile, rows: int) -> dict[str, SaveVariant]:
    (structure,) = (key for key in profile.variants if key not in {"embed", "head"})
    return {variant.name: variant for variant in profile.variants[structure][rows]}


MEASURED_7B = {
    "18944x2+3584x3": (0.012517, 0.025486, 1629356544, 738198512, 2483027968),
    "18944x2": (0.012752, 0.028066, 1241513984, 855638016, 2483039744),
    "18944+3584x2": (0.012577, 0.029450, 889192448, 738197504, 3221302784),
    "3584x2+512x2": (0.012519, 0.033109, 268435456, 1358954496, 3842059776),
    "input": (0.012579, 0.034317, 0, 1476395008, 4347266048),
}
"""A block of Qwen2's 7B shape, 16 rows of 1024, on an H200: forward and backward seconds, bytes saved beside the input,
working set of forward and backward."""


@pytest.mark.parametrize("name", MEASURED_7B)
def test_a_block_is_what_was_measured(name: str) -> None:
    variant = by_name(estimate(h200(), of(SHAPE_7B), micro_batches=[16]), 16)[name]
    forward_s, backward_s, saved_bytes, forward_bytes, backward_bytes = MEASURED_7B[name]
    assert variant.forward.seconds == pytest.approx(forward_s, rel=TIME_TOLERANCE)
    assert variant.backward.seconds == pytest.approx(backward_s, rel=TIME_TOLERANCE)
    assert variant.saved_bytes == pytest.approx(saved_bytes, rel=1e-6)  # a few tensors of some bytes are not counted
    # Beside these are a few small gradients, which do not grow with the micro-batch.
    assert variant.working_forward_bytes == pytest.approx(forward_bytes, rel=1e-4)
    assert variant.working_backward_bytes == pytest.approx(backward_bytes, rel=1e-4)


def test_the_ends_are_what_was_measured() -> None:
    profile = estimate(h200(), of(SHAPE_7B), micro_batches=[16], loss_chunk_tokens=4096)
    (head,), (embed,) = profile.variants["head"][16], profile.variants["embed"][16]
    assert head.forward.seconds == pytest.approx(0.044784, rel=TIME_TOLERANCE)
    assert head.backward.seconds == pytest.approx(0.093372, rel=TIME_TOLERANCE)
    assert head.working_forward_bytes == pytest.approx(1363150332, rel=1e-4)
    assert head.working_backward_bytes == pytest.approx(3108079616, rel=1e-4)
    assert embed.backward.seconds == pytest.approx(0.0031205, rel=TIME_TOLERANCE)
    assert embed.working_backward_bytes == pytest.approx(1349158912, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "batch_size", "micro_batches", "gpu_gb", "measured_s"),
    [(SHAPE_3B, 32, (8, 16, 32), None, 1.107), (SHAPE_7B, 8, (8,), None, 0.618), (SHAPE_7B, 32, (8,), 24, 2.862)],
)
def test_a_step_is_what_was_measured(
    shape: dict[str, Any], batch_size: int, micro_batches: tuple[int, ...], gpu_gb: int | None, measured_s: float
) -> None:
    """Steps on an H200 as in the README; the 3B shape has no part in the constants."""
    profile = estimate(h200(), of(shape), micro_batches=micro_batches, loss_chunk_tokens=4096)
    gpu_bytes = None if gpu_gb is None else gpu_gb * 10**9
    solution = solve(profile, batch_size=batch_size, gpu_memory_bytes=gpu_bytes, gap=0.02)
    assert solution.timeline.step_s == pytest.approx(measured_s, rel=STEP_TOLERANCE)


GRAPHS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 64}),
    "gemma3_text": (Gemma3TextConfig, {"head_dim": 64}),
    "olmo2": (Olmo2Config, {}),
    "phi3": (Phi3Config, {"pad_token_id": 0}),
}
SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "vocab_size": 96, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize("model_type", GRAPHS)
def test_kept_bytes_are_those_of_the_graphs(model_type: str) -> None:
    """Blocks of small models are traced and split here; the estimate knows no more than their configuration."""
    make, more = GRAPHS[model_type]
    model = Model(make(**SMALL, **more), "bfloat16", torch.device("cpu"), micro_batch=2, seq_len=256)
    stage = model.stages[1]
    ours = by_name(estimate(h200(), of({"model_type": model_type, **SMALL, **more}), seq_len=256, micro_batches=[2]), 2)
    assert ours["all"].saved_bytes == pytest.approx(kept_bytes(model.kept(stage, 1.0)), rel=0.01)
    if model_type == "llama":
        found = {wanted.name: wanted for wanted in candidates(lambda budget: model.kept(stage, budget), 512)}
        assert {"704x2+256x3+128x2", "704x2", "input"} <= found.keys() & ours.keys()
        for name in found.keys() & ours.keys():
            assert ours[name].saved_bytes == pytest.approx(found[name].kept_bytes, rel=0.01)


@pytest.mark.parametrize("name", library_names())
def test_every_machine_of_the_library_can_be_planned_for(name: str) -> None:
    profile = estimate(load_hardware(name), of(SHAPE_7B), micro_batches=[4])
    assert profile.estimated
    assert Profile.model_validate(profile.model_dump()) == profile
    plan = solve(profile, batch_size=16, gap=0.1, time_limit_s=20).plan
    assert plan.profile is not None
    assert plan.profile.estimated
    assert "-estimate-" in plan.model_id


def test_more_of_everything_is_faster() -> None:
    def step_s(**changes: float) -> float:
        figures = {name: Figure(value=value, source="assumed", note="test") for name, value in changes.items()}
        profile = estimate(h200(**figures), of(SHAPE_7B | {"num_hidden_layers": 4}), micro_batches=[8])
        return solve(profile, batch_size=8, gpu_memory_bytes=14 * 10**9, gap=0.0).timeline.step_s

    base = step_s()
    assert step_s(matmul_flop_per_s=900e12) < base
    assert step_s(gpu_copy_bytes_per_s=5e12) < base
    assert step_s(h2d_bytes_per_s=20e9, h2d_both_bytes_per_s=20e9) > base


def test_variants_trade_memory_for_time() -> None:
    variants = list(by_name(estimate(h200(), of(SHAPE_7B), micro_batches=[8]), 8).values())
    seconds = [variant.forward.seconds + variant.backward.seconds for variant in variants]
    assert seconds == sorted(seconds)
    saved = [variant.saved_bytes for variant in variants]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] == 0


def test_a_window_makes_attention_cheaper() -> None:
    gemma = {"model_type": "gemma2", "num_hidden_layers": 2, "sliding_window": 512}
    profile = estimate(h200(), of(gemma), seq_len=8192, micro_batches=[1])
    sliding, full = (profile.variants[f"Gemma2DecoderLayer{suffix}"][1][0] for suffix in ("", "/1"))
    assert sliding.forward.seconds < full.forward.seconds


def test_a_machine_without_a_gpu_runs_uncompiled() -> None:
    figure = Figure(value=12e9, source="assumed", note="test")
    hardware = h200(h2d_both_bytes_per_s=Figure(value=None, note="in line"), gpu_memory_bytes=figure)
    hardware = hardware.model_copy(update={"device": "cpu", "compute_dtype": "float32"})
    shape = shape_of(SHAPE_3B | {"num_hidden_layers": 2, "vocab_size": 1000}, "float32")
    profile = estimate(hardware, shape, seq_len=128, micro_batches=[1])
    assert [(variant.name, variant.compiled) for variant in by_name(profile, 1).values()] == [
        ("all", False),
        ("input", False),
    ]
    assert profile.context_bytes == 0
    assert (
        solve(profile, batch_size=2, gpu_memory_bytes=3 * 10**9, host_memory_bytes=10**10).plan.compute_dtype
        == "float32"
    )


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, {"seq_len": 0}, "seq_len: 0"),
        ({}, {"micro_batches": []}, "micro_batches: "),
        ({}, {"micro_batches": [2, -1]}, "micro_batches: "),
        ({}, {"seq_len": 40000}, "beyond the model's max_position_embeddings 32768"),
        ({"matmul_flop_per_s": Figure(value=None, note="broken")}, {}, r"matmul_flop_per_s: null \(broken\); a plan"),
        ({"h2d_bytes_per_s": Figure(value=None, note="no link")}, {}, r"h2d_bytes_per_s: null \(no link\)"),
    ],
)
def test_what_cannot_be_estimated_is_one_line(
    changes: dict[str, Figure], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        estimate(h200(**changes), of(SHAPE_7B), **arguments)


def test_what_is_frozen_has_no_gradients_in_an_estimate() -> None:
    whole = estimate(h200(), of(SHAPE_7B), micro_batches=[8])
    last = estimate(h200(), of(SHAPE_7B), micro_batches=[8], trainable=["layers.27.", "lm_head"])
    assert last.trainable == ["layers.27.", "lm_head"]
    assert (last.model_id, len(last.stages)) == (whole.model_id, len(whole.stages))
    [forward] = last.variants["Qwen2DecoderLayer-forward"][8]
    assert (forward.name, list(forward.saved), forward.backward.median_s) == ("input", ["input"], 0.0)
    assert last.variants["Qwen2DecoderLayer"] == whole.variants["Qwen2DecoderLayer"]
    assert last.variants["head"] == whole.variants["head"]
    assert last.variants["embed"][8][0].backward.median_s == 0.0
    trained = sum(stage.num_trained for stage in last.stages)
    assert trained == whole.stages[1].num_params + 152064 * 3584


def test_products_for_frozen_matrices_are_left_out_of_an_estimate() -> None:
    whole, mlp = (estimate(h200(), of(SHAPE_7B), micro_batches=[8], trainable=t) for t in (None, [r"\.mlp\."]))
    ours, all_s = (
        next(iter(p.variants[name][8])).backward.seconds
        for p, name in ((mlp, "Qwen2DecoderLayer-part0"), (whole, "Qwen2DecoderLayer"))
    )
    # The attention's matrices are 29 of 233 M parameters, whose gradients take 2 operations a token and parameter.
    left_out_s = 2 * 8 * 1024 * 29.4e6 / (h200().matmul_flop_per_s.value or 0)
    assert all_s - ours == pytest.approx(left_out_s, rel=0.05)
    head, whole_head = (p.variants["head"][8][0].backward.seconds for p in (mlp, whole))
    assert head < whole_head
