"""What memory a profile's machine has: whoever asks for more is told, and no remedy asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lazysched.schemas import Profile, Tier

LARGE_PAGE_BYTES, SMALL_PAGE_BYTES = 20 * 2**20, 2 * 2**20
"""What torch's allocator takes from a GPU's driver at once, for its pools of large and of small tensors."""
PARTLY_USED_BYTES = LARGE_PAGE_BYTES + SMALL_PAGE_BYTES
"""Of the last page of each pool so much may be unused."""


@dataclass(frozen=True)
class MachineMemory:
    """One memory.

    Attributes:
        name: what it belongs to.
        tiers: that lie in it.
        num_bytes: its size.
    """

    name: str
    tiers: tuple[Tier, ...]
    num_bytes: int

    def bytes_of(self, sizes: Mapping[Tier, int]) -> int:
        """Of ``sizes``, by tier, those that lie here, together."""
        return sum(sizes.get(tier, 0) for tier in self.tiers)


def memories_of(profile: Profile) -> list[MachineMemory]:
    """GPU and host where their sizes are known; without a GPU both tiers are one memory.

    How much memory the host of an estimate has is an assumption, which a budget corrects: there it is left out.
    """
    gpu, host = profile.total_bytes.get("gpu"), profile.total_bytes.get("host")
    if profile.device == "cpu":
        return [MachineMemory("machine", ("gpu", "host"), gpu + host)] if gpu and host else []
    found = [MachineMemory("GPU", ("gpu",), gpu)] if gpu else []
    return found + ([MachineMemory("host", ("host",), host)] if host and not profile.estimated else [])
