"""What a profile has measured of what the solver needs, and a refusal where it lacks that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lazysched.errors import UsageError
from lazysched.layout import link_name
from lazysched.schemas import Curve, HostMemory, Profile, SaveVariant, StateFormat

DIRECTIONS: tuple[Literal["h2d", "d2h"], ...] = ("h2d", "d2h")


def measured_variants(profile: Profile, structure: str, micro_batch: int) -> list[SaveVariant]:
    """Variants of ``structure`` at ``micro_batch`` whose times are known."""
    listed = profile.variants.get(structure, {}).get(micro_batch, [])
    return [v for v in listed if v.forward.median_s is not None and v.backward.median_s is not None]


def curve_of(profile: Profile, link: str, *, one_way: bool = False) -> Curve:
    """The curve that a plan meets: both directions are busy unless it is ``one_way``."""
    both = None if one_way else profile.links.get(f"{link}_both")
    return both if both is not None and both.points else profile.links[link]


def update_rate(profile: Profile, processor: Literal["cpu", "gpu"], state_format: StateFormat) -> float:
    """Parameters per second of the update on ``processor``; :func:`check_profile` made sure that it is there."""
    rate = profile.update[processor][state_format].per_s
    assert rate is not None
    return rate


def usable_micro_batches(profile: Profile) -> list[int]:
    """Micro-batches at which every structure has at least one measured variant, ascending."""
    structures = {stage.structure for stage in profile.stages}
    sizes = {size for structure in structures for size in profile.variants.get(structure, {})}
    return sorted(size for size in sizes if all(measured_variants(profile, s, size) for s in structures))


def offload_limits(profile: Profile, micro_batch: int) -> list[int]:
    """Every size that a block could send to the host per micro-batch, ascending; 0 sends nothing."""
    structures = {stage.structure for stage in profile.stages if stage.is_block}
    listed = [v for structure in structures for v in measured_variants(profile, structure, micro_batch)]
    return sorted({0} | {sum(variant.saved.values()) for variant in listed})


def host_memories(profile: Profile, host_bytes: int) -> tuple[HostMemory, ...]:
    """Kinds of host memory to look for plans with: ordinary memory only where page-locking is limited below the budget.

    Args:
        profile: measurements.
        host_bytes: the budget.
    """
    limit_bytes = profile.pin_limit_bytes
    if limit_bytes is None:
        return ("pinned",)
    # A limit below what the profiler locks leaves it without figures for page-locked memory.
    if not all(profile.links[link].points for link in DIRECTIONS if link in profile.links):
        return ("pageable",)
    return ("pinned",) if limit_bytes >= host_bytes else ("pinned", "pageable")


def check_profile(profile: Profile, state_format: StateFormat, memories: Sequence[HostMemory]) -> None:
    """Refuse a profile that lacks what every plan with optimizer state in ``state_format`` needs.

    Args:
        profile: measurements.
        state_format: of the optimizer state.
        memories: kinds of host memory that plans may have.

    Raises:
        UsageError: names the first figure that is missing.
    """
    for link in [*(link_name(direction, memory) for memory in memories for direction in DIRECTIONS), "gpu"]:
        curve = profile.links.get(link)
        if curve is None or not curve.points:
            reason = "missing" if curve is None else curve.reason
            raise UsageError(f"profile: links.{link}: not measured ({reason}); profile again")
    processors: Sequence[Literal["cpu", "gpu"]] = ("cpu", "gpu")
    for processor in processors:
        rate = profile.update.get(processor, {}).get(state_format)
        if rate is None or rate.per_s is None:
            reason = "missing" if rate is None else rate.reason
            raise UsageError(f"profile: update.{processor}.{state_format}: not measured ({reason}); profile again")
    if not usable_micro_batches(profile):
        raise UsageError(f"profile: {_first_unmeasured(profile)}; profile again")


def _first_unmeasured(profile: Profile) -> str:
    for stage in profile.stages:
        sizes = profile.variants.get(stage.structure, {})
        if not any(measured_variants(profile, stage.structure, size) for size in sizes):
            reasons = [
                f".{size}.{v.name}: not measured ({v.forward.reason or v.backward.reason})"
                for size, variants in sizes.items()
                for v in variants
            ]
            return f"variants.{stage.structure}{reasons[0] if reasons else ': missing'}"
    return "variants: no micro-batch was measured for all structures"
