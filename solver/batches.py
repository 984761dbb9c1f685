"""Which micro-batches a batch can be made of."""

from __future__ import annotations

from lazysched.errors import UsageError
from lazysched.schemas import Profile
from lazysched.solver.measured import usable_micro_batches

MAX_PASSES = 1 << 14
"""Most passes of a micro-batch through a block in one step: each is an operation that is simulated and launched."""


def accumulations(profile: Profile, batch_size: int) -> dict[int, int]:
    """Micro-batch -> accumulation for every usable micro-batch that divides the batch.

    Raises:
        UsageError: there is none, or only some that would go through the blocks too often.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size: {batch_size} is no batch; use at least 1")
    sizes = usable_micro_batches(profile)
    dividing = {size: batch_size // size for size in sizes if batch_size % size == 0}
    if not dividing:
        raise UsageError(
            f"batch_size: {batch_size} is no multiple of a profiled micro-batch ({', '.join(map(str, sizes))}); "
            f"change it or profile with --micro-batch"
        )
    most = max_accumulation(profile)
    result = {size: count for size, count in dividing.items() if count <= most}
    if not result:
        largest = max(dividing)
        raise UsageError(
            f"batch_size: {batch_size} is {dividing[largest]} micro-batches of {largest} rows, a step of this model "
            f"has {most} at most; use at most {most * largest} or profile a larger --micro-batch"
        )
    return result


def max_accumulation(profile: Profile) -> int:
    """Most micro-batches that a step of this model may have."""
    return max(1, MAX_PASSES // len(profile.stages))
