"""The state of one parameter in :mod:`lazysched.runtime.optimizer`: its parts, what is refused, how kernels see it.

A parameter's state is a dict of tensors: ``step``, fp32 scalar, number of updates; and the parts of
:mod:`lazysched.runtime.hybrid8`, in the parameter's shape except for the scales.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lazysched.errors import UsageError
from lazysched.optimizer_state import in_8bit
from lazysched.runtime.hybrid8 import LARGEST_EPSILON, SMALLEST_EPSILON, BlockState, Fp32State, num_blocks

ParamState = dict[str, Tensor]
FORMATS = ("hybrid8", "fp32")


def new_state(param: Tensor, group: dict[str, Any], step: Tensor) -> ParamState:
    """The state of ``param`` before its first update."""
    is_8bit = group["state"] == "hybrid8" and in_8bit(tuple(param.shape), group["fp32_elements"])
    parts = _parts(param, is_8bit).items()
    state = {name: torch.zeros(shape, dtype=dtype, device=param.device) for name, (shape, dtype) in parts}
    if "master" in state:
        state["master"].copy_(param)
    return {"step": step} | state


def kernel_state(param: Tensor, state: ParamState, stream: int) -> BlockState | Fp32State:
    """Flat views of ``param``, its gradient and its state."""
    assert param.grad is not None
    weight, grad = param.detach().view(-1), param.grad.detach().contiguous().view(-1)
    flat = {name: part.view(-1) for name, part in state.items()}
    moments = flat["first"], flat["second"]
    if "first_scale" not in flat:
        return Fp32State(weight, grad, flat.get("master"), *moments, decays=True)
    scales = flat["first_scale"], flat["second_scale"]
    return BlockState(weight, grad, flat.get("correction"), *moments, *scales, stream=stream, decays=True)


def following(master: Tensor, weight: Tensor) -> Tensor:
    """``master`` [any], fp32, replaced by ``weight``, bf16, where that is not its rounding: someone changed it."""
    is_rounding = master.to(torch.bfloat16).view(torch.int16) == weight.view(torch.int16)
    return torch.where(is_rounding, master, weight.float())


def check_options(group: dict[str, Any]) -> None:
    """Refuse options of a group.

    Raises:
        UsageError: the first that is wrong.
    """
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor) and (lr.numel() != 1 or not lr.is_cpu):
        raise UsageError(f"lr: tensor of shape {tuple(lr.shape)} on {lr.device}; give a number or a scalar on the CPU")
    for name in ("lr", "weight_decay"):
        if not 0 <= float(group[name]) < math.inf:
            raise UsageError(f"{name}: {float(group[name])}; give a finite number of at least 0")
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise UsageError(f"betas: {betas}; give two numbers of at least 0 and below 1")
    if not SMALLEST_EPSILON <= group["eps"] <= LARGEST_EPSILON:
        raise UsageError(f"eps: {group['eps']}; give a number from {SMALLEST_EPSILON} to {LARGEST_EPSILON}")
    if group["state"] not in FORMATS:
        raise UsageError(f"state: {group['state']!r}; give one of {', '.join(FORMATS)}")
    for name in ("fp32_elements", "seed"):
        if not isinstance(group[name], int) or group[name] < 0:
            raise UsageError(f"{name}: {group[name]!r}; give an integer of at least 0")


def check_param(number: int, param: Tensor) -> None:
    """Refuse a parameter that kernels cannot address.

    Raises:
        UsageError: with its number, counted through all groups.
    """
    name = f"params: parameter {number} of shape {tuple(param.shape)}"
    if is_traceable_wrapper_subclass(param):
        raise UsageError(f"{name} is a {type(param).__name__}, not supported; give the plain tensor that it wraps")
    if param.dtype not in (torch.bfloat16, torch.float32):
        raise UsageError(f"{name} has dtype {param.dtype}; convert it to torch.bfloat16 or torch.float32")
    if param.device.type not in ("cpu", "cuda"):
        raise UsageError(f"{name} is on {param.device}; move it to a CPU or CUDA device")
    if param.layout != torch.strided or not param.is_contiguous():
        raise UsageError(f"{name} is not contiguous; set its data to param.data.contiguous()")


def check_grad(number: int, param: Tensor) -> None:
    """Refuse a gradient that is sparse or of another shape or dtype than its parameter.

    Raises:
        UsageError: with the number of the parameter.
    """
    grad = param.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise UsageError(f"grad: that of parameter {number} has layout {grad.layout}; make it dense (sparse=False)")
    if grad.shape != param.shape:
        shapes = f"shape {tuple(grad.shape)}, the parameter {tuple(param.shape)}"
        raise UsageError(f"grad: that of parameter {number} has {shapes}; run backward again")
    if grad.dtype != param.dtype:
        raise UsageError(f"grad: that of parameter {number} has dtype {grad.dtype}; convert it to {param.dtype}")


def check_state(where: str, number: int, param: Tensor, state: ParamState) -> None:
    """Refuse a state that is not one of ``param``, wherever it lies.

    Args:
        where: what the user gave, for the message.
        number: of the parameter, counted through all groups.
        param: the parameter.
        state: of it, supposedly.

    Raises:
        UsageError: the first part that is wrong.
    """
    parts: dict[str, Any] = {"step": ((), torch.float32)} | _parts(param, "first_scale" in state)
    remedy = "use the optimizer and the parameters that it was made for"
    if state.keys() != parts.keys():
        is_of = f"a state of {param.dtype} has {', '.join(parts)}"
        raise UsageError(f"{where}: parameter {number} has {', '.join(state)}, but {is_of}; {remedy}")
    for name, (shape, dtype) in parts.items():
        found = tuple(state[name].shape), state[name].dtype
        if found != (shape, dtype):
            raise UsageError(f"{where}: {name} of parameter {number} is {found}, expected {(shape, dtype)}; {remedy}")


def _parts(param: Tensor, is_8bit: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Part -> shape and dtype, without the step."""
    shape, is_narrow = tuple(param.shape), param.dtype != torch.float32
    if not is_8bit:
        master = {"master": (shape, torch.float32)} if is_narrow else {}
        return master | {"first": (shape, torch.float32), "second": (shape, torch.float32)}
    scales = (num_blocks(param.numel()),), torch.float32
    correction = {"correction": (shape, torch.int8)} if is_narrow else {}
    moments = {"first": (shape, torch.int8), "second": (shape, torch.uint8)}
    return correction | moments | {"first_scale": scales, "second_scale": scales}
