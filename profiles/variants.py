"""Which save variants of a block are worth measuring, which of them are worth keeping, and what to call them.

Compiled variants come from one traced graph, split at several activation memory budgets. Splitting is quick and tells
the bytes; only compiled halves tell the time, so few are compiled: all chosen ones at one micro-batch, the two extremes
at the others, where the rest is interpolated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from lazysched.runtime.flat import aligned
from lazysched.schemas import SaveVariant, Timing

BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
"""Shares of what could be kept at which a graph is split; 0 keeps the block's input alone."""
STEP = 0.8
"""A candidate keeps at most this share of what the one before it keeps."""
MAX_MEASURED, MAX_KEPT = 7, 6
LEAST_GAIN = 0.005
"""A variant that keeps more must be faster by this share of the block's time."""
NAMED_SHARE = 0.02
"""Tensors below this share of what is kept are not named."""


@dataclass(frozen=True)
class Wanted:
    """A variant to measure.

    Attributes:
        name: of what it keeps.
        budget: at which its graph is split; None runs the block uncompiled.
        keep: whether the forward keeps anything beside the input.
        kept_bytes: beside the input, per micro-batch, alignment included; None where only running tells.
    """

    name: str
    budget: float | None
    keep: bool
    kept_bytes: int | None = None


UNCOMPILED = (Wanted("all", None, True), Wanted("input", None, False))


def candidates(
    split: Callable[[float], Sequence[torch.Tensor]], num_tokens: int, budgets: Sequence[float] = BUDGETS
) -> list[Wanted]:
    """Compiled variants to measure, from the one that keeps most to the one that keeps the input alone.

    Args:
        split: budget -> what the forward keeps beside input and weights.
        num_tokens: rows * tokens of the micro-batch.
        budgets: shares to split at, falling.
    """
    found: list[Wanted] = []
    for budget in budgets:
        kept = split(budget)
        num_bytes = kept_bytes(kept)
        if found and not num_bytes < (found[-1].kept_bytes or 0):
            continue
        name = ("input" if not num_bytes else _name(kept, num_tokens)) if found else "all"
        found.append(Wanted(name, budget, num_bytes > 0, num_bytes))
    return _thinned(found)


def kept_bytes(kept: Sequence[torch.Tensor]) -> int:
    """Bytes of tensors, each of its own storage, as they lie in a host buffer."""
    return sum(aligned(tensor.untyped_storage().nbytes()) for tensor in kept)


def _thinned(found: Sequence[Wanted]) -> list[Wanted]:
    """Both ends, and of the rest what differs enough in size, at most ``MAX_MEASURED`` in all."""
    step = STEP
    while True:
        chosen = [found[0]]
        for wanted in found[1:-1]:
            if (wanted.kept_bytes or 0) <= step * (chosen[-1].kept_bytes or 0):
                chosen.append(wanted)
        chosen += found[1:][-1:]
        if len(chosen) <= MAX_MEASURED:
            return chosen
        step *= 0.9


def _name(kept: Sequence[torch.Tensor], num_tokens: int) -> str:
    """Values per token of what is kept, as ``18944x2+3584``: two tensors of 18944 values and one of 3584."""
    total_bytes = sum(tensor.nbytes for tensor in kept)
    widths = Counter(math.ceil(t.numel() / num_tokens) for t in kept if t.nbytes >= NAMED_SHARE * total_bytes)
    return "+".join(f"{width}x{count}" if count > 1 else f"{width}" for width, count in sorted(widths.items())[::-1])


def worth_keeping(measured: Sequence[SaveVariant]) -> list[SaveVariant]:
    """Of variants in order of what they keep, most first, those that are faster than all that keep less.

    The one that keeps least is always there. Where too many are left, those go that differ least from a neighbour.
    """
    kept: list[SaveVariant] = []
    for variant in reversed(measured):
        if not kept or _seconds(variant) < (1 - LEAST_GAIN) * _seconds(kept[0]):
            kept.insert(0, variant)
    while len(kept) > MAX_KEPT:
        gaps = [before.saved_bytes - after.saved_bytes for before, after in pairwise(kept)]
        kept.pop(min(range(1, len(kept) - 1), key=lambda k: gaps[k - 1] + gaps[k]))
    return kept


def interpolated(
    variant: SaveVariant, reference: Sequence[SaveVariant], ends: tuple[SaveVariant, SaveVariant],
    kept_bytes: int, grad_bytes: int, of: str,
) -> SaveVariant:  # fmt: skip
    """``variant`` at another micro-batch, where only the two that keep most and least were measured.

    Args:
        variant: as measured at the reference micro-batch.
        reference: all variants measured there, in order.
        ends: the first and the last of them at the micro-batch asked for.
        kept_bytes: what ``variant`` keeps there beside the input.
        grad_bytes: of weight gradients that are in a backward's working set, whatever the micro-batch.
        of: names the reference.
    """
    input_bytes = ends[0].saved["input"]
    scale = input_bytes / variant.saved["input"]

    def timing(kind: str) -> Timing:
        first, last, own = (getattr(v, kind).seconds for v in (reference[0], reference[-1], variant))
        low, high = (getattr(v, kind).seconds for v in ends)
        share = (own - first) / (last - first) if last != first else 0.0
        seconds = max(low + share * (high - low), 0.0) if 0 <= share <= 1 else own * (low + high) / (first + last)
        return Timing(median_s=seconds, reason=f"interpolated from {of}")

    backward_bytes = grad_bytes + scale * max(0, variant.working_backward_bytes - grad_bytes)
    return variant.model_copy(
        update={
            "saved": {"input": input_bytes, "intermediates": kept_bytes},
            "forward": timing("forward"), "backward": timing("backward"),
            "working_forward_bytes": round(scale * variant.working_forward_bytes),
            "working_backward_bytes": round(backward_bytes),
        }
    )  # fmt: skip


def _seconds(variant: SaveVariant) -> float:
    return variant.forward.seconds + variant.backward.seconds
