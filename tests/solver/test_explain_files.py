"""``explain``, ``simulate``, ``compare`` and frames of a plan with things in files."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from lazysched.plan_page import plan_page
from lazysched.schemas import Curve, Plan, Profile
from lazysched.solver import memory_frame, simulate_plan, solve, what_if
from lazysched.solver.compare import compare
from lazysched.solver.decision_costs import base_of
from lazysched.solver.explain import Explanation, explain
from lazysched.solver.explain_report import print_explanation
from lazysched.solver.many import Request
from lazysched.solver.simulate_report import simulation
from tests.solver.synthetic import tiny_profile
from tests.solver.test_file_plans import SLOW, with_files

MB = 1_000_000
STATE_BYTES = 2_032_128
"""Of a block in hybrid8."""


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Blocks 0 and 1 live in files wholly, 2 has its state there, 3 what it saves: 21 MB; a block is 4 MB."""
    profile = with_files(tiny_profile(4), SLOW)
    solved = solve(profile, batch_size=1, gpu_memory_bytes=1000 * MB, host_memory_bytes=1000 * MB).plan
    saved: dict[str, object] = {"saved_tiers": {"rest": "nvme"}, "input_tier": "nvme"}
    changes = {
        "block.0": {"weights": "nvme", "state": "nvme", **saved},
        "block.1": {"weights": "nvme", "state": "nvme", **saved},
        "block.2": {"weights": "host", "state": "nvme"}, "block.3": {"weights": "host", "state": "host", **saved},
    }  # fmt: skip
    stages = {name: choice.model_copy(update=changes.get(name, {})) for name, choice in solved.stages.items()}
    budgets = {**solved.budget_bytes, "nvme": 1000 * MB}
    edited = solved.model_copy(update={"stages": stages, "budget_bytes": budgets})
    assert {stages[f"block.{i}"].save for i in range(4)} == {"all"}
    return Plan.model_validate(edited.model_dump())


@pytest.fixture(scope="module")
def found(plan: Plan) -> Explanation:
    return explain(plan, time_limit_s=0)


class TestExplain:
    def test_what_lies_in_files_is_counted(self, found: Explanation) -> None:
        costs = {"".join(c.stages): c for c in found.stages}
        whole, state, saves = costs["block.0block.1"], costs["block.2"], costs["block.3"]
        assert whole.kept_bytes["nvme"] == 2 * (4 * MB + STATE_BYTES + 21 * MB)
        assert state.kept_bytes["nvme"] == STATE_BYTES
        assert (saves.kept_bytes["nvme"], saves.moved_bytes["nvme_write"]) == (21 * MB, 21 * MB)
        # weights for both passes and for the update, which state and weights are written back after
        assert whole.moved_bytes["nvme_read"] == 2 * (3 * 4 * MB + STATE_BYTES + 21 * MB)
        assert whole.moved_bytes["nvme_write"] == 2 * (4 * MB + STATE_BYTES + 21 * MB)
        assert found.binding_engine == "nvme_read"

    def test_waits_for_files_are_theirs(self, found: Explanation) -> None:
        told: dict[str, float] = {}
        for group in found.waits:
            told[group.engine] = told.get(group.engine, 0.0) + group.seconds
        assert told == pytest.approx(found.exposed_s)
        assert min(told["nvme_read"], told["nvme_write"]) > 0.2 * found.step_s
        causes = {(group.engine, group.cause) for group in found.waits}
        assert {("nvme_read", "a file to be read"), ("nvme_write", "a file to be written")} <= causes

    def test_faster_files_buy_what_simulating_them_says(self, plan: Plan, found: Explanation) -> None:
        assert plan.profile is not None
        for link in ("nvme_read", "nvme_write"):
            links = {**plan.profile.links, link: Curve(points=[(1, SLOW + 1e9)])}
            faster_s = simulate_plan(plan, plan.profile.model_copy(update={"links": links}), steps=4).step_s
            (gain,) = [gain for gain in found.gains if gain.resource == link]
            assert gain.words == f"1 GB/s more on {link}"
            assert gain.same_plan_s == pytest.approx(faster_s)
            assert gain.gain_s > 0

    def test_other_places_are_all_possible_ones(self, plan: Plan, found: Explanation) -> None:
        costs = next(c for c in found.stages if c.stages == ["block.3"])
        words = [alternative.words for alternative in costs.alternatives]
        assert "keeping on host what it saves" in words
        assert "keeping its optimizer state on nvme" in words
        assert "streaming its weights from nvme and keeping its optimizer state on nvme" in words
        # An update reads weights from files with the state.
        assert "streaming its weights from nvme" not in words
        other = next(a for a in costs.alternatives if a.words == "keeping on gpu what it saves")
        stages = {
            **plan.stages,
            "block.3": plan.stages["block.3"].model_copy(update={"saved_tiers": {"rest": "gpu"}, "input_tier": "gpu"}),
        }
        changed = simulate_plan(plan.model_copy(update={"stages": stages}), steps=4)
        assert other.step_s == pytest.approx(changed.step_s - found.step_s)
        assert other.peak_bytes["nvme"] == -21 * MB

    def test_solving_anew_goes_on_among_plans_with_files(self) -> None:
        profile = with_files(tiny_profile(3), SLOW)
        tight = solve(
            profile, batch_size=1, gpu_memory_bytes=40 * MB, host_memory_bytes=48 * MB, nvme_bytes=1000 * MB,
            executable_only=False, time_limit_s=2,
        ).plan  # fmt: skip
        found = explain(tight, time_limit_s=0.5)
        assert found.problem is None
        assert found.bound_s is not None
        gain = next(gain for gain in found.gains if gain.tier == "nvme")
        assert (gain.resource, gain.words) == ("nvme_memory", "1 GB more room for files on nvme")
        console = Console(width=100)
        with console.capture() as captured:
            print_explanation(found, console)
        assert "1 GB more room for files on nvme" in captured.get()


class TestAgain:
    """What is asked of the solver when it looks for gains."""

    def asked(self, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
        requests: list[Request] = []
        monkeypatch.setattr(what_if, "answer_all", requests.extend)
        assert plan.profile is not None
        what_if.solve_changes(plan, plan.profile, [], 1.0)
        (request,) = requests
        return request.settings

    def test_a_plan_that_runs_is_compared_with_such_plans(self, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        stages = {name: c.model_copy(update={"weights": "host", "state": "host", "saved_tiers": dict.fromkeys(
            c.saved_tiers, "host"), "input_tier": "host"}) for name, c in plan.stages.items()}  # fmt: skip
        runs = plan.model_copy(update={"stages": stages, "budget_bytes": {**plan.budget_bytes, "nvme": 0}})
        assert self.asked(runs, monkeypatch)["executable_only"] is True
        budget = self.asked(runs.model_copy(update={"budget_bytes": plan.budget_bytes}), monkeypatch)
        assert (budget["executable_only"], budget["nvme_bytes"]) == (False, 1000 * MB)
        monkeypatch.setattr(what_if, "executes_files", lambda: True)
        roomy = runs.model_copy(update={"budget_bytes": plan.budget_bytes})
        assert self.asked(roomy, monkeypatch)["executable_only"] is True

    def test_one_that_does_not_with_others_like_it(self, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.asked(plan, monkeypatch)["executable_only"] is False


def test_the_simulation_names_the_engines_of_files(plan: Plan) -> None:
    assert plan.profile is not None
    shown = simulation(plan, plan.profile, base_of(plan, plan.profile).timeline)
    for engine in ("nvme_read", "nvme_write"):
        assert shown.busy_s[engine] == pytest.approx(shown.moved_bytes[engine] / SLOW)
        assert shown.exposed_s[engine] > 0
    assert shown.peak_bytes["nvme"] == 2 * 4 * MB + 3 * (STATE_BYTES + 21 * MB)


def test_comparing_shows_files_on_one_side(plan: Plan) -> None:
    profile = plan.profile
    assert isinstance(profile, Profile)
    without = solve(profile, batch_size=1, gpu_memory_bytes=1000 * MB, host_memory_bytes=1000 * MB).plan
    found = compare(plan, without)
    figures = {figure.name: figure for figure in found.figures}
    assert figures["nvme_peak_bytes"].a == 2 * 4 * MB + 3 * (STATE_BYTES + 21 * MB)
    for name in ("nvme_peak_bytes", "nvme_read_bytes", "nvme_write_bytes", "waits_for_nvme_read_s"):
        assert figures[name].b == 0
        assert figures[name].a
    assert "nvme budget" in {difference.where for difference in found.settings}
    assert ("weights", "streamed from nvme") in {(difference.field, difference.a) for difference in found.stages}


def test_the_page_shows_files(plan: Plan) -> None:
    page = plan_page(plan)
    # The step, three tiers, the decisions.
    assert page.count("<svg") == 5
    assert "Memory of the tier nvme" in page
    assert re.search(r"compute waits for</th><td>[^<]*nvme_read", page)


def test_frames_have_files(plan: Plan) -> None:
    decisions = plan.to_frame()
    assert list(decisions.saved_nvme_bytes) == [0, 21 * MB, 21 * MB, 0, 21 * MB, 0]
    assert decisions.nvme_write_bytes["block.2"] == STATE_BYTES
    memory = memory_frame(plan, simulate_plan(plan))
    assert memory["nvme", "weights"].max() == 2 * 4 * MB
    assert memory["nvme", "state"].max() == 3 * STATE_BYTES
    assert memory["nvme", "saved"].max() == 3 * 21 * MB
