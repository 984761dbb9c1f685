"""Parameters of every kind for the optimizer, and loops over gradients set by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lazysched.runtime.optimizer import HybridAdamW8bit

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
formats = pytest.mark.parametrize("state", ["hybrid8", "fp32"])
SHAPES = [(40, 130), (257,), (8, 9), (0, 3), (3, 11, 31)]
FP32_ELEMENTS = 512
"""The first and the last have 8-bit moments in hybrid8, and a last block that is not full."""


def parameters(dtype: torch.dtype, device: str = "cpu") -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def set_gradients(params: list[Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = (scale * torch.randn(param.shape, generator=generator)).to(param.device, param.dtype)


def make(params: Any, **options: Any) -> HybridAdamW8bit:
    return HybridAdamW8bit(params, **({"lr": 1e-2, "fp32_elements": FP32_ELEMENTS} | options))


def groups(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "weight_decay": 0.3}, {"params": params[2:], "lr": 3e-2, "betas": (0.8, 0.95)}]


def spoil(param: Parameter, bad: float) -> None:
    assert param.grad is not None
    param.grad[1, 1] = bad


def run(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def snapshot(optimizer: HybridAdamW8bit) -> list[Tensor]:
    """Copies of all parameters and all of their state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [t.detach().clone() for p in params for t in [p, *optimizer.state.get(p, {}).values()]]


def num_counts(optimizer: HybridAdamW8bit) -> int:
    """Tensors that count steps; one update runs for each."""
    return len({id(state["step"]) for state in optimizer.state.values()})


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))
