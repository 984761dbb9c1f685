"""Decisions fixed by hand: they hold in the plan, cost what they cost, and nonsense is refused in one line."""

from __future__ import annotations

import pytest

from lazysched.errors import InfeasibleError, UsageError
from lazysched.schemas import Plan
from lazysched.solver import Solution, solve
from lazysched.solver.pins import parse_pins
from tests.solver.synthetic import tiny_profile

MB = 10**6
PROFILE = tiny_profile(4)
GPU_BYTES = 75 * MB


def solved(*pins: str, gpu_bytes: int = GPU_BYTES) -> Solution:
    return solve(PROFILE, batch_size=1, gpu_memory_bytes=gpu_bytes, host_memory_bytes=10**9, pins=pins)


def values(plan: Plan, field: str) -> list[object]:
    return [getattr(plan.stages[f"block.{i}"], field) for i in range(4)]


@pytest.mark.parametrize(
    ("pin", "field", "blocks", "value"),
    [
        ("block[0:2].weights=host", "weights", [0, 1], "host"),
        ("block[-1].weights=host", "weights", [3], "host"),
        ("block.state=host", "state", [0, 1, 2, 3], "host"),
        ("block[1::2].save=input", "save", [1, 3], "input"),
        ("block[:3].input_tier=host", "input_tier", [0, 1, 2], "host"),
        (" block[2] . save = all", "save", [2], "all"),
    ],
)
def test_a_pinned_decision_is_in_the_plan_and_the_rest_is_solved(
    pin: str, field: str, blocks: list[int], value: str
) -> None:
    free, pinned = solved(), solved(pin)
    assert [values(pinned.plan, field)[i] for i in blocks] == [value] * len(blocks)
    assert pinned.timeline.peak_bytes["gpu"] <= GPU_BYTES
    assert pinned.timeline.step_s >= free.timeline.step_s * 0.99  # within the gap: a pin can only cost
    for recipe in pinned.recipes:
        if recipe.plan is not None:
            assert [values(recipe.plan, field)[i] for i in blocks] == [value] * len(blocks)


def test_pinning_every_decision_of_a_plan_gives_that_plan_again() -> None:
    first = solved().plan
    pins = [
        f"{name.replace('.', '[') + ']' if '.' in name else name}.{field}={getattr(choice, field)}"
        for name, choice in first.stages.items()
        for field in (("weights", "state", "save", "input_tier") if "." in name else ("weights", "state"))
    ]
    again = solved(*pins).plan
    assert again.stages == first.stages


def test_pins_of_embedding_and_head() -> None:
    plan = solved("embed.state=gpu", "head.state=host").plan
    assert (plan.stages["embed"].state, plan.stages["head"].state) == ("gpu", "host")


def test_what_is_pinned_may_leave_nothing_that_fits() -> None:
    with pytest.raises(InfeasibleError):
        solved("block.save=all", "block.saved_tiers=gpu", gpu_bytes=60 * MB)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("block[0:4]", "is no decision"),
        ("blocks[0].weights=gpu", "is no decision"),
        ("block[0].colour=red", "field 'colour' cannot be fixed; use one of weights, state"),
        ("block[0].weights=disk", "'disk' is no tier"),
        ("block[7].weights=gpu", "names none of the 4 blocks"),
        ("block[a].weights=gpu", "is not a range"),
        ("head[0].weights=gpu", "there is one head"),
        ("embed.save=all", "only blocks save tensors"),
    ],
)
def test_nonsense_is_refused(pin: str, message: str) -> None:
    with pytest.raises(UsageError, match="pin: ") as error:
        parse_pins([pin], PROFILE.stages)
    assert message in str(error.value)


def test_a_variant_that_nobody_measured_and_contradictions_are_refused() -> None:
    for pins in (("block[0].save=none",), ("block[0].weights=gpu", "block[0].weights=host"), ("block.weights=nvme",)):
        with pytest.raises(UsageError, match="no stage can be all that"):
            solved(*pins)
