"""Backends, states and float64 references for the tests of the hybrid 8-bit format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from lazysched.runtime.hybrid8 import BlockState, Fp32State, coefficients, num_blocks, stream_of
from lazysched.runtime.hybrid8_backends import PreparedUpdate, States, TorchUpdate
from lazysched.runtime.kernels import CompiledUpdate, variants

RECIPROCAL_ERROR = 5.2e-5
INVERSE_ERROR = 1.3e-4
"""Relative, as documented where the functions are defined; tests go through their arguments."""
FLOAT_ERROR = 4 * 2.0**-24
"""Relative, of a few fp32 operations."""

AnyState = TypeVar("AnyState", BlockState, Fp32State)
Prepare = Callable[[States], PreparedUpdate]


def backends() -> dict[str, Prepare]:
    """Name -> maker of every backend that runs on this machine's CPU."""
    found: dict[str, Prepare] = {"torch": TorchUpdate}
    # Two threads and short chunks, so that small tensors have borders between both.
    found |= {name: partial(CompiledUpdate, variant=name, threads=2, chunk_blocks=3) for name in variants()}
    return found


each_backend = pytest.mark.parametrize("prepare", [pytest.param(make, id=name) for name, make in backends().items()])


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of AdamW."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def at(self, step: int, factor: float = 1.0, skip: float = 0.0) -> Tensor:
        """Coefficients of one step, fp32 [14]."""
        return coefficients(
            torch.tensor(factor), torch.tensor(skip), torch.tensor(float(step)),
            learning_rate=self.learning_rate, beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon,
            weight_decay=self.weight_decay,
        )  # fmt: skip


DECAYING = Settings(weight_decay=0.1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(numel: int, seed: int) -> Tensor:
    """Standard normal numbers, fp32 [numel]."""
    return torch.randn(numel, generator=generator(seed))


def fresh_state(weight: Tensor, name: str = "w", seed: int = 0, decays: bool = True) -> BlockState:
    """State of a tensor before its first step; the gradient is zero.

    Args:
        weight: bf16 or fp32 [elements].
        name: of the tensor, for its random bits.
        seed: of the run, for its random bits.
        decays: whether weight decay applies.
    """
    numel, blocks = weight.numel(), num_blocks(weight.numel())
    narrow = weight.dtype == torch.bfloat16
    return BlockState(
        weight=weight.clone(), grad=torch.zeros_like(weight),
        correction=torch.zeros(numel, dtype=torch.int8) if narrow else None,
        first=torch.zeros(numel, dtype=torch.int8), second=torch.zeros(numel, dtype=torch.uint8),
        first_scale=torch.zeros(blocks), second_scale=torch.zeros(blocks),
        stream=stream_of(seed, name), decays=decays,
    )  # fmt: skip


def block_state(numel: int, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, decays: bool = True) -> BlockState:
    """Weights as a model has them, before the first step."""
    return fresh_state((normal(numel, seed) * 0.02).to(dtype), "weight", seed, decays)


def fp32_state(numel: int, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, decays: bool = True) -> Fp32State:
    """The same with fp32 moments."""
    return fresh_fp32_state((normal(numel, seed) * 0.02).to(dtype), decays)


def used_state(numel: int, seed: int, dtype: torch.dtype = torch.bfloat16, decays: bool = True) -> BlockState:
    """A valid state from the middle of a run: every third block is zero, the others have all kinds of codes."""
    g = generator(seed)
    state = fresh_state((torch.randn(numel, generator=g) * 0.02).to(dtype), decays=decays)
    state.grad.copy_(torch.randn(numel, generator=g) * 1e-3)
    state.first.copy_(torch.randint(-127, 128, (numel,), generator=g))
    state.second.copy_(torch.randint(2, 256, (numel,), generator=g))
    if state.correction is not None:
        state.correction.copy_(torch.randint(-128, 128, (numel,), generator=g))
    for block, start in enumerate(range(0, numel, 256)):
        state.first[start], state.second[start] = 127, 255  # the largest of a block is what its scale says
        if block % 3 == 2:
            state.first[start : start + 256] = 0
            state.second[start : start + 256] = 0
        else:
            state.first_scale[block] = 10.0 ** float(torch.empty(1).uniform_(-6, -2, generator=g))
            state.second_scale[block] = 10.0 ** float(torch.empty(1).uniform_(-6, -2, generator=g))
    return state


def fresh_fp32_state(weight: Tensor, decays: bool = True) -> Fp32State:
    """fp32 state of a bf16 or fp32 tensor before its first step; the gradient is zero."""
    master = weight.float().clone() if weight.dtype == torch.bfloat16 else None
    moments = torch.zeros(2, weight.numel())
    return Fp32State(weight.clone(), torch.zeros_like(weight), master, moments[0], moments[1], decays)


def arrays(state: BlockState | Fp32State) -> dict[str, Tensor]:
    """The tensors of a state."""
    return {name: value for name, value in vars(state).items() if isinstance(value, Tensor)}


def copy_of(state: AnyState, device: str = "cpu") -> AnyState:
    """The same state in memory of its own."""
    return replace(state, **{name: value.to(device, copy=True) for name, value in arrays(state).items()})


def bits(values: Tensor) -> Tensor:
    """The bytes of any tensor; they tell NaN from NaN and -0 from 0."""
    return values.contiguous().view(torch.uint8)


def differing(left: AnyState, right: AnyState, *, any_nan: bool = False) -> list[str]:
    """Names of the arrays that are not the same to the bit.

    Args:
        left: on any device.
        right: on any device.
        any_nan: whether every NaN in fp32 counts as the same; the specification leaves open which one it is.
    """
    others = arrays(right)

    def comparable(values: Tensor) -> Tensor:
        values = values.cpu()
        return bits(
            torch.where(values.isnan(), torch.nan, values) if any_nan and values.dtype == torch.float32 else values
        )

    return [
        name for name, value in arrays(left).items() if not torch.equal(comparable(value), comparable(others[name]))
    ]


def master(state: BlockState) -> Tensor:
    """Master weights in float64, from the bytes alone: weight << 16 plus correction << 8 are the bits of fp32."""
    if state.correction is None:
        return state.weight.double()
    high = state.weight.view(torch.int16).int() << 16
    return (high + (state.correction.int() << 8)).view(torch.float32).double()


def per_element(scale: Tensor, numel: int) -> Tensor:
    """Scales of blocks as float64 [elements]."""
    return scale.double().repeat_interleave(256)[:numel]


def first_moment(state: BlockState) -> Tensor:
    """Stored first moment in float64: |code| = 127 * 2x/(1+x), so x = |code| / (254 - |code|)."""
    code = state.first.double()
    return per_element(state.first_scale, code.numel()) * code / (254 - code.abs())


def root_of_second_moment(state: BlockState) -> Tensor:
    """Stored square root of the second moment in float64."""
    code = state.second.double()
    return per_element(state.second_scale, code.numel()) * code / 255


class ExactAdamW:
    """AdamW in float64, moment by moment; begins with the moments given, or zero."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first.double(), second.double()

    def direction(self, grad: Tensor, step: int, settings: Settings, factor: float = 1.0) -> Tensor:
        """Update in units of -learning rate, of the gradients as they are given; float64 [elements]."""
        g = grad.double() * factor
        self.first = settings.beta1 * self.first + (1 - settings.beta1) * g
        self.second = settings.beta2 * self.second + (1 - settings.beta2) * g * g
        root = (self.second / (1 - settings.beta2**step)).sqrt()
        return self.first / (1 - settings.beta1**step) / (root + settings.epsilon)


def uneven_gradient(numel: int, seed: int) -> Tensor:
    """Gradients whose sizes span twelve powers of ten, fp32 [numel]."""
    return normal(numel, seed) * 10.0 ** (12 * torch.rand(numel, generator=generator(seed)) - 10)


def special_gradient(numel: int, step: int) -> Tensor:
    """Ordinary, subnormal, not finite and overflowing gradients, in turn; fp32 [numel]."""
    grad = uneven_gradient(numel, step)
    if step == 3:
        grad *= 1e-35
    if step == 4:
        grad[numel // 2], grad[0] = float("nan"), float("inf")
    if step == 5:
        grad[-1] = 3e38
    return grad
