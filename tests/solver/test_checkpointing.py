"""Checkpoint selection: the placement program against a dynamic program and against the square-root rule."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from tests.solver.checkpointing import (
    QUANTUM_BYTES,
    Chain,
    checkpoint_profile,
    equal_blocks_profile,
    gpu_peak_bytes,
    least_recompute_s,
    plan_keeping,
    program_plan,
    recompute_s,
    square_root_plan,
    square_root_rule,
)
from tests.solver.synthetic import SHAPE_3B

TOLERANCE = 1e-4
"""HiGHS stops within 1e-6 of the period, which is many times the recomputation."""


def test_dynamic_program_finds_what_trying_everything_finds() -> None:
    draw = random.Random(3)
    for _ in range(20):
        sizes = [[draw.randint(0, 9) * QUANTUM_BYTES for _ in range(3)] for _ in range(4)]
        seconds = [[draw.random() for _ in range(3)] for _ in range(4)]
        budget_bytes = draw.randint(0, 30) * QUANTUM_BYTES
        every = itertools.product(range(3), repeat=4)
        fitting = [
            sum(own[v] for own, v in zip(seconds, choice, strict=True))
            for choice in every
            if sum(own[v] for own, v in zip(sizes, choice, strict=True)) <= budget_bytes
        ]
        assert least_recompute_s(sizes, seconds, budget_bytes) == pytest.approx(min(fitting, default=math.inf))


def test_square_root_rule_by_hand() -> None:
    # Nine blocks in segments of three: three inputs of 1 and one whole segment of 3 * 10; the last is not recomputed.
    chain = Chain([["all", "input"]] * 9, [[10, 1]] * 9, [[0.0, 2.0]] * 9)
    assert square_root_rule(chain) == (33, 12.0)


@pytest.mark.parametrize("variants", [("all", "input"), ("all", "half", "tenth", "input")])
def test_program_recomputes_as_little_as_the_dynamic_program(variants: tuple[str, ...]) -> None:
    profile = checkpoint_profile(SHAPE_3B, 9, variants)
    chain = Chain.of(profile)
    for share in (0.2, 0.5, 0.8):
        kept_bytes = round(chain.least_bytes + share * (chain.most_bytes - chain.least_bytes))
        ours_s = chain.recomputed_s(plan_keeping(profile, chain, kept_bytes, gap=1e-6, time_limit_s=20))
        optimum_s = least_recompute_s(chain.sizes, chain.recompute_s, kept_bytes)
        assert ours_s == pytest.approx(optimum_s, rel=TOLERANCE)
        assert optimum_s > 0


def test_with_all_variants_less_is_recomputed_than_by_the_square_root_rule() -> None:
    profile = checkpoint_profile(SHAPE_3B, 9, ("all", "half", "tenth", "input"))
    chain = Chain.of(profile)
    kept_bytes, rule_s = square_root_rule(chain)
    assert chain.recomputed_s(plan_keeping(profile, chain, kept_bytes, gap=1e-6, time_limit_s=20)) <= rule_s


@pytest.mark.parametrize("variants", [("all", "input"), ("all", "half", "tenth", "input")])
def test_segments_recompute_no_more_than_the_square_root_rule_in_its_memory(variants: tuple[str, ...]) -> None:
    """Equal blocks, both plans lowered; with keep all or input alone only segments can do as well."""
    profile = equal_blocks_profile(SHAPE_3B, 16, variants)
    rule = square_root_plan(profile)
    assert [choice.segment for choice in rule.stages.values()] == [1] + 12 * [4] + 5 * [1]
    gpu_bytes = gpu_peak_bytes(rule, profile)
    ours = program_plan(profile, gpu_bytes, gap=1e-4, time_limit_s=20)
    assert gpu_peak_bytes(ours, profile) <= gpu_bytes
    assert 0 < recompute_s(ours, profile) <= recompute_s(rule, profile) * (1 + TOLERANCE)
