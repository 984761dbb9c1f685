"""Where page-locking is limited: plans keep within the limit or do without, whichever is faster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lazysched.errors import InfeasibleError, UsageError
from lazysched.lower import lower
from lazysched.schemas import Curve, HostMemory, Profile, Update
from lazysched.solver import Solution, print_solution, simulate, solve
from lazysched.solver.bounds import count_bound_s
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.measured import host_memories, offload_limits
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.milp import PlacementProgram
from lazysched.solver.options import STATE_CHOICES
from lazysched.solver.plans import Choices, make_plan
from tests.solver.synthetic import curve, tiny_profile

GAP = 0.01
MB = 1_000_000
PLENTY = 1000 * MB
MEMORIES: tuple[HostMemory, ...] = ("pinned", "pageable")


def limited(limit_bytes: int | None, *, pageable_bytes_per_s: float = 0.2e9, num_blocks: int = 2) -> Profile:
    """A machine whose link moves 1 GB/s of page-locked memory, and that much of ordinary memory."""
    profile = tiny_profile(num_blocks)
    slow = {f"{direction}_pageable": curve(pageable_bytes_per_s) for direction in ("h2d", "d2h")}
    return profile.model_copy(update={"links": {**profile.links, **slow}, "pin_limit_bytes": limit_bytes})


def solved(profile: Profile, gpu_bytes: int, host_bytes: int = PLENTY) -> Solution:
    return solve(profile, batch_size=1, gpu_memory_bytes=gpu_bytes, host_memory_bytes=host_bytes, gap=GAP)


class Outcome(NamedTuple):
    """What a plan takes."""

    step_s: float
    gpu_bytes: int
    pinned_bytes: int
    memory: HostMemory


def every_choice(profile: Profile, depth: int, lag: int, memory: HostMemory) -> Iterator[tuple[Instance, Choices]]:
    limit = offload_limits(profile, 1)[-1]
    instance = Instance(profile, Candidate(1, 1, depth, lag, limit, memory), "hybrid8", Update())
    for states in itertools.product(STATE_CHOICES[:3], repeat=instance.num_blocks):
        for saves in itertools.product(*(range(len(options)) for options in instance.saves)):
            for vocabulary in range(len(instance.vocabulary_options)):
                yield instance, Choices(states, saves, vocabulary)


@cache
def every_plan(pageable_bytes_per_s: float) -> list[Outcome]:
    profile = limited(None, pageable_bytes_per_s=pageable_bytes_per_s)
    result = []
    for depth, lag, memory in itertools.product((1, 2), (0, 1), MEMORIES):
        for instance, choices in every_choice(profile, depth, lag, memory):
            plan = make_plan(instance, choices, budget_bytes={})
            timeline = simulate(lower(plan, profile.stages), profile, micro_batch=1, steps=4)
            result.append(Outcome(timeline.step_s, timeline.peak_bytes["gpu"], timeline.pinned_bytes, memory))
    return result


@pytest.mark.parametrize(("pageable_bytes_per_s", "needed"), [(0.1e9, {"pinned", "pageable"}), (0.9e9, {"pageable"})])
def test_no_plan_within_the_limit_or_without_page_locking_is_faster(
    pageable_bytes_per_s: float, needed: set[HostMemory]
) -> None:
    """``needed``: kinds of memory that somewhere are faster than the other by more than the gap."""
    everything = every_plan(pageable_bytes_per_s)
    least = min(found.gpu_bytes for found in everything)
    alone = set()
    for gpu_bytes, limit in itertools.product(
        (least, least + 15 * MB, least + 40 * MB), (0, 12 * MB, 20 * MB, 60 * MB)
    ):
        allowed = [f for f in everything if f.gpu_bytes <= gpu_bytes and (f.pinned_bytes <= limit)]
        best_s = min(f.step_s for f in allowed)
        pinned_s = min((f.step_s for f in allowed if f.memory == "pinned"), default=math.inf)
        profile = limited(limit, pageable_bytes_per_s=pageable_bytes_per_s)
        budgets = Budgets(gpu_bytes / 1e9, 1.0, limit / 1e9)
        candidates = [Candidate(1, 1, offload_limit_bytes=size) for size in offload_limits(profile, 1)]
        instances = [Instance(profile, candidate, "hybrid8", Update()) for candidate in candidates]
        assert min(count_bound_s(instance, budgets, 2) for instance in instances) <= pinned_s * (1 + 1e-9)
        solution = solved(profile, gpu_bytes)
        assert solution.timeline.step_s <= best_s * (1 + GAP), (gpu_bytes, limit)
        assert solution.timeline.pinned_bytes <= limit
        assert (solution.timeline.pinned_bytes == 0) == (solution.plan.host_memory == "pageable")
        fastest = {f.memory for f in allowed if f.step_s <= best_s * (1 + GAP)}
        assert solution.plan.host_memory in fastest
        alone |= fastest if len(fastest) == 1 else set()
    assert alone == needed


def test_memory_rows_and_quick_bound_leave_out_what_exceeds_the_limit() -> None:
    """Each set of choices fixed in turn: the program has a solution exactly where the lowered plan fits."""
    profile = limited(None)
    for instance, choices in itertools.islice(every_choice(profile, 1, 1, "pinned"), 0, None, 7):
        pinned_bytes = simulate(
            lower(make_plan(instance, choices, budget_bytes={}), profile.stages), profile, micro_batch=1
        ).pinned_bytes
        for spare_bytes in (-2000, 2000):  # HiGHS tolerates a thousand
            placement = PlacementProgram(instance, Budgets(1.0, 1.0, (pinned_bytes + spare_bytes) / 1e9))
            for name, value in placement.decisions.start_values(choices).items():
                placement.problem += placement.problem.variablesDict()[name] == value
            outcome = placement.solve(gap=GAP, time_limit_s=10, seed=0)
            assert outcome.has_solution == (spare_bytes > 0)
    instance = Instance(profile, Candidate(1, 1), "hybrid8", Update())
    bounds_s = [count_bound_s(instance, Budgets(0.050, 1.0, limit_gb), 2) for limit_gb in (1.0, 0.02, 0.004, 0.0)]
    assert bounds_s == sorted(set(bounds_s))
    assert bounds_s[-1] == math.inf


@settings(max_examples=8, deadline=None)
@given(limit=st.integers(0, 120), gpu=st.integers(40, 150), host=st.integers(30, 200))
def test_plans_keep_the_limit_and_are_never_faster_than_without_one(limit: int, gpu: int, host: int) -> None:
    """Nor is any infeasible that fits without a limit."""
    try:
        free = solved(limited(None, num_blocks=3), gpu * MB, host * MB)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            solved(limited(limit * MB, num_blocks=3), gpu * MB, host * MB)
        return
    found = solved(limited(limit * MB, num_blocks=3), gpu * MB, host * MB)
    assert found.timeline.pinned_bytes <= limit * MB
    assert found.timeline.step_s >= free.timeline.step_s * (1 - GAP)
    assert all(r.timeline is None or r.timeline.pinned_bytes <= limit * MB for r in found.recipes)


def test_without_a_limit_that_binds_nothing_more_is_tried() -> None:
    for limit in (None, PLENTY):
        solution = solved(limited(limit), 60 * MB)
        assert {tried.candidate.host_memory for tried in solution.tried} == {"pinned"}
    assert host_memories(limited(PLENTY - 1), PLENTY) == MEMORIES


def test_what_could_not_be_page_locked_while_profiling_is_not_planned_for() -> None:
    profile = limited(10 * MB)
    links = {**profile.links, "h2d": Curve(reason="only 10 MB"), "d2h": Curve(reason="only 10 MB")}
    solution = solved(profile.model_copy(update={"links": links}), 60 * MB)
    assert {tried.candidate.host_memory for tried in solution.tried} == {"pageable"}


def test_a_profile_without_figures_for_ordinary_memory_is_refused() -> None:
    profile = tiny_profile().model_copy(update={"pin_limit_bytes": 10 * MB})
    with pytest.raises(UsageError, match=r"links\.h2d_pageable: not measured \(missing\); profile again"):
        solved(profile, 60 * MB)


@pytest.mark.parametrize(("limit", "locked"), [(0, "0 B of 0 B"), (100 * MB, "of 100 MB")])
def test_the_report_says_why_host_memory_is_not_page_locked(limit: int, locked: str) -> None:
    profile = limited(limit)
    least = min(found.gpu_bytes for found in every_plan(0.1e9))
    console = Console(width=140)
    with console.capture() as capture:
        print_solution(solved(profile, least + MB), profile, console)
    text = capture.get()
    assert ("host memory: pageable" in text) == (limit == 0)
    assert ("because only 0 B can be page-locked" in text) == (limit == 0)
    assert locked in text
