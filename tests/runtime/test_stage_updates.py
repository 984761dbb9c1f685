"""The fp32 update against torch's own optimizer, chunked and not, and its skipping."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lazysched.runtime import stage_updates as module
from lazysched.runtime.flat import flat_bytes, flat_views
from lazysched.runtime.stage_updates import AdamWFp32, AdamWSettings, StepScale
from lazysched.schemas import Stage

SHAPES = {"a.weight": (37, 21), "a.bias": (37,), "norm.weight": (5,), "b.weight": (64, 48)}
LEARNING_RATE = 1e-2
SETTINGS = AdamWSettings(beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.3)


def stage(dtype: torch.dtype) -> Stage:
    return Stage(id="block.0", structure="B", params=SHAPES, weight_bytes=flat_bytes(SHAPES, dtype.itemsize))


def scale(step: int, *, factor: float = 1.0, skip: float = 0.0) -> StepScale:
    scalars = (torch.tensor(value) for value in (factor, skip, float(step)))
    return StepScale(torch.tensor(factor), SETTINGS.coefficients(*scalars, LEARNING_RATE), LEARNING_RATE)


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
        update.load(name, partial(copy, value))
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
