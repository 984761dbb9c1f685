"""How much host memory can be page-locked.

What is known is what was stated and what was tried. Limits of the system, as of ``ulimit -l``, are not read: whether
the driver goes by them is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lazysched.doctor.facts import PinningFacts
from lazysched.errors import PinError
from lazysched.runtime.arena import HostArena
from lazysched.runtime.host_memory import host_memory
from lazysched.units import format_bytes

PIECE_BYTES, NUM_PIECES = 1 << 28, 16
"""What is tried: locking takes 0.13 s a GB, a run may want hundreds of them."""
DOCTORS_PIECES = 128
"""Up to 34 GB, for somebody who asks: Windows leaves WSL limits that lie higher than what is tried otherwise."""


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
    found = _tried(device, host_limit_bytes, NUM_PIECES)
    if found.limit_bytes is not None:
        return Pinning(found.limit_bytes, f"{format_bytes(found.limit_bytes)} at most: then the system refused")
    return Pinning(None, f"{format_bytes(found.tried_bytes)} without a refusal; more was not tried")


def pinning_facts() -> PinningFacts:
    """Lock up to half of the free host memory, for ``lazysched doctor``.

    A refusal leaves an error in this process's CUDA context: run it in a process that ends then.
    """
    return _tried(torch.device("cuda"), host_memory()[1] // 2, DOCTORS_PIECES)


def _tried(device: torch.device, host_limit_bytes: int, num_pieces: int) -> PinningFacts:
    """Lock pieces until one is refused or all are locked."""
    pieces = {f"piece.{i}": PIECE_BYTES for i in range(min(num_pieces, host_limit_bytes // PIECE_BYTES))}
    tried_bytes = PIECE_BYTES * len(pieces)
    try:
        HostArena(pieces, pieces, device, host_limit_bytes).close()
    except PinError as error:
        return PinningFacts(limit_bytes=error.locked_bytes, tried_bytes=tried_bytes)
    return PinningFacts(limit_bytes=None, tried_bytes=tried_bytes)
