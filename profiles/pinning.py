"""How much host memory can be page-locked.

What is known is what was stated and what was tried. Limits of the system, as of ``ulimit -l``, are not read: whether
the driver goes by them is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lazysched.errors import PinError
from lazysched.runtime.arena import HostArena
from lazysched.units import format_bytes

PIECE_BYTES, NUM_PIECES = 1 << 28, 16
"""What is tried: locking takes 0.13 s a GB, a run may want hundreds of them."""


@dataclass(frozen=True)
class Pinning:
    """What was learnt.

    Attributes:
        limit_bytes: most that can be page-locked; None where no limit was stated or met.
        note: how it was found; empty without a GPU, for which alone memory is page-locked.
    """

    limit_bytes: int | None
    note: str


def measure_pinning(device: torch.device, host_limit_bytes: int, stated_bytes: int | None) -> Pinning:
    """Take the limit that was stated, or try to lock some memory.

    Args:
        device: where the tier ``gpu`` is.
        host_limit_bytes: host memory that may be used.
        stated_bytes: the limit that a user knows of; None: none.
    """
    if device.type != "cuda":
        return Pinning(None, "")
    if stated_bytes is not None:
        return Pinning(stated_bytes, f"{format_bytes(stated_bytes)} at most, as stated; not tried")
    return _tried(device, host_limit_bytes)


def _tried(device: torch.device, host_limit_bytes: int) -> Pinning:
    """Lock pieces until one is refused or all are locked."""
    pieces = {f"piece.{i}": PIECE_BYTES for i in range(min(NUM_PIECES, host_limit_bytes // PIECE_BYTES))}
    try:
        HostArena(pieces, pieces, device, host_limit_bytes).close()
    except PinError as error:
        return Pinning(error.locked_bytes, f"{format_bytes(error.locked_bytes)} at most: then the system refused")
    total = format_bytes(PIECE_BYTES * len(pieces))
    return Pinning(None, f"{total} without a refusal; more was not tried")
