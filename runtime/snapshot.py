"""A copy of what a checkpoint holds, from which it is written while the next steps change the original.

Written stage by stage before each update instead, a disk's gigabytes a second would hold back updates at once, and in
the end nearly everything would have been copied: so all of it is, at the speed of memory, where there is room for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lazysched.runtime.arena import HostArena, whole_pages
from lazysched.runtime.checkpoint import MAX_SHARD_BYTES
from lazysched.runtime.host_memory import host_memory
from lazysched.runtime.session import Session

SPARE_BYTES = 2 * MAX_SHARD_BYTES
"""Host memory left free beside a copy: one shard that is on its way to the disk, and as much for all that grows."""


def room_bytes(session: Session) -> int:
    """Host memory that a copy may take: what is free here, within what the plan leaves of its budget."""
    free_bytes = host_memory()[1] - SPARE_BYTES
    budget_bytes = session.plan.budget_bytes.get("host")
    if budget_bytes is not None:
        free_bytes = min(free_bytes, budget_bytes - session.buffers.arena.total_bytes)
    return max(0, free_bytes)


def snapshot_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Host memory that a copy of ``tensors`` takes, each from a page of its own."""
    return sum(whole_pages(tensor.nbytes) for tensor in tensors.values())


def snapshot(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy ``tensors``, contiguous and on any device, into host memory that is given back with the last of the copies.

    Raises:
        RunError: the system refuses to map the memory.
    """
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    arena = HostArena(sizes, (), torch.device("cpu"), limit_bytes=snapshot_bytes(tensors))
    return {name: arena.tensor(name, tensor.dtype).view(tensor.shape).copy_(tensor) for name, tensor in tensors.items()}
