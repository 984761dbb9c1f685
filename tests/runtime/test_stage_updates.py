"""Updates of stages: fp32 against torch's own optimizer, 8-bit state against its tensors by themselves; skipping."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lazysched import optimizer_state
from lazysched.optimizer_state import hybrid8_layout
from lazysched.runtime import hybrid8, hybrid8_torch
from lazysched.runtime import stage_updates as module
from lazysched.runtime.flat import flat_bytes, flat_views
from lazysched.runtime.hybrid8 import BlockState, Fp32State
from lazysched.runtime.hybrid8_torch import master_of, update_blocks, update_fp32
from lazysched.runtime.stage_updates import AdamWFp32, AdamWSettings, Hybrid8Update, StepScale
from lazysched.schemas import Stage

SHAPES = {"a.weight": (37, 21), "a.bias": (37,), "norm.weight": (5,), "b.weight": (64, 48)}
LEARNING_RATE = 1e-2
SETTINGS = AdamWSettings(beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.3, seed=3)


def stage(dtype: torch.dtype) -> Stage:
    return Stage(id="block.0", structure="B", params=SHAPES, weight_bytes=flat_bytes(SHAPES, dtype.itemsize))


def scale(step: int, *, factor: float = 1.0, skip: float = 0.0) -> StepScale:
    skips, steps = torch.tensor(skip), torch.tensor(float(step))
    coefficients = SETTINGS.coefficients(torch.tensor(factor), skips, steps, LEARNING_RATE)
    return StepScale(torch.tensor(factor), coefficients, LEARNING_RATE)


def copy(value: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(value)


def make(dtype: torch.dtype) -> tuple[AdamWFp32, torch.Tensor, dict[str, torch.Tensor]]:
    described = stage(dtype)
    elements = described.weight_bytes // dtype.itemsize
    weights, grads = torch.zeros(elements, dtype=dtype), torch.zeros(elements, dtype=dtype)
    state = torch.zeros(elements * (2 if dtype == torch.float32 else 3))
    update = AdamWFp32(described, weights, grads, state, SETTINGS)
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for name, value in start.items():
        update.load(name, partial(copy, value), value.dtype)
    return update, grads, start


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [16, 256, 1 << 20])
def test_bits_are_those_of_torch_for_every_chunk(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_UPDATE_CHUNK", chunk)
    update, grads, start = make(dtype)
    params = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    groups = [
        {"params": [p for n, p in params.items() if p.ndim == 2], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for n, p in params.items() if p.ndim == 1], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.8, 0.95), eps=1e-6, fused=True)
    for step in (1, 2, 3):
        factor = 0.25 if step == 2 else 1.0
        for name, view in flat_views(grads, stage(dtype), dtype.itemsize).items():
            view.copy_(gradients(step)[name])
            params[name].grad = view.float() * factor
        update.update(scale(step, factor=factor))
        theirs.step()
    for name, param in params.items():
        assert torch.equal(update.master[name], param.detach()), name
        assert torch.equal(update.weights[name], param.detach().to(dtype)), name


def test_a_skipped_step_changes_nothing() -> None:
    update, grads, _ = make(torch.bfloat16)
    grads.fill_(float("inf"))
    before = {name: value.clone() for name, value in update.master.items()}
    update.update(scale(1, skip=1.0))
    assert all(torch.equal(update.master[name], value) for name, value in before.items())
    grads.fill_(0.5)
    update.update(scale(1))
    assert not any(torch.equal(update.master[name], value) for name, value in before.items())


FP32_ELEMENTS = 1000  # b.weight has 8-bit state; a.weight, the bias and the norm do not


def make_hybrid8(dtype: torch.dtype) -> tuple[Hybrid8Update, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """An update with its flat buffers, and the fp32 values that were loaded."""
    described = stage(dtype)
    flat = {kind: torch.zeros(described.weight_bytes // dtype.itemsize, dtype=dtype) for kind in ("weights", "grads")}
    flat["state"] = torch.zeros(hybrid8_layout(described, dtype.itemsize, FP32_ELEMENTS)[1], dtype=torch.uint8)
    update = Hybrid8Update(described, **flat, settings=SETTINGS, fp32_elements=FP32_ELEMENTS, threads=1)
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for name, value in start.items():
        update.load(name, partial(copy, value), value.dtype)
    return update, flat, start


def part(flat: dict[str, torch.Tensor], dtype: torch.dtype, name: str, part_name: str) -> torch.Tensor:
    """Bytes of one part of one tensor's state, where the layout says."""
    tensors = {tensor.name: tensor for tensor in hybrid8_layout(stage(dtype), dtype.itemsize, FP32_ELEMENTS)[0]}
    offset, num_bytes = tensors[name].parts[part_name]
    return flat["state"][offset : offset + num_bytes]


def test_loading_keeps_24_bits_of_a_matrix_and_all_bits_of_small_tensors() -> None:
    update, flat, start = make_hybrid8(torch.bfloat16)
    correction = part(flat, torch.bfloat16, "b.weight", "correction").view(torch.int8)
    exact, master = start["b.weight"].view(-1), master_of(update.weights["b.weight"].view(-1), correction)
    # 15 bits behind the leading one, rounded to nearest: off by at most half of the last.
    assert ((master - exact).abs() <= exact.abs() * 2.0**-16).all()
    assert (master != update.weights["b.weight"].float().view(-1)).any()
    for name in ("a.weight", "a.bias", "norm.weight"):
        assert torch.equal(part(flat, torch.bfloat16, name, "master").view(torch.float32), start[name].view(-1))
        assert torch.equal(update.weights[name], start[name].bfloat16())


def test_loading_bf16_values_changes_no_bit_of_them() -> None:
    update, flat, start = make_hybrid8(torch.bfloat16)
    update.load("b.weight", partial(copy, start["b.weight"].bfloat16()), torch.bfloat16)
    assert torch.equal(update.weights["b.weight"], start["b.weight"].bfloat16())
    assert not part(flat, torch.bfloat16, "b.weight", "correction").any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stage_is_updated_as_its_tensors_by_themselves(dtype: torch.dtype) -> None:
    update, flat, start = make_hybrid8(dtype)
    alone = {name: alone_state(name, value, dtype) for name, value in start.items()}
    for step in (1, 2, 3):
        now = scale(step, factor=0.25 if step == 2 else 1.0)
        for name, view in flat_views(flat["grads"], stage(dtype), dtype.itemsize).items():
            view.copy_(gradients(step)[name])
            alone[name].grad.copy_(view.view(-1))
            state = alone[name]
            if isinstance(state, BlockState):
                update_blocks(state, now.coefficients)
            else:
                update_fp32(state, now.coefficients)
        update.update(now)
    assert isinstance(alone["b.weight"], BlockState)
    for name, state in alone.items():
        assert torch.equal(update.weights[name].view(-1), state.weight), name
        for part_name in ("first", "second"):
            theirs = getattr(state, part_name).view(torch.uint8)
            assert torch.equal(part(flat, dtype, name, part_name), theirs), (name, part_name)


def alone_state(name: str, value: torch.Tensor, dtype: torch.dtype) -> BlockState | Fp32State:
    """State of one tensor in memory of its own, its master rounded as loading does."""
    count, decays = value.numel(), value.ndim == 2
    weight, grad = value.to(dtype).view(-1), torch.zeros(count, dtype=dtype)
    narrow = dtype == torch.bfloat16
    if name != "b.weight":
        master = value.clone().view(-1) if narrow else None
        return Fp32State(weight, grad, master, torch.zeros(count), torch.zeros(count), decays)
    correction = torch.zeros(count, dtype=torch.int8) if narrow else None
    if correction is not None:
        hybrid8_torch.store_master(value.view(-1), 128, weight, correction)
    scales = torch.zeros(2, hybrid8.num_blocks(count))
    first, second = torch.zeros(count, dtype=torch.int8), torch.zeros(count, dtype=torch.uint8)
    stream = hybrid8.stream_of(SETTINGS.seed, name)
    return BlockState(weight, grad, correction, first, second, scales[0], scales[1], stream, decays)


def test_a_skipped_step_changes_no_bit_of_8bit_state() -> None:
    update, flat, _ = make_hybrid8(torch.bfloat16)
    flat["grads"].fill_(0.5)
    update.update(scale(1))
    flat["grads"].fill_(float("nan"))
    before = {kind: flat[kind].clone() for kind in ("weights", "state")}
    update.update(scale(1, factor=float("nan"), skip=1.0))
    assert all(torch.equal(flat[kind], value) for kind, value in before.items())
    flat["grads"].fill_(0.5)
    update.update(scale(2))
    assert not any(torch.equal(flat[kind], value) for kind, value in before.items())


def test_the_layout_knows_how_many_coefficients_there_are() -> None:
    assert optimizer_state.NUM_COEFFICIENTS == hybrid8.NUM_COEFFICIENTS
