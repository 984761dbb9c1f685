"""Sizes of a stage's flat store: its tensors one after the other, each aligned to 256 bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping

ALIGNMENT_BYTES = 256


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def flat_bytes(shapes: Mapping[str, tuple[int, ...]], element_bytes: int) -> int:
    """Bytes of the flat store of tensors of these shapes."""
    return sum(aligned(math.prod(shape) * element_bytes) for shape in shapes.values())
