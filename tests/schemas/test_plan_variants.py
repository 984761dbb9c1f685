"""Plans edited by hand: the variants that they embed are held against the profile that they carry."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from lazysched.errors import UsageError
from lazysched.schemas import Plan
from lazysched.solver import simulate_plan, solve
from tests.solver.synthetic import tiny_profile

MB = 10**6


@pytest.fixture(scope="module")
def plan() -> Plan:
    """One micro-batch of two rows, everything saved and on the GPU."""
    solved = solve(
        tiny_profile(3, micro_batches=[1, 2]), batch_size=2, gpu_memory_bytes=10**9, host_memory_bytes=10**9
    ).plan
    assert (solved.micro_batch, solved.accumulation) == (2, 1)
    assert set(solved.variants) == {"embed:all", "block:all", "head:all"}
    return solved


def edited(plan: Plan, edit: Callable[[dict[str, Any]], object]) -> Plan:
    data = json.loads(plan.model_dump_json())
    edit(data)
    return Plan.check(data, "edited.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch": 1, "accumulation": 2}, "those of micro_batch 2, .* solve again with --micro-batch 1"),
        ({"micro_batch": 4, "batch_size": 4}, "micro_batch is 4: the plan's profile has figures for 1, 2"),
        ({"budget_bytes": {"gpu": -1}}, "budget_bytes.gpu"),
        ({"prefetch_depth": 2**70}, "prefetch_depth"),
        ({"d2h_lag": 10**6}, "d2h_lag"),
    ],
)
def test_what_cannot_be_edited_alone_is_refused(plan: Plan, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        edited(plan, lambda data: data.update(changes))


@pytest.mark.parametrize("size", [0, -1, 10**30])
@pytest.mark.parametrize("carries_profile", [True, False])
def test_sizes_that_cannot_be_are_refused(plan: Plan, size: int, carries_profile: bool) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["variants"]["block:all"]["saved"]["input"] = size
        if not carries_profile:
            data["profile"] = None

    with pytest.raises(UsageError, match=r"variants.block:all.saved.input"):
        edited(plan, edit)


def test_other_bytes_than_the_profiles_are_refused(plan: Plan) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["variants"]["block:all"]["working_backward_bytes"] += 1

    with pytest.raises(UsageError, match=r"variants.block:all: its bytes are not the profile's at micro_batch 2"):
        edited(plan, edit)


def test_a_variant_that_only_the_profile_has_is_embedded(plan: Plan) -> None:
    changed = edited(plan, lambda data: data["stages"]["block.1"].update(save="input", saved_tiers={}))
    assert plan.profile is not None
    assert changed.variants["block:input"] in plan.profile.variants["block"][2]
    assert simulate_plan(changed).step_s > simulate_plan(plan).step_s


def test_a_variant_that_nobody_has_is_refused_with_the_pin(plan: Plan) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["stages"]["block.1"]["save"] = "half"
        data["profile"] = None

    with pytest.raises(UsageError, match=r"'half' is not among .* \(all\); .* --pin 'block\[1\].save=half'"):
        simulate_plan(edited(plan, edit), tiny_profile(3, micro_batches=[1, 2]))
