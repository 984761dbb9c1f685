"""The flat store of a stage: its tensors one after the other, each aligned to 256 bytes.

Offsets are counted in elements and are the same for every dtype, so that weights, gradients, master weights and
moments of one parameter stand at one offset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from lazysched.schemas import Stage

ALIGNMENT_BYTES = 256


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def flat_bytes(shapes: Mapping[str, tuple[int, ...]], element_bytes: int) -> int:
    """Bytes of the flat store of tensors of these shapes."""
    return sum(aligned(math.prod(shape) * element_bytes) for shape in shapes.values())


def flat_views(flat: torch.Tensor, stage: Stage, element_bytes: int) -> dict[str, torch.Tensor]:
    """The stage's parameters as views of ``flat`` [elements], any dtype.

    Args:
        flat: one-dimensional, at least as long as the stage's flat store.
        stage: names and shapes, in order.
        element_bytes: of the computing dtype, which fixes the alignment in elements.
    """
    views, offset = {}, 0
    for name, shape in stage.params.items():
        numel = math.prod(shape)
        views[name] = flat[offset : offset + numel].view(shape)
        offset += aligned(numel * element_bytes) // element_bytes
    return views
