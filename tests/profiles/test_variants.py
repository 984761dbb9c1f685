"""Which variants are measured, which are kept, and what an interpolated one is."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from lazysched.profiles.variants import (
    MAX_KEPT,
    MAX_MEASURED,
    UNCOMPILED,
    candidates,
    interpolated,
    kept_bytes,
    worth_keeping,
)
from lazysched.schemas import SaveVariant, Timing

TOKENS = 64


def tensors(*widths: int) -> list[torch.Tensor]:
    return [torch.empty(TOKENS, width, dtype=torch.bfloat16) for width in widths]


def split(budget: float) -> list[torch.Tensor]:
    """A graph whose choices are known: falling, but for 0.8, which keeps what 0.9 does, and 0.3, which keeps more."""
    kept = {1.0: (512, 512, 128, 128), 0.9: (512, 128, 128), 0.8: (512, 128, 128), 0.5: (128, 128), 0.3: (256, 8)}
    return tensors(*kept.get(budget, ()))


def test_candidates_fall_in_size_and_are_named_by_what_they_keep() -> None:
    found = candidates(split, TOKENS, (1.0, 0.9, 0.8, 0.5, 0.3, 0.0))
    assert [(w.name, w.budget, w.keep) for w in found] == [
        ("all", 1.0, True), ("512+128x2", 0.9, True), ("128x2", 0.5, True), ("input", 0.0, False),
    ]  # fmt: skip
    assert [w.kept_bytes for w in found] == [2 * TOKENS * width for width in (1280, 768, 256, 0)]


def test_small_tensors_are_counted_and_not_named() -> None:
    found = candidates(lambda budget: tensors(512, 1) if budget == 1.0 else tensors(256, 1), TOKENS, (1.0, 0.5))
    assert [w.name for w in found] == ["all", "256"]
    assert found[1].kept_bytes == 2 * TOKENS * 256 + 256  # a short tensor takes the alignment


def test_many_sizes_are_thinned_out_and_the_ends_stay() -> None:
    budgets = [1 - k / 100 for k in range(100)] + [0.0]
    found = candidates(lambda budget: tensors(*([int(3000 * budget)] if budget else [])), TOKENS, budgets)
    assert len(found) <= MAX_MEASURED
    assert (found[0].name, found[-1].name) == ("all", "input")
    sizes = [w.kept_bytes or 0 for w in found]
    assert all(after <= 0.8 * before for before, after in pairwise(sizes[:-1]))


def test_bytes_are_those_of_storages_with_their_alignment() -> None:
    assert kept_bytes([torch.empty(1), torch.empty(64)[:3], torch.empty(65)]) == 256 + 256 + 512


def variant(name: str, saved: int, seconds: float, *, working: int = 0, input_bytes: int = 100) -> SaveVariant:
    timing = Timing(median_s=seconds / 2, repeats=3)
    groups = {"input": input_bytes} | ({"intermediates": saved} if saved else {})
    return SaveVariant(
        name=name, compiled=True, budget=0.5, saved=groups, forward=timing, backward=timing,
        working_forward_bytes=working, working_backward_bytes=1000 + working,
    )  # fmt: skip


def test_what_keeps_more_must_be_faster() -> None:
    measured = [
        variant("a", 900, 1.0), variant("b", 700, 1.0), variant("c", 500, 1.2), variant("d", 300, 1.199),
        variant("input", 0, 1.4),
    ]  # fmt: skip
    assert [v.name for v in worth_keeping(measured)] == ["b", "d", "input"]


def test_at_most_six_are_kept_and_the_ends_among_them() -> None:
    measured = [variant(f"v{k}", 1000 - 100 * k, 1.0 + 0.1 * k) for k in range(10)] + [variant("input", 0, 3.0)]
    kept = worth_keeping(measured)
    assert len(kept) == MAX_KEPT
    assert (kept[0].name, kept[-1].name) == ("v0", "input")


def test_an_interpolated_variant_lies_where_it_lay_between_the_ends() -> None:
    reference = [variant("a", 900, 1.0), variant("b", 400, 1.5, working=600), variant("input", 0, 2.0)]
    ends = (variant("a", 1800, 2.2, input_bytes=200), variant("input", 0, 4.0, input_bytes=200))
    found = interpolated(reference[1], reference, ends, 812, grad_bytes=1000, of="micro-batch 1")
    assert found.saved == {"input": 200, "intermediates": 812}
    assert found.forward.median_s == found.backward.median_s == pytest.approx((2.2 + 4.0) / 2 / 2)
    assert found.forward.reason == "interpolated from micro-batch 1"
    assert found.forward.repeats == 0
    # The working set doubles with the micro-batch, but for the gradients of the weights.
    assert (found.working_forward_bytes, found.working_backward_bytes) == (1200, 1000 + 1200)


def test_uncompiled_there_are_two() -> None:
    assert [(w.name, w.budget) for w in UNCOMPILED] == [("all", None), ("input", None)]
