"""States, gradients and comparisons for tests of the 8-bit update."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch

from lazysched.runtime.hybrid8 import BlockState, Fp32State, coefficients, num_blocks, stream_of

AnyState = TypeVar("AnyState", BlockState, Fp32State)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def block_state(numel: int, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, decays: bool = True) -> BlockState:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(numel, generator=generator) * 0.02).to(dtype)
    codes = torch.zeros(numel, dtype=torch.int8)
    return BlockState(
        weight=weight, grad=torch.zeros_like(weight),
        correction=codes.clone() if dtype == torch.bfloat16 else None, first=codes,
        second=torch.zeros(numel, dtype=torch.uint8), first_scale=torch.zeros(num_blocks(numel)),
        second_scale=torch.zeros(num_blocks(numel)), stream=stream_of(seed, "weight"), decays=decays,
    )  # fmt: skip


def fp32_state(numel: int, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, decays: bool = True) -> Fp32State:
    master = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return Fp32State(
        weight=master.to(dtype), grad=torch.zeros(numel, dtype=dtype),
        master=master if dtype == torch.bfloat16 else None, first=torch.zeros(numel), second=torch.zeros(numel),
        decays=decays,
    )  # fmt: skip


def copied(state: AnyState, device: str = "cpu") -> AnyState:
    """The same state in memory of its own."""
    arrays = {name: value.to(device, copy=True) for name, value in arrays_of(state).items()}
    return dataclasses.replace(state, **arrays)


def arrays_of(state: BlockState | Fp32State) -> dict[str, torch.Tensor]:
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def different(state: AnyState, other: AnyState) -> list[str]:
    """Arrays whose bits differ; any NaN of fp32 equals any other, as the specification leaves open which it is."""
    theirs = arrays_of(other)
    return [name for name, value in arrays_of(state).items() if not _same_bits(value.cpu(), theirs[name].cpu())]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype == torch.float32:
        a, b = (torch.where(x.isnan(), torch.nan, x) for x in (a, b))
    return torch.equal(a.view(_INTEGERS[a.element_size()]), b.view(_INTEGERS[b.element_size()]))


def gradient(numel: int, seed: int, *, scales: tuple[float, float] = (-10.0, 2.0)) -> torch.Tensor:
    """Gradients whose sizes span powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    low, high = scales
    return torch.randn(numel, generator=generator) * 10.0 ** (
        low + (high - low) * torch.rand(numel, generator=generator)
    )


def step_coefficients(
    step: int, *, factor: float = 0.7, skip: float = 0.0, learning_rate: float = 1e-3
) -> torch.Tensor:
    return coefficients(
        torch.tensor(factor), torch.tensor(skip), torch.tensor(float(step)), learning_rate=learning_rate, beta1=0.9,
        beta2=0.999, epsilon=1e-8, weight_decay=0.1,
    )  # fmt: skip
