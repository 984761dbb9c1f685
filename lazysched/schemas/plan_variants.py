"""The save variants that a plan embeds, held against those of the profile that it carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lazysched.schemas.profile import Profile, SaveVariant

if TYPE_CHECKING:
    from lazysched.schemas.plan import StagePlan

MAX_SAVED_BYTES = 10**15
"""Of one tensor group of a micro-batch; machines have less memory."""


def variant_key(structure: str, name: str) -> str:
    """Key of a variant in ``Plan.variants``."""
    return f"{structure}:{name}"


def check_sizes(variants: Mapping[str, SaveVariant]) -> None:
    """Refuse sizes that nothing can have.

    Raises:
        ValueError: names the first.
    """
    for key, variant in variants.items():
        for group, size in variant.saved.items():
            least = 1 if group == "input" else 0
            if not least <= size <= MAX_SAVED_BYTES:
                raise ValueError(
                    f"variants.{key}.saved.{group}: {f'{size}'[:40]} bytes cannot be, it is {least} to "
                    f"{MAX_SAVED_BYTES:.0e}; solve again"
                )


def check_against(profile: Profile, variants: Mapping[str, SaveVariant], micro_batch: int) -> None:
    """Refuse variants that ``profile`` does not have, or has with other bytes, at ``micro_batch``.

    Raises:
        ValueError: says which, and how to get a plan for this micro-batch.
    """
    for key, variant in variants.items():
        structure, _, name = key.partition(":")
        listed = profile.variants.get(structure, {})
        if micro_batch not in listed:
            sizes = ", ".join(map(str, sorted(listed))) or "none"
            raise ValueError(
                f"micro_batch is {micro_batch}: the plan's profile has figures for {sizes}; use one of them and solve "
                f"again with --micro-batch, or profile this one"
            )
        known = next((v for v in listed[micro_batch] if v.name == name), None)
        if known is None or variant.name != name:
            names = ", ".join(v.name for v in listed[micro_batch])
            raise ValueError(f"variants.{key}: the plan's profile has {names} at micro_batch {micro_batch}; use these")
        if _sizes(variant) != _sizes(known):
            other = [size for size, found in listed.items() if any(_sizes(v) == _sizes(variant) for v in found)]
            why = f"those of micro_batch {other[0]}, which cannot be edited alone" if other else "others"
            raise ValueError(
                f"variants.{key}: its bytes are not the profile's at micro_batch {micro_batch} but {why}; solve again "
                f"with --micro-batch {micro_batch}"
            )


def missing_variants(
    profile: Profile, variants: Mapping[str, SaveVariant], micro_batch: int, stages: Mapping[str, StagePlan]
) -> dict[str, SaveVariant]:
    """What ``stages`` save by names that ``variants`` lacks and ``profile`` has, as after an edit of ``save``."""
    structures = {stage.id: stage.structure for stage in profile.stages}
    found: dict[str, SaveVariant] = {}
    for stage_id, choice in stages.items():
        structure = structures.get(stage_id, "")
        key = variant_key(structure, choice.save)
        listed = profile.variants.get(structure, {}).get(micro_batch, [])
        named = next((v for v in listed if v.name == choice.save), None)
        if named is not None and key not in variants:
            found[key] = named
    return found


def _sizes(variant: SaveVariant) -> tuple[object, ...]:
    return (variant.name, variant.saved, variant.working_forward_bytes, variant.working_backward_bytes)
