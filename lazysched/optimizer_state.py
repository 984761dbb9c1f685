"""Where each part of a stage's optimizer state lies, for each format; bytes within one flat buffer.

``fp32``: first and second moment, and the master where the weights are narrower, each one flat array over the stage's
store. ``hybrid8``: tensor after tensor; matrices in 8 bits as ``lazysched.runtime.hybrid8`` specifies, small or
one-dimensional tensors in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lazysched.flat_store import ALIGNMENT_BYTES as ALIGNMENT_BYTES
from lazysched.flat_store import aligned
from lazysched.schemas import FP32_STATE_ELEMENTS as FP32_STATE_ELEMENTS
from lazysched.schemas import Stage, StateFormat
from lazysched.trainable import trained_part

BLOCK_ELEMENTS = 256
"""Elements of an 8-bit tensor that share a scale."""
NUM_COEFFICIENTS = 14
"""Scalars of a step that the update of format ``hybrid8`` reads; ``lazysched.runtime.hybrid8`` names them."""


@dataclass(frozen=True)
class TensorState:
    """The state of one tensor.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        is_8bit: whether its moments have 8 bits.
        parts: part -> (offset in bytes, bytes); ``correction`` (int8) or ``master`` (fp32) with narrower weights,
            ``first``, ``second``, and for 8 bits ``first_scale`` and ``second_scale`` (fp32).
    """

    name: str
    shape: tuple[int, ...]
    is_8bit: bool
    parts: dict[str, tuple[int, int]]


def hybrid8_layout(stage: Stage, element_bytes: int, fp32_elements: int) -> tuple[list[TensorState], int]:
    """The state of every trained tensor of ``stage`` and the bytes of the whole buffer.

    Args:
        stage: names and shapes.
        element_bytes: of the weights; with 4 they are the master.
        fp32_elements: tensors with at most so many elements keep fp32 state, as one-dimensional ones do.
    """
    tensors, offset = [], 0
    for name, shape in stage.trained_params.items():
        is_8bit = in_8bit(shape, fp32_elements)
        parts = {}
        for part, num_bytes in _part_bytes(math.prod(shape), is_8bit, element_bytes).items():
            parts[part] = (offset, num_bytes)
            offset += aligned(num_bytes)
        tensors.append(TensorState(name, shape, is_8bit, parts))
    return tensors, offset


def state_bytes(stage: Stage, element_bytes: int, state_format: StateFormat, fp32_elements: int) -> int:
    """Bytes of the optimizer state of ``stage`` in ``state_format``; the arguments are those of the layout."""
    if state_format == "hybrid8":
        return hybrid8_layout(stage, element_bytes, fp32_elements)[1]
    copies = 3 if element_bytes < 4 else 2
    return copies * 4 * (trained_part(stage, element_bytes).weight_bytes // element_bytes)


def in_8bit(shape: tuple[int, ...], fp32_elements: int) -> bool:
    """Whether a tensor of ``shape`` has 8-bit moments in format ``hybrid8``."""
    return len(shape) > 1 and math.prod(shape) > fp32_elements


def _part_bytes(numel: int, is_8bit: bool, element_bytes: int) -> dict[str, int]:
    narrow = element_bytes < 4
    if not is_8bit:
        master = {"master": 4 * numel} if narrow else {}
        return master | {"first": 4 * numel, "second": 4 * numel}
    scale_bytes = 4 * -(-numel // BLOCK_ELEMENTS)
    correction = {"correction": numel} if narrow else {}
    return correction | {
        "first": numel, "second": numel, "first_scale": scale_bytes, "second_scale": scale_bytes
    }  # fmt: skip
