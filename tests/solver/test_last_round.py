"""The last round: which changes it tries, what it makes of a bad plan, and that budgets, pins and time hold."""

from __future__ import annotations

import pytest

from lazysched.schemas import Profile, Update
from lazysched.solver.choice_batch import ChoiceBatch
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.judge import Judge, Judged
from lazysched.solver.last_round import MAX_FAILURES, groups, improved, single_changes
from lazysched.solver.measured import offload_limits
from lazysched.solver.options import EVERYTHING, EXECUTABLE, LENGTHS, Scope, StateChoice
from lazysched.solver.pins import parse_pins
from lazysched.solver.plans import Choices, Found
from lazysched.solver.space import Settings, Space
from lazysched.solver.stopwatch import always
from lazysched.solver.window_replay import WindowReplay
from tests.solver.random_instances import with_two_structures
from tests.solver.synthetic import tiny_profile

MB = 10**6
PROFILE = tiny_profile(6)
KEPT, INPUT_ONLY = 0, 1
"""Save options of the tiny profile where nothing leaves for the host."""


def judge_of(gpu_bytes: int, *pins: str, profile: Profile = PROFILE, scope: Scope = EXECUTABLE) -> Judge:
    settings = Settings(
        profile, 1, {"gpu": gpu_bytes, "host": 1000 * MB, "nvme": 0}, ("pinned",), Update(), "hybrid8",
        parse_pins(pins, profile.stages), scope.without_files(), 10.0, 0.01, 0,
    )  # fmt: skip
    return Judge(Space(settings))


def judged(judge: Judge, choices: Choices) -> Judged:
    return judge.simulated(Found(Candidate(1, 1), choices, 0.0))


def recomputing(num_blocks: int = 6) -> Choices:
    """The slowest plan that there is: everything streamed and recomputed."""
    return Choices(("streamed",) * num_blocks, (INPUT_ONLY,) * num_blocks, 0)


def _first_on_gpu(others: StateChoice) -> tuple[StateChoice, ...]:
    return ("gpu", others, others, others, others, others)


class TestChanges:
    def test_every_change_of_one_block_and_of_the_vocabulary_is_there(self) -> None:
        instance = Instance(PROFILE, Candidate(1, 1), "hybrid8", Update())
        batch = single_changes(instance, recomputing())
        found = {batch.choices(k) for k in range(len(batch.vocabulary))}
        assert len(found) == len(batch.vocabulary)
        for i in range(6):
            saves = [INPUT_ONLY] * 6
            saves[i] = KEPT
            assert Choices(("streamed",) * 6, tuple(saves), 0) in found
            states = ["streamed"] * 6
            states[i] = "gpu"
            assert Choices(tuple(states), (INPUT_ONLY,) * 6, 0) in found  # type: ignore[arg-type]
        vocabulary = {choices.vocabulary for choices in found}
        assert vocabulary == set(range(len(instance.vocabulary_options)))
        assert recomputing() not in found

    def test_each_changes_one_decision(self) -> None:
        instance = Instance(
            PROFILE, Candidate(1, 1, offload_limit_bytes=offload_limits(PROFILE, 1)[-1]), "hybrid8", Update()
        )
        start = Choices(("gpu", "gpu", "resident", "streamed", "streamed", "streamed"), (0, 0, 1, 1, 1, 0), 1)
        batch = single_changes(instance, start)
        before = ChoiceBatch.of([start])
        saves, states = (batch.saves != before.saves).any(1), (batch.states != before.states).any(1)
        assert ((saves.astype(int) + states + (batch.vocabulary != 1)) == 1).all()

    def test_groups_are_aligned_neighbours_runs_and_kinds(self) -> None:
        instance = Instance(PROFILE, Candidate(1, 1), "hybrid8", Update())
        found = groups(instance, Choices(("gpu",) * 3 + ("streamed",) * 2 + ("gpu",), (0,) * 6, 0))
        assert {(0,), (5,), (0, 1), (2, 3), (4, 5), (0, 1, 2, 3)} <= set(found)
        assert {(0, 1, 2), (3, 4), (5,), (0, 1, 2, 5)} <= set(found)
        assert len(found) == len(set(found))

    def test_segments_are_changed_as_a_whole(self) -> None:
        candidate = Candidate(1, 1, segments=LENGTHS)
        instance = Instance(PROFILE, candidate, "hybrid8", Update(), (), EVERYTHING.without_files())
        alone = tuple(next(k for k, o in enumerate(options) if o.segment == 1) for options in instance.saves)
        batch = single_changes(instance, Choices(("gpu",) * 6, alone, 0))
        whole = batch.rows(WindowReplay(instance).whole(batch))
        assert len(whole.vocabulary) < len(batch.vocabulary)
        lengths = {
            tuple(options[k].segment for options, k in zip(instance.saves, row, strict=True)) for row in whole.saves
        }
        assert {(2, 2, 1, 1, 1, 1), (1, 1, 2, 2, 1, 1), (4, 4, 4, 4, 1, 1)} <= lengths
        assert (4, 4, 1, 1, 1, 1) not in lengths

    def test_no_group_mixes_structures_or_what_is_pinned_otherwise(self) -> None:
        mixed = Instance(with_two_structures(PROFILE), Candidate(1, 1), "hybrid8", Update())
        pinned = Instance(
            PROFILE, Candidate(1, 1), "hybrid8", Update(), parse_pins(["block[::2].state=host"], PROFILE.stages)
        )
        for instance in (mixed, pinned):
            states = tuple(options[0] for options in instance.states)
            assert {i % 2 for group in groups(instance, Choices(states, (0,) * 6, 0)) for i in group} == {0, 1}
            assert all(len({i % 2 for i in group}) == 1 for group in groups(instance, Choices(states, (0,) * 6, 0)))


class TestImproved:
    def test_with_plenty_of_memory_nothing_waits_and_nothing_is_recomputed(self) -> None:
        judge = judge_of(1000 * MB)
        best = improved(judge, judged(judge, recomputing()), always)
        assert set(best.found.choices.saves) == {KEPT}
        # embedding 1 + 1, blocks 6 * (10 + 20), head 15 ms; updates and norms on the GPU take microseconds
        assert best.timeline.step_s == pytest.approx(0.197, rel=0.01)

    @pytest.mark.parametrize("extra_mb", [12, 25, 60])
    def test_budgets_hold_and_nothing_gets_slower(self, extra_mb: int) -> None:
        least = judged(judge_of(1000 * MB), recomputing()).timeline.peak_bytes["gpu"]
        judge = judge_of(least + extra_mb * MB)
        start = judged(judge, recomputing())
        best = improved(judge, start, always)
        assert best.timeline.peak_bytes["gpu"] <= least + extra_mb * MB
        assert best.timeline.step_s < start.timeline.step_s
        assert improved(judge, best, always) is best

    def test_what_exceeds_a_budget_in_the_simulation_is_not_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        judge = judge_of(1000 * MB)
        start = judged(judge, recomputing())
        monkeypatch.setattr(judge, "over_budget", lambda _: {"gpu": 1})
        assert improved(judge, start, always) is start

    def test_another_depth_and_lag(self) -> None:
        """Three blocks in a row send 21 MB each, which takes as long as three forwards: slots are what is missing."""
        profile = tiny_profile(6, link_bytes_per_s=0.7e9)
        pins = (
            "block[:3].save=all", "block[:3].input_tier=host", "block[:3].saved_tiers=host", "block[3:].save=input",
            "block[3:].input_tier=gpu",
        )  # fmt: skip
        judge = judge_of(1000 * MB, *pins, "block.state=gpu", profile=profile)
        candidate = Candidate(1, 1, offload_limit_bytes=offload_limits(profile, 1)[-1])
        start = judge.simulated(Found(candidate, Choices(("gpu",) * 6, (0,) * 6, 0), 0.0))
        best = improved(judge, start, always)
        assert (best.plan.prefetch_depth, best.plan.d2h_lag) == (2, 2)
        assert best.timeline.step_s < start.timeline.step_s * 0.95

    def test_of_equally_fast_plans_the_one_that_moves_less_is_taken(self) -> None:
        """Uploads of five blocks' weights hide behind compute here, but there is room to keep these."""
        judge = judge_of(900 * MB)
        kept, streamed = _first_on_gpu("resident"), _first_on_gpu("streamed")
        start = judged(judge, Choices(streamed, (KEPT,) * 6, 0))
        end = improved(judge, start, always)
        assert end.found.choices == Choices(kept, (KEPT,) * 6, 0)
        assert end.timeline.step_s == start.timeline.step_s
        assert sum(end.timeline.moved_bytes.values()) < sum(start.timeline.moved_bytes.values())

    def test_no_part_of_a_segment_is_left(self) -> None:
        least = judged(judge_of(1000 * MB), recomputing()).timeline.peak_bytes["gpu"]
        judge = judge_of(least + 30 * MB, scope=EVERYTHING)
        candidate = Candidate(1, 1, segments=LENGTHS)
        instance = judge.space.instance(candidate)
        pairs = tuple(
            next(k for k, o in enumerate(options) if (o.variant.name, o.segment) == ("input", 2))
            for options in instance.saves
        )
        start = judge.simulated(Found(candidate, Choices(("streamed",) * 6, pairs, 0), 0.0))
        best = improved(judge, start, always)
        assert best.timeline.step_s < start.timeline.step_s
        assert WindowReplay(instance).whole(ChoiceBatch.of([best.found.choices])).all()

    def test_where_no_other_depth_fits(self) -> None:
        candidate = Candidate(1, 1, segments=LENGTHS)
        roomy = judge_of(1000 * MB, scope=EVERYTHING)
        fours = Choices(("streamed",) * 6, (1,) * 6, 0)
        start = roomy.simulated(Found(candidate, fours, 0.0))
        judge = judge_of(start.timeline.peak_bytes["gpu"] + 1000, scope=EVERYTHING)
        best = improved(judge, judge.simulated(Found(candidate, fours, 0.0)), always)
        assert best.timeline.step_s <= start.timeline.step_s

    def test_pins_hold(self) -> None:
        judge = judge_of(1000 * MB, "block[1:3].save=input", "block[4].state=host")
        instance = judge.space.instance(Candidate(1, 1))
        start = Choices(
            tuple(options[-1] for options in instance.states), tuple(len(own) - 1 for own in instance.saves), 0
        )
        best = improved(judge, judged(judge, start), always)
        assert [best.plan.stages[f"block.{i}"].save for i in range(6)] == ["all", "input", "input", "all", "all", "all"]
        assert best.plan.stages["block.4"].state == "host"

    def test_the_same_again(self) -> None:
        found = []
        for _ in range(2):
            judge = judge_of(90 * MB)
            found.append(improved(judge, judged(judge, recomputing()), always).found)
        assert found[0] == found[1]

    def test_it_stops_when_time_is_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        judge = judge_of(1000 * MB)
        start = judged(judge, recomputing())
        calls: list[Found] = []
        simulated = judge.simulated
        monkeypatch.setattr(judge, "simulated", lambda found: calls.append(found) or simulated(found))
        assert improved(judge, start, lambda: False) is start
        assert calls == []
        best = improved(judge, start, lambda: not calls)
        assert len(calls) == 1
        assert best.timeline.step_s < start.timeline.step_s

    def test_it_stops_among_changes_that_gain_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        judge = judge_of(1000 * MB)
        start = judged(judge, recomputing())
        calls: list[Found] = []
        monkeypatch.setattr(judge, "simulated", lambda found: calls.append(found) or start)
        assert improved(judge, start, lambda: len(calls) < 2) is start
        assert len(calls) == 2
        assert improved(judge, start, always) is start
        assert len(calls) == 2 + MAX_FAILURES + 2  # the last two move less
