"""What the GPU's allocator holds beyond what it gave out, seen on a few blocks and the loss run as a step runs them.

Tensors that a forward saves outlive the working set amid which they are allocated, and leave holes that the large
tensors of the loss do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazysched.machine_memory import PARTLY_USED_BYTES
from lazysched.runtime.blocks import BlockForm

NUM_BLOCKS = 6
"""Blocks, or micro-batches of one: for the allocator they are the same."""


def fragmentation_bytes(
    form: BlockForm, arguments: dict[str, Any], hidden: torch.Tensor, targets: Sequence[torch.Tensor],
    loss: Callable[[], object],
) -> int:  # fmt: skip
    """Peak of what is reserved less the peak of what is in use, and what a step may leave unused of its last pages.

    Libraries must have their workspaces already.

    Args:
        form: of a block that is bound to weights.
        arguments: of the block.
        hidden: its input, [rows, tokens, hidden]; also stands for the gradient of its output.
        targets: for the gradients of its parameters.
        loss: runs the loss with its gradient.

    Raises:
        torch.OutOfMemoryError: all this does not fit the GPU.
    """
    device, result = hidden.device, torch.empty_like(hidden)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    saved = [form.forward(hidden, arguments, result) for _ in range(NUM_BLOCKS)]
    loss()
    while saved:
        form.backward(saved.pop(), arguments, hidden, result, targets, first=True)
    stats = torch.cuda.memory_stats(device)
    return int(stats["reserved_bytes.all.peak"] - stats["allocated_bytes.all.peak"]) + PARTLY_USED_BYTES
