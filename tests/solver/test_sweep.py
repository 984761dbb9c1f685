"""Sweeps of budgets, and the batch of the largest throughput."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lazysched.errors import InfeasibleError, UsageError
from lazysched.schemas import Curve, Plan, Profile
from lazysched.solver import Solution, batch_size, batches, simulate_plan, solve, sweep
from lazysched.solver.batch_size import MIN_GAIN, TriedBatch, largest_throughput
from lazysched.solver.frontier import COLUMNS, best_of, frontier_frame, frontier_table, save_frontier, steps_frame
from lazysched.solver.many import Answer
from lazysched.solver.solution import report_with
from lazysched.solver.sweep import Point, Sweep, parse_sweep, run_sweep
from tests.solver.synthetic import tiny_profile

MB = 1_000_000
SETTINGS: dict[str, Any] = {"batch_size": 1, "host_memory_bytes": 1000 * MB, "time_limit_s": 20}
ON_HOST: dict[str, Any] = {"pins": ["block.state=host"]}
"""Updates there take as long for any batch, so that larger ones gain although memory has room."""


@pytest.fixture
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1))


class TestParsing:
    def test_both_ends_are_in(self) -> None:
        assert parse_sweep("gpu-memory=8GB:24GB:8GB") == Sweep("gpu-memory", (8 * 10**9, 16 * 10**9, 24 * 10**9))
        assert parse_sweep("host_memory=1GiB:1GiB:1MB") == Sweep("host-memory", (2**30,))
        assert parse_sweep("gpu-memory=8GB:23GB:8GB").budgets == (8 * 10**9, 16 * 10**9)

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("gpu-memory", "is no sweep; write for example"),
            ("gpu-memory=8GB:80GB", "is no sweep"),
            ("gpu-memory=8GB:80GB:8GB:1GB", "is no sweep"),
            ("disk=8GB:80GB:8GB", "'disk' cannot be swept; use one of gpu-memory, host-memory, nvme"),
            ("gpu-memory=8GB:80GB:0", "a step of 0"),
            ("gpu-memory=8GB:80GB:-8GB", "'-8GB' is not a size"),
            ("gpu-memory=8:80GB:8GB", "'8' is not a size"),
            ("gpu-memory=0:80GB:8GB", "starts at 0"),
            ("gpu-memory=80GB:8GB:8GB", "starts above its end"),
            ("gpu-memory=1GB:201GB:1GB", "has 201 points, at most 200"),
        ],
    )
    def test_what_is_no_sweep(self, text: str, named: str) -> None:
        with pytest.raises(UsageError, match="--sweep") as caught:
            parse_sweep(text)
        assert named in str(caught.value)


class TestSweep:
    def test_every_point_is_what_solving_there_finds(self, tmp_path: Path) -> None:
        """In processes of their own: more points than cores."""
        profile = tiny_profile(3)
        swept = Sweep("gpu-memory", (20 * MB, 60 * MB, 100 * MB, 150 * MB))
        seen: list[int] = []
        points = run_sweep(profile, swept, SETTINGS, seen.append)
        assert seen == [1, 2, 3, 4]
        small, *rest = points
        assert (small.plan, small.status) == (None, "infeasible")
        with pytest.raises(InfeasibleError) as caught:
            solve(profile, gpu_memory_bytes=20 * MB, **SETTINGS)
        assert small.missing_bytes == caught.value.missing_bytes["gpu"]
        for point in rest:
            assert point.plan is not None
            assert point.plan.predicted is not None
            assert point.plan.budget_bytes["gpu"] == point.budget_bytes
            there = solve(profile, gpu_memory_bytes=point.budget_bytes, **SETTINGS)
            assert point.plan.predicted.step_s == pytest.approx(there.timeline.step_s, rel=0.01)
            recipes = {recipe.name: recipe.timeline.step_s for recipe in there.recipes if recipe.timeline is not None}
            assert point.recipes_s.keys() == recipes.keys()
            assert all(point.recipes_s[name] <= 1.001 * step_s for name, step_s in recipes.items())
            timeline = simulate_plan(point.plan, profile)
            assert timeline.step_s == pytest.approx(point.plan.predicted.step_s, rel=1e-6)
            assert timeline.peak_bytes["gpu"] <= point.budget_bytes
        steps = [point.plan.predicted.step_s for point in rest if point.plan and point.plan.predicted]
        assert steps == sorted(steps, reverse=True)
        assert rest[0].binds == "compute, gpu"
        assert rest[-1].binds == "compute"
        fastest = best_of(points)
        assert fastest.predicted is not None
        assert fastest.predicted.step_s == min(steps)
        self._check_file(tmp_path / "frontier.csv", points)

    def _check_file(self, path: Path, points: list[Point]) -> None:
        save_frontier(path, points)
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert tuple(rows[0]) == COLUMNS
        assert [int(row["budget_bytes"]) for row in rows] == [point.budget_bytes for point in points]
        assert (rows[0]["status"], rows[0]["step_s"]) == ("infeasible", "")
        assert int(rows[0]["missing_bytes"]) == points[0].missing_bytes
        last = points[-1].plan
        assert last is not None
        assert last.predicted is not None
        assert float(rows[-1]["step_s"]) == last.predicted.step_s
        assert float(rows[-1]["tokens_per_s"]) == pytest.approx(last.seq_len / last.predicted.step_s)
        assert int(rows[-1]["gpu_peak_bytes"]) == last.predicted.peak_bytes["gpu"]
        assert rows[-1]["missing_bytes"] == ""

    @pytest.mark.usefixtures("_one_process")
    def test_a_larger_budget_is_never_slower(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where a solve finds less than the one before it, or nothing in time, the plan before it stands."""
        profile = tiny_profile(2)
        found = [
            solve(profile, gpu_memory_bytes=gpu, **SETTINGS).plan for gpu in (1000 * MB, 50 * MB)
        ]  # the first is faster
        answers = [Answer(found[0]), Answer(found[1]), Answer(None, problem="time is up")]
        monkeypatch.setattr(sweep, "answer_until_interrupted", lambda requests, report: answers)
        points = run_sweep(profile, Sweep("gpu-memory", (1000 * MB, 1100 * MB, 1200 * MB)), SETTINGS)
        plans = [point.plan for point in points]
        assert [plan.stages if plan else None for plan in plans] == [found[0].stages] * 3
        assert [plan.budget_bytes["gpu"] if plan else 0 for plan in plans] == [1000 * MB, 1100 * MB, 1200 * MB]
        assert points[2].status == "feasible"
        for plan in plans:
            assert plan is not None
            assert plan.solver is not None
            assert plan.predicted is not None
            assert plan.solver.bound_s <= plan.predicted.step_s
            assert plan.solver.gap == pytest.approx(1 - plan.solver.bound_s / plan.predicted.step_s)
        assert best_of(points).budget_bytes["gpu"] == 1000 * MB

    @pytest.mark.usefixtures("_one_process")
    def test_what_is_proven_for_a_larger_budget_holds_for_smaller_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Bounds, that nothing fits, and whether a plan is near enough to its bound."""
        plan = solve(tiny_profile(2), gpu_memory_bytes=1000 * MB, **SETTINGS).plan
        step_s = plan.predicted.step_s if plan.predicted else 0.0
        assert plan.solver is not None

        def bounded(bound_s: float) -> Answer:
            return Answer(plan.model_copy(update={"solver": report_with(plan.solver, step_s, bound_s, 0.01)}))

        out_of_time = Answer(None, problem="time is up")
        answers = [
            out_of_time, Answer(None, infeasible=True), out_of_time, bounded(0.9 * step_s), bounded(0.995 * step_s),
            bounded(0.8 * step_s), out_of_time,
        ]  # fmt: skip
        monkeypatch.setattr(sweep, "answer_until_interrupted", lambda requests, report: answers)
        points = run_sweep(tiny_profile(2), Sweep("gpu-memory", tuple(range(300 * MB, 370 * MB, 10 * MB))), SETTINGS)
        assert [point.status for point in points] == [
            "infeasible", "infeasible", "time limit", "optimal", "optimal", "feasible", "feasible",
        ]  # fmt: skip
        assert {point.binds for point in points} == {"", "compute"}
        gaps = [point.plan.solver.gap for point in points if point.plan and point.plan.solver]
        assert gaps == pytest.approx([0.005, 0.005, 0.2, 1])
        frame = frontier_frame(points)
        assert list(frame.index) == [point.budget_bytes for point in points]
        assert list(frame.status) == [point.status for point in points]
        assert list(frame.step_s.dropna()) == [step_s] * 4
        assert list(frame.gap.dropna()) == pytest.approx([0.005, 0.005, 0.2])
        console = Console(width=80, record=True)
        console.print(frontier_table(Sweep("gpu-memory", ()), points))
        shown = console.export_text()
        assert "time limit: within --time-limit neither a plan nor a proof" in shown
        assert "feasible: a faster plan may exist" in shown
        last = next(line for line in shown.splitlines() if "360 MB" in line)
        assert "unknown" in last  # no bound holds there

    @pytest.mark.usefixtures("_one_process")
    def test_memory_that_is_not_proven_to_bind_has_a_question_mark(self, monkeypatch: pytest.MonkeyPatch) -> None:
        profile, budgets = tiny_profile(2), (45 * MB, 60 * MB, 1000 * MB)
        plans = [solve(profile, gpu_memory_bytes=gpu, **SETTINGS).plan for gpu in budgets]
        steps = [plan.predicted.step_s for plan in plans if plan.predicted]
        assert steps[0] > steps[1] > steps[2]
        bounds = [steps[0], steps[2] * 0.99, steps[2]]  # the first is proven to be slower, the second is not
        answers = [
            Answer(plan.model_copy(update={"solver": plan.solver and report_with(plan.solver, step_s, bound_s, 0.01)}))
            for plan, step_s, bound_s in zip(plans, steps, bounds, strict=True)
        ]
        monkeypatch.setattr(sweep, "answer_until_interrupted", lambda requests, report: answers)
        points = run_sweep(profile, Sweep("gpu-memory", budgets), SETTINGS)
        assert [point.binds.partition(", ")[2] for point in points] == ["gpu", "gpu?", ""]
        console = Console(width=80, record=True)
        console.print(frontier_table(Sweep("gpu-memory", budgets), points))
        assert "gpu?: a larger budget was faster" in console.export_text()

    @pytest.mark.usefixtures("_one_process")
    def test_recipes_stand_beside_and_are_never_slower_either(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = solve(tiny_profile(2), gpu_memory_bytes=1000 * MB, **SETTINGS).plan
        answers = [
            Answer(plan, recipes_s={"a": 3.0, "b": 1.0}), Answer(plan, recipes_s={"a": 2.0}),
            Answer(plan, recipes_s={"a": 2.5, "c": 1.0}),
        ]  # fmt: skip
        monkeypatch.setattr(sweep, "answer_until_interrupted", lambda requests, report: answers)
        points = run_sweep(tiny_profile(2), Sweep("gpu-memory", (10**9, 2 * 10**9, 3 * 10**9)), SETTINGS)
        steps = steps_frame(points)
        assert list(steps.index) == [1.0, 2.0, 3.0]
        assert list(steps.lazysched) == [plan.predicted.step_s if plan.predicted else None] * 3
        assert list(steps.a) == [3.0, 2.0, 2.0]
        assert list(steps.b) == [1.0, 1.0, 1.0]
        assert steps.c.isna().tolist() == [True, True, False]

    @pytest.mark.usefixtures("_one_process")
    def test_the_host_is_swept_too(self) -> None:
        profile = tiny_profile(2)
        settings = {"batch_size": 1, "gpu_memory_bytes": 45 * MB, "time_limit_s": 20}
        points = run_sweep(profile, Sweep("host-memory", (1 * MB, 200 * MB)), settings)
        assert points[0].status == "infeasible"
        assert points[0].missing_bytes is not None
        assert points[1].plan is not None
        assert points[1].plan.budget_bytes["host"] == 200 * MB

    @pytest.mark.usefixtures("_one_process")
    def test_nothing_fits_anywhere(self) -> None:
        points = run_sweep(tiny_profile(2), Sweep("gpu-memory", (5 * MB, 10 * MB)), SETTINGS)
        with pytest.raises(InfeasibleError, match="up to 10 MB, which lacks"):
            best_of(points)

    def test_wrong_settings_are_refused_from_other_processes_too(self) -> None:
        with pytest.raises(UsageError, match="batch_size: 3"):
            run_sweep(
                tiny_profile(2, micro_batches=(2,)), Sweep("gpu-memory", (100 * MB, 200 * MB)),
                {**SETTINGS, "batch_size": 3},
            )  # fmt: skip


class TestBatchSize:
    def search(self, profile: Profile, gpu_bytes: int, **other: Any) -> tuple[Plan, list[TriedBatch], str]:
        tried: list[TriedBatch] = []
        settings = {key: value for key, value in SETTINGS.items() if key != "batch_size"}
        best = largest_throughput(profile, {**settings, "gpu_memory_bytes": gpu_bytes, **other}, tried.append)
        assert best.tried == tried
        for batch in tried:
            assert (batch.tokens_per_s is None) == (batch.most_tokens_per_s is None) == (batch.problem is not None)
            assert (batch.tokens_per_s or 0) <= (batch.most_tokens_per_s or 0)
        return best.solution.plan, tried, best.stopped

    def test_doubles_while_it_gains_and_memory_allows(self) -> None:
        # The update on the host takes as long for any batch, so that larger ones gain; 8 rows do not fit.
        profile = tiny_profile(2, micro_batches=(1, 2), cpu_params_per_s=20e6)
        plan, tried, stopped = self.search(profile, 40 * MB)
        assert [t.batch_size for t in tried] == [1, 2, 4, 8]
        rates = [t.tokens_per_s or 0.0 for t in tried]
        assert rates[0] * (1 + MIN_GAIN) < rates[1] < rates[2]
        assert tried[3].tokens_per_s is None
        assert "no plan fits" in (tried[3].problem or "")
        assert plan.batch_size == 4
        assert stopped == "it does not fit"
        assert plan.predicted is not None
        assert rates[2] == pytest.approx(4 * plan.seq_len / plan.predicted.step_s)

    def test_stops_where_twice_the_rows_gain_next_to_nothing(self) -> None:
        plan, tried, stopped = self.search(tiny_profile(2, micro_batches=(1, 2)), 1000 * MB)
        assert [t.batch_size for t in tried] == [1, 2]
        rates = [t.tokens_per_s or 0.0 for t in tried]
        assert rates[1] < rates[0] * (1 + MIN_GAIN)
        assert stopped.startswith("twice the rows make ")
        assert plan.batch_size == 1  # what a second row adds is not worth it

    def test_says_that_it_stops_within_the_gap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of two equally fast rows the bound of the second leaves room for 4 %."""
        profile = tiny_profile(2, micro_batches=(1, 2))

        def loosely(*args: Any, **settings: Any) -> Solution:
            found = solve(*args, **settings)
            report, step_s = found.plan.solver, found.timeline.step_s
            assert report is not None
            loose = report_with(report, step_s, step_s / 1.04, settings["gap"])
            return replace(found, plan=found.plan.model_copy(update={"solver": loose}))

        monkeypatch.setattr(batch_size, "solve", loosely)
        for gap, remedy in ((0.01, "a longer --time-limit"), (0.2, "a smaller --gap")):
            _, tried, stopped = self.search(profile, 1000 * MB, gap=gap)
            assert [t.batch_size for t in tried] == [1, 2]
            assert tried[1].most_tokens_per_s == pytest.approx(1.04 * (tried[1].tokens_per_s or 0))
            assert re.search(f"; that is within the gap, {remedy} may find up to [45][.0-9]* % more$", stopped)

    def test_twice_the_micro_batches_of_half_the_rows_are_a_plan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where a larger batch's search ends early, it is no slower than that; its gap is that of the plan taken."""
        profile = tiny_profile(2, micro_batches=(1,), cpu_params_per_s=20e6)

        def poorly(*args: Any, **settings: Any) -> Solution:
            found = solve(*args, **settings)
            slow = replace(found.timeline, step_s=2 * found.timeline.step_s)
            return found if settings["batch_size"] == 1 else replace(found, timeline=slow)

        monkeypatch.setattr(batch_size, "solve", poorly)
        plan, tried, _ = self.search(profile, 1000 * MB, **ON_HOST)
        assert plan.batch_size > 1
        single = solve(profile, gpu_memory_bytes=1000 * MB, **SETTINGS, **ON_HOST).plan
        assert plan.stages == single.stages
        timeline = simulate_plan(plan, profile)
        assert plan.predicted is not None
        assert plan.solver is not None
        assert timeline.step_s == plan.predicted.step_s == plan.solver.objective_s
        assert plan.solver.gap == pytest.approx(1 - plan.solver.bound_s / timeline.step_s)
        assert plan.solver.status == ("optimal" if plan.solver.gap <= 0.01 else "feasible")
        assert next(t for t in tried if t.batch_size == plan.batch_size).tokens_per_s == pytest.approx(
            plan.batch_size * plan.seq_len / timeline.step_s
        )

    def test_ctrl_c_ends_it_with_what_was_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        profile = tiny_profile(2, micro_batches=(1, 2), cpu_params_per_s=20e6)

        def interrupted_at(size: int, anything_found: bool) -> Callable[..., Solution]:
            def solving(*args: Any, **settings: Any) -> Solution:
                if settings["batch_size"] == size and not anything_found:
                    raise KeyboardInterrupt
                return replace(solve(*args, **settings), interrupted=settings["batch_size"] == size)

            return solving

        monkeypatch.setattr(batch_size, "solve", interrupted_at(2, anything_found=True))
        plan, tried, stopped = self.search(profile, 1000 * MB, **ON_HOST)
        assert ([t.batch_size for t in tried], plan.batch_size, stopped) == ([1, 2], 2, "interrupted")
        monkeypatch.setattr(batch_size, "solve", interrupted_at(2, anything_found=False))
        plan, tried, stopped = self.search(profile, 1000 * MB, **ON_HOST)
        assert ([t.batch_size for t in tried], plan.batch_size, stopped) == ([1], 1, "interrupted")
        monkeypatch.setattr(batch_size, "solve", interrupted_at(1, anything_found=False))
        with pytest.raises(KeyboardInterrupt):
            self.search(profile, 1000 * MB, **ON_HOST)

    def test_the_largest_batch_has_no_more_passes_than_a_step_may(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a model of very many blocks a step has few micro-batches."""
        profile = tiny_profile(2, micro_batches=(1, 2), cpu_params_per_s=20e6)
        monkeypatch.setattr(batches, "MAX_PASSES", 2 * len(profile.stages))
        _, tried, stopped = self.search(profile, 1000 * MB, **ON_HOST)
        assert [t.batch_size for t in tried] == [1, 2, 4]
        assert stopped == "it is the largest that is tried"

    def test_not_even_the_smallest_fits(self) -> None:
        with pytest.raises(InfeasibleError):
            self.search(tiny_profile(2), 20 * MB)

    def test_micro_batches_that_are_no_powers_of_two(self) -> None:
        _, tried, _ = self.search(tiny_profile(2, micro_batches=(2, 3)), 1000 * MB)
        assert [t.batch_size for t in tried] == [2, 3, 4]

    def test_a_profile_without_figures_is_refused(self) -> None:
        profile = tiny_profile(2)
        bare = profile.model_copy(update={"links": {**profile.links, "h2d": Curve(reason="no time")}})
        with pytest.raises(UsageError, match=r"links\.h2d: not measured"):
            self.search(bare, 1000 * MB)
