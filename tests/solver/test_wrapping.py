"""What reports print fits the terminal: sentences are wrapped between words, names in tables are folded, not cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from lazysched.solver import Solution, solve
from lazysched.solver.explain import Explanation, explain
from lazysched.solver.explain_report import print_explanation
from lazysched.solver.report import print_solution
from lazysched.solver.wrapping import print_wrapped
from tests.solver.synthetic import tiny_profile

MB = 10**6
PROFILE = tiny_profile(3)
WIDTH = 60


@pytest.fixture(scope="module")
def solution() -> Solution:
    return solve(PROFILE, batch_size=1, gpu_memory_bytes=60 * MB, host_memory_bytes=1000 * MB)


@pytest.fixture(scope="module")
def explanation(solution: Solution) -> Explanation:
    """Of a plan in which the input of one block alone is on the host."""
    block = solution.plan.stages["block.1"].model_copy(
        update={"save": "all", "saved_tiers": {"rest": "gpu"}, "input_tier": "host"}
    )
    plan = solution.plan.model_copy(update={"stages": {**solution.plan.stages, "block.1": block}})
    variants = {f"block:{variant.name}": variant for variant in PROFILE.variants["block"][1]}
    return explain(plan.model_copy(update={"variants": {**plan.variants, **variants}}), time_limit_s=0)


def test_a_sentence_is_broken_between_words_and_hangs() -> None:
    console = Console(width=20)
    with console.capture() as captured:
        print_wrapped(console, "    one two three four five six")
    assert captured.get() == "    one two three\n      four five six\n"


def test_an_explanation_keeps_to_the_width_and_says_what_its_words_mean(explanation: Explanation) -> None:
    console = Console(width=WIDTH)
    with console.capture() as captured:
        print_explanation(explanation, console)
    assert max(map(len, captured.get().splitlines())) <= WIDTH
    words = " ".join(captured.get().split())
    for told in ("Prefetch depth: how many stages ahead", "D2H lag: how many copies", "is called by its variant:"):
        assert told in words


def test_moving_the_input_alone_is_called_that(explanation: Explanation) -> None:
    costs = next(costs for costs in explanation.stages if costs.stages == ["block.1"])
    words = [alternative.words for alternative in costs.alternatives]
    assert "keeping on gpu its input" in words
    assert "keeping on host what it saves beside its input" in words


def test_a_solution_keeps_to_the_width_and_cuts_no_name(solution: Solution) -> None:
    long = "14336x2+4096x3+1024x2+512"
    stages = {
        name: choice.model_copy(update={"save": long}) if name.startswith("block.") else choice
        for name, choice in solution.plan.stages.items()
    }
    console = Console(width=WIDTH)
    with console.capture() as captured:
        print_solution(replace(solution, plan=solution.plan.model_copy(update={"stages": stages})), PROFILE, console)
    text = captured.get()
    assert "…" not in text.partition("Fixed recipes")[0]
    assert "1 row x 1," in text
