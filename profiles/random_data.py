"""Random tensors to measure with. Zeros would flatter: they need less power and compress."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from lazysched.runtime.flat import flat_views
from lazysched.schemas import Stage

WEIGHT_SCALE = 0.02


@cache
def _generator(device: torch.device) -> torch.Generator:
    """Numbers of our own, so that measuring does not disturb the caller's."""
    return torch.Generator(device).manual_seed(0)


def random_normal(shape: Sequence[int], dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers with standard deviation ``scale``."""
    return torch.empty(shape, dtype=dtype, device=device).normal_(0, scale, generator=_generator(device))


def random_tokens(shape: Sequence[int], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Token ids, int64, uniform."""
    return torch.randint(vocabulary, shape, device=device, generator=_generator(device))


def random_weights(stage: Stage, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Flat store of ``stage``, [elements]: small matrices and biases, norms near 1."""
    weights = random_normal((stage.weight_bytes // dtype.itemsize,), dtype, device, WEIGHT_SCALE)
    for name, view in flat_views(weights, stage, dtype.itemsize).items():
        if view.dim() == 1 and not name.endswith("bias"):
            view.add_(1.0)
    return weights


def fill_bytes(target: torch.Tensor) -> None:
    """Fill a uint8 tensor, whose size is a multiple of 8, with random bytes."""
    target.view(torch.int64).random_(generator=_generator(target.device))
