"""The flat store of a stage: its tensors one after the other, each aligned to 256 bytes.

Offsets are counted in elements and are the same for every dtype, so that weights, gradients, master weights and
moments of one parameter stand at one offset.
"""

from __future__ import annotations

import math

import torch

from lazysched.flat_store import ALIGNMENT_BYTES as ALIGNMENT_BYTES
from lazysched.flat_store import aligned as aligned
from lazysched.flat_store import flat_bytes as flat_bytes
from lazysched.schemas import Stage


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
