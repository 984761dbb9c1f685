"""Checks of what ``train`` is called with."""

from __future__ import annotations

import math

import torch

from lazysched.errors import UsageError, short_repr

MAX_STEPS = 10**9
"""Most steps, and most epochs, of a run: what is longer is a slip of the pen."""
_ALLOWED = {
    "warmup_ratio": "between 0 and 1", "learning_rate": "0 or more", "max_grad_norm": "0 or more",
    "max_steps": f"from 1 to {MAX_STEPS}", "num_train_epochs": f"above 0, at most {MAX_STEPS}",
}  # fmt: skip


def check_numbers(
    max_steps: int | None,
    epochs: float,
    learning_rate: float,
    warmup_ratio: float,
    max_grad_norm: float | None,
    logging: int,
) -> None:
    """Refuse the first number of a run that is out of range."""
    wrong = {
        "max_steps": max_steps is not None and not 1 <= max_steps <= MAX_STEPS,
        "num_train_epochs": not 0 < epochs <= MAX_STEPS,
        "learning_rate": not (math.isfinite(learning_rate) and learning_rate >= 0),
        "warmup_ratio": not 0 <= warmup_ratio <= 1,
        "max_grad_norm": max_grad_norm is not None and not max_grad_norm >= 0,
        "logging_steps": logging < 1,
    }
    values = dict(zip(wrong, (max_steps, epochs, learning_rate, warmup_ratio, max_grad_norm, logging), strict=True))
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        allowed = _ALLOWED.get(name, "above 0")
        raise UsageError(f"{name}: {short_repr(values[name])} is out of range; give a number {allowed}")


def check_optimizer(beta1: float, beta2: float, epsilon: float, weight_decay: float) -> None:
    """Refuse the first hyperparameter that is out of range."""
    for name, beta in (("adam_beta1", beta1), ("adam_beta2", beta2)):
        if not 0 <= beta < 1:
            raise UsageError(f"{name}: {beta} is out of range; give a number from 0 to below 1")
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise UsageError(f"adam_epsilon: {epsilon} is out of range; give a number above 0")
    if not (math.isfinite(weight_decay) and weight_decay >= 0):
        raise UsageError(f"weight_decay: {weight_decay} is out of range; give 0 or more")


def choose_device(name: str | None) -> torch.device:
    """The device of that name; None and ``auto`` take the GPU where there is one."""
    if name not in (None, "auto", "cuda", "cpu"):
        raise UsageError(f"device: {name!r} is not known; use cuda or cpu")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError("device: cuda is not available here; use --device cpu or install a CUDA build of torch")
    return torch.device("cpu" if name == "cpu" or not available else "cuda")
