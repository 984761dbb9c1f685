"""What is refused before anything is solved: profiles that are no model, and figures that no machine has.

The schemas refuse what has the wrong form (negative sizes, NaN, rates of zero); here is what only a whole model shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lazysched.errors import UsageError, short_repr
from lazysched.schemas import BYTES_PER_ELEMENT, Profile, SaveVariant, Stage, Tier
from lazysched.trainable import trains

MAX_BLOCKS = 512
"""The search compares all pairs of blocks; the largest open models have 126."""
MAX_BYTES = 10**18
MAX_TOKENS = 10**9
"""Of a row, and most rows of a micro-batch."""
MAX_S = 1e6
"""For one micro-batch in one stage."""
MIN_RATE, MAX_RATE = 1.0, 1e18
"""Bytes or parameters per second."""
MAX_SEED = 2**31 - 1
"""HiGHS takes no larger one."""


def check_arguments(time_limit_s: float, gap: float, seed: int, budget_bytes: Mapping[Tier, int | None]) -> None:
    """Refuse arguments of ``solve`` that are out of range; a budget of None is not given.

    Raises:
        UsageError: names the first that is.
    """
    if not time_limit_s > 0:
        raise UsageError(f"time_limit_s: {time_limit_s:g}: use a positive number of seconds")
    if not 0 <= gap < 1:
        raise UsageError(f"gap: {gap:g}: use a share from 0 up to but not including 1")
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"seed: {seed}: use a number from 0 to {MAX_SEED}")
    for tier, size in budget_bytes.items():
        if size is not None and not 0 < size <= MAX_BYTES:
            raise UsageError(
                f"{tier}_memory: {short_repr(size)} bytes is no budget; use a positive size below 1e18 bytes"
            )


def check_file_links(profile: Profile) -> None:
    """Refuse a profile that does not say how fast files are read and written.

    Raises:
        UsageError: names the figure that is missing.
    """
    remedy = "write it into a hardware file of yours" if profile.estimated else "profile again with --storage"
    for link in ("nvme_read", "nvme_write"):
        curve = profile.links.get(link)
        if curve is None or not curve.points:
            reason = "missing" if curve is None else curve.reason
            raise UsageError(f"profile: links.{link}: not measured ({reason}); {remedy}")


def check_model(profile: Profile) -> None:
    """Refuse a profile whose stages are no model or whose figures are nonsense.

    Raises:
        UsageError: names field and value of the first problem.
    """
    _check_order([stage.id for stage in profile.stages])
    element_bytes = BYTES_PER_ELEMENT[profile.compute_dtype]
    for stage in profile.stages:
        _check_stage(stage, element_bytes)
    if not any(stage.is_trained for stage in profile.stages):
        raise _refusal("stages", "no parameter is trained")
    if not trains(profile.trainable, profile.stages):
        trained = ", ".join(profile.trainable) or "everything"
        raise _refusal("trainable", f"{trained} is not what its stages train")
    blocks = {stage.structure for stage in profile.stages if stage.is_block}
    for structure, by_size in profile.variants.items():
        for size, variants in by_size.items():
            _check_variants(f"variants.{structure}.{short_repr(size)}", variants, structure in blocks)
    for name, value, least, most in _figures(profile):
        if not least <= value <= most:
            raise _refusal(name, f"{short_repr(value)} is out of range ({least:g} to {most:g})")


def _check_order(ids: list[str]) -> None:
    num_blocks = len(ids) - 2
    if num_blocks > MAX_BLOCKS:
        raise UsageError(f"profile: stages: {num_blocks} blocks are too many, {MAX_BLOCKS} at most can be solved for")
    expected = ["embed", *(f"block.{i}" for i in range(max(1, num_blocks))), "head"]
    for place, (wanted, found) in enumerate(zip(expected, [*ids, "nothing", "nothing", "nothing"], strict=False)):
        if wanted != found:
            raise _refusal(f"stages.{place}", f"{found!r} where {wanted!r} should be")


def _check_stage(stage: Stage, element_bytes: int) -> None:
    name = f"stages.{stage.id}"
    if stage.shares is not None and (stage.id, stage.shares) != ("head", "embed"):
        raise _refusal(f"{name}.shares", f"{stage.shares!r}, but only a head can share, and only embed")
    for param, shape in stage.params.items():
        if any(size <= 0 for size in shape):
            raise _refusal(f"{name}.params.{param}", f"[{', '.join(map(short_repr, shape)):.100}] is no shape")
    least_bytes = stage.num_params * element_bytes
    if not least_bytes and stage.shares is None:
        raise _refusal(f"{name}.params", "no parameters")
    if not least_bytes <= stage.weight_bytes <= MAX_BYTES:
        raise _refusal(
            f"{name}.weight_bytes",
            f"{short_repr(stage.weight_bytes)} is not from {short_repr(least_bytes)}, which its parameters take, to "
            f"{MAX_BYTES:g}",
        )


def _check_variants(name: str, variants: list[SaveVariant], of_block: bool) -> None:
    seen: set[str] = set()
    for variant in variants:
        if variant.name in seen:
            raise _refusal(f"{name}.{variant.name}", "there twice")
        seen.add(variant.name)
        if of_block and not variant.saved.get("input"):
            raise _refusal(f"{name}.{variant.name}.saved.input", "missing or 0, a block always saves its input")


def _figures(profile: Profile) -> Iterator[tuple[str, float, float, float]]:
    """(name, value, least, most) of every figure that has bounds beyond those of the schema."""
    yield "seq_len", profile.seq_len, 1, MAX_TOKENS
    sizes: dict[str, int | None] = {
        "context_bytes": profile.context_bytes,
        "workspace_bytes": profile.workspace_bytes,
        "pin_limit_bytes": profile.pin_limit_bytes,
        **{f"free_bytes.{tier}": size for tier, size in profile.free_bytes.items()},
        **{f"total_bytes.{tier}": size for tier, size in profile.total_bytes.items()},
        **{f"fragmentation_bytes.{rows}": size for rows, size in profile.fragmentation_bytes.items()},
        **{f"argument_bytes.{rows}": size for rows, size in profile.argument_bytes.items()},
    }
    yield from ((name, size, 0, MAX_BYTES) for name, size in sizes.items() if size is not None)
    for link, curve in profile.links.items():
        yield from ((f"links.{link}.points", size, 0, MAX_BYTES) for size, _ in curve.points)
        yield from ((f"links.{link}.points", rate, MIN_RATE, MAX_RATE) for _, rate in curve.points)
    rates = {f"update.{p}.{f}": rate for p, formats in profile.update.items() for f, rate in formats.items()}
    rates |= {f"update_beside_copies.{f}": rate for f, rate in profile.update_beside_copies.items()}
    yield from ((name, r.per_s, MIN_RATE, MAX_RATE) for name, r in rates.items() if r.per_s is not None)
    for structure, by_size in profile.variants.items():
        for rows, variants in by_size.items():
            yield f"variants.{structure}: micro-batch", rows, 1, MAX_TOKENS
            for variant in variants:
                yield from _of_variant(f"variants.{structure}.{rows}.{variant.name}", variant)


def _of_variant(name: str, variant: SaveVariant) -> Iterator[tuple[str, float, float, float]]:
    for direction, timing in (("forward", variant.forward), ("backward", variant.backward)):
        if timing.median_s is not None:
            yield f"{name}.{direction}", timing.median_s, 0, MAX_S
    yield f"{name}.working_forward_bytes", variant.working_forward_bytes, 0, MAX_BYTES
    yield f"{name}.working_backward_bytes", variant.working_backward_bytes, 0, MAX_BYTES
    yield from ((f"{name}.saved.{group}", size, 0, MAX_BYTES) for group, size in variant.saved.items())


def _refusal(field: str, problem: str) -> UsageError:
    return UsageError(f"profile: {field}: {problem}; profile again")
