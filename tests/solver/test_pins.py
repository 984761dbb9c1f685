"""Decisions fixed by hand: they hold in the plan, cost what they cost, and nonsense is refused in one line."""

from __future__ import annotations

import pytest
from rich.console import Console

from lazysched.errors import InfeasibleError, UsageError
from lazysched.schemas import Plan
from lazysched.solver import Solution, simulate_plan, solve
from lazysched.solver.compare import compare
from lazysched.solver.explain import Explanation, explain
from lazysched.solver.explain_report import print_explanation
from lazysched.solver.pin_checks import ONE_SLOT, remarks
from lazysched.solver.pins import kept_pins, parse_pins
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
        ("block.3.save=input", "save", [3], "input"),
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
        ("block.7.weights=gpu", "names none of the 4 blocks"),
        ("block[0:40].weights=gpu", "40 is out of range, there are 4 blocks"),
        ("block[-5:].weights=gpu", "-5 is out of range, there are 4 blocks"),
        ("micro_batch=4", "--micro-batch fixes"),
        ("batch_size=4", "use --batch-size"),
        ("block[a].weights=gpu", "is not a range"),
        ("head[0].weights=gpu", "there is one head"),
        ("embed.save=all", "only blocks save tensors"),
    ],
)
def test_nonsense_is_refused(pin: str, message: str) -> None:
    with pytest.raises(UsageError, match="pin: ") as error:
        parse_pins([pin], PROFILE.stages)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (["block[0].save=none"], "'block[0].save=none': no variant is called 'none'; use all, input"),
        (["block.weights=nvme"], "nothing may be on nvme here; use gpu or host; files need --nvme"),
        (
            ["embed.state=gpu", "block[1].weights=gpu", "block[:2].weights=host"],
            "'block[1].weights=gpu' and 'block[:2].weights=host' contradict each other at block.1",
        ),
        (["block[0].weights=host", "block.state=gpu"], "contradict each other at block.0"),
        (["block.save=all", "block.input_tier=gpu", "block.saved_tiers=host"], "no stage can be all that"),
        (["embed.weights=gpu", "head.weights=host"], "stream together, through one slot, or not at all"),
    ],
)
def test_what_nothing_can_be_is_refused_by_its_reason(pins: list[str], message: str) -> None:
    with pytest.raises(UsageError, match="pin: ") as error:
        solved(*pins)
    assert message in str(error.value)


def test_a_tied_embedding_cannot_stream() -> None:
    tied = tiny_profile(4, tied=True)
    with pytest.raises(UsageError, match=r"embed.weights=host.*has a GPU buffer of its own.*embed.state=host"):
        solve(tied, batch_size=1, gpu_memory_bytes=10**9, host_memory_bytes=10**9, pins=["embed.weights=host"])


def test_the_other_end_that_must_stream_too_is_told() -> None:
    solution = solved("head.weights=host")
    assert [solution.plan.stages[end].weights for end in ("embed", "head")] == ["host", "host"]
    assert list(remarks(solution.plan, PROFILE.stages)) == [f"head.weights=host: embed is streamed too, {ONE_SLOT}"]
    assert not list(remarks(solved("head.weights=host", "embed.weights=host").plan, PROFILE.stages))


def test_a_tier_that_is_not_there_is_no_tier_for_blocks_that_save_nothing_either() -> None:
    with pytest.raises(UsageError, match=r"saved_tiers=nvme.*nothing may be on nvme here.*--nvme and --not-executable"):
        solved("block.saved_tiers=nvme")


def test_blocks_that_keep_to_a_pin_by_saving_nothing_are_told() -> None:
    plan = solved("block.saved_tiers=host", "block[:3].save=input").plan
    idle = sum(not plan.stages[f"block.{i}"].saved_tiers for i in range(4))
    said = f"block.saved_tiers=host: {idle} of 4 blocks save nothing but their input, and keep to it"
    assert idle >= 3
    assert said in list(remarks(plan, PROFILE.stages))


def test_bad_pins_of_a_plan_are_refused_wherever_it_is_simulated() -> None:
    plan = solved().plan.model_copy(update={"pins": ["block[9].weights=gpu"]})
    with pytest.raises(UsageError, match="names none of the 4 blocks"):
        simulate_plan(plan)
    with pytest.raises(UsageError, match="names none of the 4 blocks"):
        compare(plan, plan)


def in_words(explanation: Explanation) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        print_explanation(explanation, console)
    return captured.get()


PIN = "block[0:3].state=host"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solved(PIN, gpu_bytes=1000 * MB).plan


class TestExplained:
    """At 1000 MB everything is best on the GPU: what is pinned to the host is the one thing that could be better."""

    def test_a_plan_says_what_was_fixed_by_hand(self, plan: Plan) -> None:
        assert plan.pins == [PIN]
        assert solved(gpu_bytes=1000 * MB).plan.pins == []

    def test_a_better_alternative_against_a_pin_is_told_as_that(self, plan: Plan) -> None:
        found = explain(plan, time_limit_s=0)
        assert found.pins == [PIN]
        block = next(costs for costs in found.stages if costs.choice.state == "host" and "block.0" in costs.stages)
        against = [a for a in block.alternatives if a.against_pins]
        assert {tuple(a.against_pins) for a in against} == {(PIN,)}
        assert [a.words for a in against if a.step_s < 0] != []
        assert [a for a in block.alternatives if not a.against_pins] != []
        text = in_words(found)
        assert f"Fixed by hand: {PIN}." in text
        assert f"; against {PIN}" in text
        assert "One decision otherwise is faster and fits" not in text

    def test_solving_again_keeps_what_is_fixed(self, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: 1)
        free = solved(gpu_bytes=1000 * MB).timeline.step_s
        found = explain(plan, time_limit_s=5)
        assert found.bound_s is not None
        assert free < found.bound_s <= found.reference_s
        assert "Solving again finds a faster plan" not in in_words(found)

    def test_who_edits_against_a_pin_gives_it_up(self, plan: Plan) -> None:
        choice = plan.stages["block.1"].model_copy(update={"state": "gpu", "weights": "gpu"})
        edited = plan.model_copy(update={"stages": {**plan.stages, "block.1": choice}})
        assert [pin.text for pin in kept_pins(plan, PROFILE.stages)] == [PIN]
        assert kept_pins(edited, PROFILE.stages) == ()
        found = explain(edited, time_limit_s=0)
        assert found.pins == []
        assert "Fixed by hand" not in in_words(found)

    def test_a_pin_that_is_none_is_refused(self, plan: Plan) -> None:
        with pytest.raises(UsageError, match="pin: 'block' is no decision"):
            explain(plan.model_copy(update={"pins": ["block"]}), time_limit_s=0)
