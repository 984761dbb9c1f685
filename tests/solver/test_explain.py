"""``explain``: each claim against an independent simulation or solve, on instances where the answer is known."""

from __future__ import annotations

import pytest
from rich.console import Console

from lazysched.errors import UsageError
from lazysched.lower import lower
from lazysched.schemas import Curve, Engine, Op, Plan, Profile, Program
from lazysched.solver import simulate, simulate_plan, solve
from lazysched.solver.explain import Explanation, explain
from lazysched.solver.explain_report import print_explanation
from lazysched.solver.waits import wait_groups
from lazysched.solver.what_if import faster, over_budget, wider
from tests.solver.synthetic import tiny_profile

MB = 1_000_000
STEPS = 4
TIME_LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solving in processes of their own is tested with sweeps; here it would only take longer."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1))


def solved(profile: Profile, gpu_bytes: int, host_bytes: int = 1000 * MB, batch_size: int = 1) -> Plan:
    return solve(
        profile, batch_size=batch_size, gpu_memory_bytes=gpu_bytes, host_memory_bytes=host_bytes,
        time_limit_s=TIME_LIMIT_S,
    ).plan  # fmt: skip


def step_s(plan: Plan, profile: Profile) -> float:
    return simulate(lower(plan, profile.stages), profile, micro_batch=plan.micro_batch, steps=STEPS).step_s


def in_words(explanation: Explanation) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        print_explanation(explanation, console)
    return captured.get()


def edited(plan: Plan, stage: str, **changes: object) -> Plan:
    stages = {**plan.stages, stage: plan.stages[stage].model_copy(update=changes)}
    return plan.model_copy(update={"stages": stages})


class TestWhatBinds:
    def test_compute_where_there_is_plenty_of_all(self) -> None:
        profile = tiny_profile(3)
        plan = solved(profile, 1000 * MB)
        found = explain(plan, time_limit_s=0)
        assert found.binding_engine == "compute"
        assert found.engine_shares["compute"] == pytest.approx(1, abs=0.01)
        assert found.recompute_s == 0
        assert sum(found.exposed_s.values()) == pytest.approx(0, abs=1e-4)
        gains = {gain.resource: gain for gain in found.gains}
        assert gains["compute"].gain_s == pytest.approx(found.step_s * (1 - 1 / 1.1), rel=0.01)
        assert gains["cpu"].gain_s == pytest.approx(0, abs=1e-6)
        assert "compute binds: 100 % of the step follows the speed of compute" in in_words(found)

    def test_a_link_and_what_more_of_it_buys(self) -> None:
        profile = tiny_profile(4, link_bytes_per_s=0.05e9)
        plan = solved(profile, 45 * MB)
        found = explain(plan, time_limit_s=0)
        assert found.binding_engine in ("h2d", "d2h")
        binding = found.binding_engine
        assert found.engine_shares[binding] > 0.3
        wide = {f"{binding}{tail}": Curve(points=[(1 << 20, profile.links[f"{binding}{tail}"].points[0][1] + 1e9)])
                for tail in ("", "_both")}  # fmt: skip
        faster_s = step_s(plan, profile.model_copy(update={"links": {**profile.links, **wide}}))
        gain = next(gain for gain in found.gains if gain.resource == binding)
        assert gain.same_plan_s == pytest.approx(faster_s)
        assert gain.gain_s == pytest.approx(step_s(plan, profile) - faster_s)
        assert gain.gain_s > 0.2 * found.step_s
        assert found.waits
        assert found.waits[0].engine == binding or found.waits[0].behind == binding
        assert f"{binding} binds" in in_words(found)

    def test_the_update_on_the_host(self) -> None:
        plan = solved(tiny_profile(3, cpu_params_per_s=5e6), 40 * MB)
        found = explain(plan, time_limit_s=0)
        assert found.binding_engine == "cpu"
        assert {group.engine for group in found.waits} | {group.behind for group in found.waits} >= {"cpu"}

    def test_memory_where_blocks_are_recomputed_for_lack_of_it(self) -> None:
        profile = tiny_profile(3)
        tight = 60 * MB
        found = explain(solved(profile, tight), time_limit_s=TIME_LIMIT_S)
        assert found.bound_s is not None
        assert found.recompute_s > 0
        roomy_s = step_s(solved(profile, tight + 1000 * MB), profile)
        assert roomy_s < found.bound_s
        assert found.binding_tiers == ["gpu"]
        gain = next(gain for gain in found.gains if gain.resource == "gpu_memory")
        assert gain.best_s == pytest.approx(roomy_s, rel=0.01)
        assert gain.within_gap is False
        host = next(gain for gain in found.gains if gain.resource == "host_memory")
        assert host.within_gap is True
        text = in_words(found)
        assert "Memory binds: with more of gpu a step is proven to be shorter." in text
        assert "within the solver's gap" in text or "1 GB more host memory: nothing" in text

    def test_no_memory_where_all_fits(self) -> None:
        found = explain(solved(tiny_profile(2), 1000 * MB), time_limit_s=TIME_LIMIT_S)
        assert found.binding_tiers == []
        assert "No memory is proven to bind" in in_words(found)

    def test_without_solving_memory_is_left_open(self) -> None:
        found = explain(solved(tiny_profile(2), 60 * MB), time_limit_s=0)
        assert (found.bound_s, found.gap, found.binding_tiers) == (None, None, [])
        assert {gain.tier for gain in found.gains} == {None}
        assert "nothing was solved" in in_words(found)


class TestGains:
    def test_count_from_the_fastest_plan_known_for_the_same_budgets(self) -> None:
        plan = solved(tiny_profile(2), 1000 * MB)
        worse = plan
        for stage in ("block.0", "block.1"):
            worse = edited(worse, stage, save="input", saved_tiers={})
        variants = {f"block:{v.name}": v for v in tiny_profile(2).variants["block"][1]}
        worse = worse.model_copy(update={"variants": {**worse.variants, **variants}})
        found = explain(worse, time_limit_s=TIME_LIMIT_S)
        assert plan.predicted is not None
        assert found.step_s == pytest.approx(plan.predicted.step_s + 0.020)
        assert found.reference_s == pytest.approx(plan.predicted.step_s, rel=0.01)
        assert next(gain for gain in found.gains if gain.resource == "gpu_memory").gain_s < 0.001
        text = in_words(found)
        assert "Solving again finds a faster plan for the same budgets" in text
        assert "One decision otherwise is faster and fits: block.0: saving all instead of input" in text

    @pytest.mark.parametrize("engine", ["compute", "h2d", "d2h", "cpu"])
    def test_a_faster_machine_has_only_that_engine_faster(self, engine: Engine) -> None:
        profile = tiny_profile(3, link_bytes_per_s=0.2e9, cpu_params_per_s=20e6)
        plan = solved(profile, 60 * MB)
        before, after = (
            _busy_s(plan, machine) for machine in (profile, faster(profile, engine, 2.0))
        )  # fmt: skip
        assert after[engine] == pytest.approx(before[engine] / 2)
        assert {e: s for e, s in after.items() if e != engine} == pytest.approx(
            {e: s for e, s in before.items() if e != engine}
        )

    def test_a_wider_link_is_wider_at_every_size_and_both_ways(self) -> None:
        links = wider(tiny_profile(), "h2d", 1e9).links
        assert [links[name].points[0][1] for name in ("h2d", "h2d_both", "d2h", "d2h_both")] == pytest.approx(
            [2e9, 2e9, 1.1e9, 1e9]
        )


def _busy_s(plan: Plan, profile: Profile) -> dict[str, float]:
    busy: dict[str, float] = {}
    for interval in simulate_plan(plan, profile).intervals:
        busy[interval.engine] = busy.get(interval.engine, 0.0) + interval.duration_s
    return busy


class TestDecisions:
    def test_stages_decided_alike_are_one_and_cost_what_the_profile_says(self) -> None:
        profile = tiny_profile(4)
        plan = solved(profile, 60 * MB, batch_size=2)
        found = explain(plan, time_limit_s=0)
        assert sorted(stage for costs in found.stages for stage in costs.stages) == sorted(plan.stages)
        for costs in found.stages:
            assert len({plan.stages[stage].model_dump_json() for stage in costs.stages}) == 1
            if costs.stages[0].startswith("block."):
                # 10 ms for each of two micro-batches
                each_s = 0.020 if costs.choice.save == "input" else 0
                assert costs.recompute_s == pytest.approx(len(costs.stages) * each_s)
        assert found.recompute_s == pytest.approx(sum(c.recompute_s for c in found.stages))

    def test_what_streamed_blocks_move_and_hold(self) -> None:
        plan = solved(tiny_profile(4), 1000 * MB)
        blocks = [f"block.{i}" for i in range(4)]
        for block in blocks:
            plan = edited(plan, block, weights="host", state="host", save="all", saved_tiers={"rest": "gpu"})
        costs = next(c for c in explain(plan, time_limit_s=0).stages if c.stages == blocks)
        # The last two are still in their slots when the backward begins.
        assert costs.moved_bytes == {"h2d": (4 + 2) * 4 * MB, "d2h": 4 * 4 * MB}
        assert costs.kept_bytes["gpu"] == 4 * 21 * MB  # what they save, inputs included
        assert costs.kept_bytes["host"] > 4 * 8 * MB  # weights, gradients and state
        for block in blocks:
            plan = edited(plan, block, weights="gpu")
        costs = next(c for c in explain(plan, time_limit_s=0).stages if c.stages == blocks)
        assert costs.moved_bytes == {"h2d": 4 * 4 * MB, "d2h": 4 * 4 * MB}
        assert costs.kept_bytes["gpu"] == 4 * 25 * MB

    def test_another_decision_costs_what_simulating_it_says(self) -> None:
        profile = tiny_profile(3)
        plan = solved(profile, 60 * MB)
        found = explain(plan, time_limit_s=0)
        block = next(c for c in found.stages if c.choice.save == "input" and c.choice.input_tier == "gpu")
        other = next(a for a in block.alternatives if a.words == "saving all instead of input")
        changed = edited(plan, block.stages[0], save="all", saved_tiers={"rest": "gpu"})
        whole = next(v for v in profile.variants["block"][1] if v.name == "all")
        changed = changed.model_copy(update={"variants": {**plan.variants, "block:all": whole}})
        before, after = (simulate_plan(p, profile, steps=STEPS) for p in (plan, changed))
        assert other.where == block.stages[0]
        assert other.step_s == pytest.approx(after.step_s - before.step_s)
        assert other.peak_bytes["gpu"] == after.peak_bytes["gpu"] - before.peak_bytes["gpu"]
        assert other.over_bytes == over_budget(after, plan.budget_bytes, profile)

    def test_giving_up_clipping_is_told_but_no_better_plan(self) -> None:
        plan = solved(tiny_profile(3, cpu_params_per_s=5e6), 40 * MB)
        found = explain(plan, time_limit_s=0)
        early = next(a for a in found.step_alternatives if a.words.startswith("no clipping"))
        assert early.step_s < 0
        assert not early.same_result
        assert "otherwise is faster and fits: no clipping" not in in_words(found)

    def test_a_plan_that_does_not_fit_is_explained_and_says_so(self) -> None:
        plan = solved(tiny_profile(2), 1000 * MB)
        found = explain(plan.model_copy(update={"budget_bytes": {"gpu": 10 * MB, "host": 1000 * MB}}), time_limit_s=1)
        assert found.over_bytes["gpu"] == found.peak_bytes["gpu"] - 10 * MB
        assert found.problem is not None
        text = in_words(found)
        assert "This plan does not fit: gpu" in text
        assert "Solving anew found nothing: no plan fits" in text


class TestWaits:
    def test_a_wait_names_its_cause_and_what_kept_that_waiting(self) -> None:
        ops = [
            _op("forward/block.0/0", "forward", "compute", ("variant", "block", "all", "forward")),
            _op("update/block.0", "update", "cpu", ("update", "cpu", "fp32"), num_params=4 * MB),
            _op("load/block.0/forward", "copy", "h2d", ("link", "h2d"), num_bytes=10 * MB),
        ]
        edges = [
            ("forward/block.0/0", "update/block.0", 0), ("update/block.0", "load/block.0/forward", 0),
            ("load/block.0/forward", "forward/block.0/0", 1),
        ]  # fmt: skip
        program = Program(plan_hash="", ops={op.id: op for op in ops}, edges=edges, buffers={})
        timeline = simulate(program, tiny_profile(), micro_batch=1)
        (group,) = wait_groups(program, timeline.intervals, in_line=False)
        # update 40 ms, then 10 ms of upload
        assert group.seconds == pytest.approx(0.050)
        assert (group.engine, group.behind, group.waiting) == ("h2d", "cpu", "forward")
        assert group.cause == "weights to arrive"
        assert (group.count, group.worst_stage) == (1, "block.0")

    def test_they_add_up_to_the_exposed_time(self) -> None:
        for device in ("cuda", "cpu"):
            profile = tiny_profile(4, link_bytes_per_s=0.1e9).model_copy(update={"device": device})
            found = explain(solved(profile, 45 * MB), time_limit_s=0)
            told: dict[str, float] = {}
            for group in found.waits:
                told[group.engine] = told.get(group.engine, 0.0) + group.seconds
            assert told == pytest.approx(found.exposed_s)
            assert sum(told.values()) > 0
            seconds = [group.seconds for group in found.waits]
            assert seconds == sorted(seconds, reverse=True)


def _op(op_id: str, kind: str, engine: Engine, cost: tuple[str, ...], **fields: int) -> Op:
    return Op.model_validate(
        {
            "id": op_id,
            "kind": kind,
            "engine": engine,
            "priority": 0,
            "stage": op_id.split("/")[1],
            "cost": cost,
            **fields,
        }
    )


class TestRefusals:
    def test_a_plan_without_profile(self) -> None:
        plan = solved(tiny_profile(2), 1000 * MB).model_copy(update={"profile": None})
        with pytest.raises(UsageError, match="plan: profile: null"):
            explain(plan)
        assert explain(plan, tiny_profile(2), time_limit_s=0).binding_engine == "compute"

    def test_a_profile_of_another_model(self) -> None:
        plan = solved(tiny_profile(2), 1000 * MB)
        with pytest.raises(UsageError, match="model_id"):
            explain(plan, tiny_profile(2).model_copy(update={"model_id": "other"}), time_limit_s=0)

    @pytest.mark.parametrize("time_limit_s", [-1.0, float("nan"), float("inf")])
    def test_no_time(self, time_limit_s: float) -> None:
        with pytest.raises(UsageError, match="time_limit_s"):
            explain(solved(tiny_profile(2), 1000 * MB), time_limit_s=time_limit_s)
