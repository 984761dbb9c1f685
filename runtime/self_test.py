"""The optimizer's self-test: every backend that runs here against the reference, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lazysched.doctor.facts import SelfTestFacts
from lazysched.errors import RunError
from lazysched.runtime import kernels
from lazysched.runtime.engines import cpu_threads
from lazysched.runtime.hybrid8 import BlockState, Fp32State, coefficients, num_blocks, stream_of
from lazysched.runtime.hybrid8_backends import PreparedUpdate, TorchUpdate, prepare
from lazysched.schemas import Plan

STEPS = 3
_NUMEL = 5000
"""Several blocks, the last one short, and every loop of the kernels with its rest."""
States = Sequence[BlockState | Fp32State]


def self_test(device: str) -> SelfTestFacts:
    """Update a few small tensors with every backend and compare all bytes of weights and state.

    Args:
        device: ``cuda`` tests the GPU's backend too.
    """
    expected = _updated(TorchUpdate, "cpu")
    makers: dict[str, Callable[[States], PreparedUpdate]] = {
        name: partial(kernels.CompiledUpdate, variant=name) for name in kernels.variants()
    }
    wrong = [name for name, make in makers.items() if not _equal(_updated(make, "cpu"), expected)]
    on_gpu = None
    if device == "cuda":
        on_gpu = type(prepare(_states("cuda"))).__name__.removesuffix("Update").lower()
        if not _equal(_updated(prepare, "cuda"), expected):
            wrong.append(on_gpu)
    return SelfTestFacts(
        built=kernels.is_built(), variants=list(kernels.variants()), threads=cpu_threads(torch.device(device)),
        on_gpu=on_gpu, wrong=wrong,
    )  # fmt: skip


def check_updates(plan: Plan, device: torch.device) -> None:
    """Try the 8-bit update wherever the plan has one, as it will run there; some milliseconds beside compiling.

    Args:
        plan: of the run.
        device: where tier ``gpu`` is.

    Raises:
        RunError: its weights or its state are not the reference's.
    """
    choices = [choice for choice in plan.stages.values() if choice.state_format == "hybrid8"]
    dtype = getattr(torch, plan.compute_dtype)
    for where in sorted({device.type if choice.state == "gpu" else "cpu" for choice in choices}):
        if where == "cpu" and not kernels.is_built():
            continue  # the reference itself takes its place
        if not _equal(_updated(prepare, where, dtype), _updated(TorchUpdate, "cpu", dtype)):
            name = kernels.variants()[-1] if where == "cpu" else "on the GPU"
            raise RunError(
                f"optimizer: the self-test of the 8-bit update ({name}) found wrong results, so nothing was trained; "
                f"see `lazysched doctor`, install lazysched again, or solve with --optimizer-state fp32"
            )


def _states(device: str) -> list[BlockState | Fp32State]:
    """A matrix in bf16 and one in fp32 with 8-bit moments, and a bf16 tensor with fp32 moments; on ``device``."""
    states: list[BlockState | Fp32State] = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = _numbers(1, 0.02).to(dtype)
        is_narrow = dtype == torch.bfloat16
        states.append(
            BlockState(
                weight=weight, grad=torch.zeros_like(weight),
                correction=torch.zeros(_NUMEL, dtype=torch.int8) if is_narrow else None,
                first=torch.zeros(_NUMEL, dtype=torch.int8), second=torch.zeros(_NUMEL, dtype=torch.uint8),
                first_scale=torch.zeros(num_blocks(_NUMEL)), second_scale=torch.zeros(num_blocks(_NUMEL)),
                stream=stream_of(0, "self-test"), decays=is_narrow,
            )
        )  # fmt: skip
    weight, moments = _numbers(2, 1.0).bfloat16(), torch.zeros(2, _NUMEL)
    states.append(Fp32State(weight, torch.zeros_like(weight), weight.float(), moments[0], moments[1], True))
    return [_moved(state, device) for state in states]


def _moved(state: BlockState | Fp32State, device: str) -> BlockState | Fp32State:
    arrays: dict[str, Any] = {name: value.to(device, copy=True) for name, value in _arrays(state).items()}
    return replace(state, **arrays)


def _updated(make: Callable[[States], PreparedUpdate], device: str, dtype: torch.dtype | None = None) -> States:
    """The states after some steps; with ``dtype``, those of such weights."""
    states = [state for state in _states(device) if dtype in (None, state.weight.dtype)]
    update = make(states)
    for step in range(1, STEPS + 1):
        for state in states:
            state.grad.copy_(_numbers(10 + step, 1e-3))
        scalars = coefficients(
            torch.tensor(0.7), torch.tensor(0.0), torch.tensor(float(step)), learning_rate=1e-3, beta1=0.9,
            beta2=0.999, epsilon=1e-8, weight_decay=0.1,
        )  # fmt: skip
        update.update(scalars.to(device))
    return states


def _numbers(seed: int, scale: float) -> torch.Tensor:
    """Normal numbers of many sizes, fp32 [5000]."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** (3 * torch.rand(_NUMEL, generator=generator) - 3)
    return torch.randn(_NUMEL, generator=generator) * sizes * scale


def _equal(left: States, right: States) -> bool:
    return all(
        torch.equal(value.cpu().view(torch.uint8), _arrays(other)[name].view(torch.uint8))
        for state, other in zip(left, right, strict=True)
        for name, value in _arrays(state).items()
    )


def _arrays(state: BlockState | Fp32State) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(state).items() if isinstance(value, torch.Tensor)}
