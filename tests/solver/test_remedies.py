"""Every remedy of an infeasible problem works, is named so that it can be taken, and is hardly more than needed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazysched.errors import (
    FewerPins,
    InfeasibleError,
    MoreMemory,
    SmallerBatch,
    SmallerState,
    TimeLimitError,
    UsageError,
)
from lazysched.schemas import Profile, Rate, StateFormat, Update
from lazysched.solver import Solution, infeasible, solve
from lazysched.solver.highs import Outcome
from lazysched.solver.instance import Instance
from lazysched.solver.memory_remedies import NUM_FIGURES
from lazysched.solver.options import EVERYTHING, EXECUTABLE
from lazysched.solver.remedies import explain
from lazysched.units import parse_bytes
from tests.solver.synthetic import CARD, SHAPE_3B, large_profile, tiny_profile
from tests.solver.test_file_plans import FAST, with_files

MB = 1_000_000
GB = 1000 * MB
LESS = 0.99
"""Of what a remedy adds, too little: rounding up and HiGHS' gap add less than what is left out."""
CAUGHT_BYTES = 20_000
"""A shortage below it drowns in the margins."""


@dataclass(frozen=True)
class Asked:
    """Arguments of ``solve`` that decide whether a plan fits."""

    profile: Profile
    batch_size: int
    gpu_memory_bytes: int
    host_memory_bytes: int
    optimizer_state: StateFormat = "hybrid8"
    nvme_bytes: int = 0
    executable_only: bool = True
    pins: tuple[str, ...] = ()

    def solve(self) -> Solution:
        return solve(**{**vars(self), "time_limit_s": 5})

    def refused(self) -> InfeasibleError:
        with pytest.raises(InfeasibleError) as caught:
            self.solve()
        return caught.value


def parsed(asked: Asked, message: str) -> list[dict[str, Any]]:
    """Changed arguments of every remedy in ``message``, as a person would read them; once for sums, once for flags."""
    found: list[dict[str, Any]] = []
    for text in message.partition("memory: ")[2].partition("; with more ")[0].split(", or "):
        if pins := re.findall(r"--pin (\S+)", text):
            found.append({"pins": tuple(pin for pin in asked.pins if pin not in pins)})
        elif batch := re.fullmatch(rf"batch (\d+) instead of {asked.batch_size}", text):
            found.append({"batch_size": int(batch.group(1))})
        elif state := re.fullmatch(r"optimizer state (\w+) instead of fp32", text):
            found.append({"optimizer_state": state.group(1)})
        else:
            sums = re.findall(r"\+([\d.]+ \w+) (gpu|host|nvme)", text)
            flags = re.findall(r"--(gpu-memory|host-memory|nvme) ([\d.]+\w+)", text)
            assert len(sums) == len(flags) > 0, text
            before = vars(asked)
            other = {"executable_only": False} if "--not-executable" in text else {}
            names = {"gpu": "gpu_memory_bytes", "host": "host_memory_bytes", "nvme": "nvme_bytes"}
            found.append(other | {names[tier]: before[names[tier]] + parse_bytes(size) for size, tier in sums})
            found.append(other | {f"{flag.replace('-', '_')}_bytes": parse_bytes(size) for flag, size in flags})
    return found


def keeps(solution: Solution, asked: Asked) -> bool:
    """Whether the plan stays within what was asked for."""
    budgets = {"gpu": asked.gpu_memory_bytes, "host": asked.host_memory_bytes, "nvme": asked.nvme_bytes}
    return all(peak <= budgets[tier] for tier, peak in solution.timeline.peak_bytes.items())


def with_less(asked: Asked, change: Mapping[str, Any], name: str) -> Asked | None:
    """``asked`` with a hundredth less of what the remedy adds to one budget; None where that is next to nothing."""
    before = vars(asked)[name]
    if (change[name] - before) * (1 - LESS) < CAUGHT_BYTES:
        return None
    return replace(asked, **{**change, name: before + int((change[name] - before) * LESS)})


def check_all(asked: Asked, error: InfeasibleError) -> None:
    for change in parsed(asked, str(error)):
        remedied = replace(asked, **change)
        assert keeps(remedied.solve(), remedied), change
        for name in change:
            less = with_less(asked, change, name) if name.endswith("_bytes") else None
            if less is not None:
                less.refused()


@settings(max_examples=5, deadline=None)
@given(
    gpu=st.integers(5, 60), host=st.integers(1, 60), batch=st.sampled_from([1, 2, 6]), tied=st.booleans(),
    state=st.sampled_from(["hybrid8", "fp32"]), saved=st.integers(1, 20),
)  # fmt: skip
def test_remedies_work_and_less_does_not(
    gpu: int, host: int, batch: int, tied: bool, state: StateFormat, saved: int
) -> None:
    profile = tiny_profile(2, micro_batches=(1, 2), tied=tied, saved_bytes=saved * MB)
    asked = Asked(profile, batch, gpu * MB, host * MB, state)
    try:
        asked.solve()
    except InfeasibleError as refused:
        error = refused
    else:
        return
    assert error.remedies
    check_all(asked, error)


def test_one_tier_that_helps_alone() -> None:
    asked = Asked(tiny_profile(3), 1, 30 * MB, 1 * GB)
    error = asked.refused()
    assert [type(remedy) for remedy in error.remedies] == [MoreMemory]
    remedy = error.remedies[0]
    assert isinstance(remedy, MoreMemory)
    assert error.missing_bytes == {"gpu": remedy.gpu_bytes}
    assert remedy.host_bytes == 0
    assert len(str(remedy.gpu_bytes).rstrip("0")) <= NUM_FIGURES
    assert "host-memory" not in str(error)


def test_both_together_where_neither_helps_alone() -> None:
    # The host always holds a batch, 256 bytes; the GPU a working set.
    asked = Asked(tiny_profile(3), 1, 2 * MB, 100)
    error = asked.refused()
    (remedy,) = error.remedies
    assert isinstance(remedy, MoreMemory)
    assert min(remedy.gpu_bytes, remedy.host_bytes) > 0
    assert error.missing_bytes == {}
    assert re.search(r"\+[\d.]+ MB gpu and \+[\d.]+ .?B host \(--gpu-memory \S+ --host-memory \S+\)", str(error))
    check_all(asked, error)


def with_memory(gpu_bytes: int, host_bytes: int, **changes: object) -> Profile:
    """Three blocks on a machine of so much memory; 61.17 MB of the GPU suffice with 10 MB of the host, 50.17 MB of the
    host with 40 MB of the GPU."""
    total_bytes = {"gpu": gpu_bytes, "host": host_bytes}
    return tiny_profile(3).model_copy(update={"total_bytes": total_bytes, **changes})


class TestBeyondTheMachine:
    def test_what_the_machine_has_is_a_remedy(self) -> None:
        error = Asked(with_memory(61_170_000, 50_170_000), 1, 40 * MB, 10 * MB).refused()
        assert [type(remedy) for remedy in error.remedies] == [MoreMemory, MoreMemory]
        assert "has" not in str(error)

    @pytest.mark.parametrize(
        ("gpu_bytes", "host_bytes", "told"),
        [
            (61_169_999, 1 * GB, "with more gpu memory alone it would take 61.2 MB of gpu, and the GPU has 61.2 MB"),
            (1 * GB, 50_169_999, "with more host memory alone it would take 50.2 MB of host, and the host has 50.2 MB"),
        ],
    )
    def test_what_it_has_not_is_told_and_is_none(self, gpu_bytes: int, host_bytes: int, told: str) -> None:
        asked = Asked(with_memory(gpu_bytes, host_bytes), 1, 40 * MB, 10 * MB)
        error = asked.refused()
        assert len(error.remedies) == 1
        assert str(error).endswith(f"; {told}")
        assert set(error.missing_bytes) == {"gpu", "host"}
        check_all(asked, error)

    def test_all_of_the_gpu_and_some_of_the_host(self) -> None:
        asked = Asked(with_memory(45 * MB, 1 * GB), 1, 30 * MB, 10 * MB)
        error = asked.refused()
        (remedy,) = error.remedies
        assert isinstance(remedy, MoreMemory)
        assert (remedy.gpu_bytes, remedy.host_bytes) == (15 * MB, 20_100_000)
        assert "+15 MB gpu and +20.1 MB host (--gpu-memory 45MB --host-memory 30.1MB); with more gpu" in str(error)
        for change in parsed(asked, str(error)):
            remedied = replace(asked, **change)
            assert keeps(remedied.solve(), remedied)

    def test_what_is_printed_is_not_beyond_it_either(self) -> None:
        asked = Asked(with_memory(45_678_901, 1 * GB), 1, 30_000_500, 10 * MB)
        sums, flags = parsed(asked, str(asked.refused()))
        assert 45_600_000 < sums["gpu_memory_bytes"] <= flags["gpu_memory_bytes"] <= 45_678_901

    def test_nothing_where_all_of_it_is_too_little(self) -> None:
        error = Asked(with_memory(31 * MB, 50 * MB), 1, 30 * MB, 10 * MB).refused()
        assert error.remedies == ()
        refusal, told = str(error).split("; ")
        assert refusal == "no plan fits 30 MB of gpu and 10 MB of host memory"
        assert told == "with more gpu memory alone it would take 61.2 MB of gpu, and the GPU has 31 MB"

    def test_nothing_where_the_rest_is_beyond_the_other(self) -> None:
        assert Asked(with_memory(45 * MB, 30_099_000), 1, 30 * MB, 10 * MB).refused().remedies == ()
        assert Asked(with_memory(45 * MB, 30_100_000), 1, 30 * MB, 10 * MB).refused().remedies

    def test_both_beyond(self) -> None:
        error = Asked(with_memory(3 * MB, 1 * GB), 1, 2 * MB, 100).refused()
        assert error.remedies == ()
        told = r"; with more gpu and host memory it would take \S+ MB of gpu and \S+ \w+ of host, and the GPU has 3 MB$"
        assert re.search(told, str(error))

    def test_without_a_gpu_it_is_one_memory(self) -> None:
        """Of which 69.2 MB suffice where both tiers grow."""
        asked = Asked(with_memory(38 * MB, 32 * MB, device="cpu"), 1, 40 * MB, 10 * MB)
        error = asked.refused()
        (remedy,) = error.remedies
        assert isinstance(remedy, MoreMemory)
        assert min(remedy.gpu_bytes, remedy.host_bytes) > 0
        assert "61.2 MB of gpu, and the machine has 70 MB" in str(error)
        check_all(asked, error)
        assert replace(asked, profile=with_memory(38 * MB, 31 * MB, device="cpu")).refused().remedies == ()

    def test_a_budget_beyond_it_means_another_machine(self) -> None:
        error = Asked(with_memory(39 * MB, 1 * GB), 1, 40 * MB, 10 * MB).refused()
        assert len(error.remedies) == 2

    def test_the_host_of_an_estimate_is_an_assumption(self) -> None:
        error = Asked(with_memory(1 * GB, 20 * MB, estimated=True), 1, 40 * MB, 10 * MB).refused()
        assert len(error.remedies) == 2


class TestPins:
    PINS = ("block[0].state=gpu", "block[1].state=gpu", "head.weights=host")

    def asked(self, gpu_memory_bytes: int, *pins: str) -> Asked:
        return Asked(tiny_profile(3, block_params=10_000_000), 1, gpu_memory_bytes, 1 * GB, pins=pins)

    def least_bytes(self, *pins: str) -> int:
        return 1 * MB + self.asked(1 * MB, *pins).refused().missing_bytes["gpu"]

    def test_the_one_that_is_in_the_way(self) -> None:
        asked = self.asked(self.least_bytes(self.PINS[0]), *self.PINS)
        error = asked.refused()
        assert error.remedies[1:] == (FewerPins((self.PINS[0],)),)
        assert str(error).endswith(", or drop --pin block[0].state=gpu")
        check_all(asked, error)

    def test_those_that_are_where_one_is_not_enough(self) -> None:
        asked = self.asked(self.least_bytes(), *self.PINS)
        error = asked.refused()
        assert error.remedies[1:] == (FewerPins(self.PINS[:2]),)
        assert str(error).endswith(", or drop --pin block[0].state=gpu and --pin block[1].state=gpu")
        check_all(asked, error)

    def test_none_where_nothing_fits_without_them_either(self) -> None:
        error = self.asked(1 * MB, *self.PINS).refused()
        assert not any(isinstance(remedy, FewerPins) for remedy in error.remedies)
        assert "--pin" not in str(error)


class TestBatch:
    def asked(self, gpu_memory_bytes: int) -> Asked:
        # Every row of a step adds hidden states; a micro-batch of 5 rows has a working set of its own.
        profile = tiny_profile(2, micro_batches=(3, 5))
        return Asked(profile, 30, gpu_memory_bytes, 1 * GB)

    def test_it_is_the_largest_of_any_micro_batch(self) -> None:
        whole = self.asked(1 * GB)
        sizes = sorted({m * k for m in (3, 5) for k in range(1, 10)} | {30})
        least = {}
        for size in sizes:
            asked = replace(whole, batch_size=size, gpu_memory_bytes=1 * MB)
            least[size] = 1 * MB + asked.refused().missing_bytes["gpu"]
        for budget in (least[9], least[20], least[25], (least[12] + least[15]) // 2):
            asked = replace(whole, gpu_memory_bytes=budget)
            if least[30] <= budget:
                continue
            expected = max(size for size in sizes if least[size] <= budget)
            assert SmallerBatch(expected) in asked.refused().remedies

    def test_none_is_listed_where_even_one_micro_batch_is_too_much(self) -> None:
        error = self.asked(1 * MB).refused()
        assert not any(isinstance(remedy, SmallerBatch) for remedy in error.remedies)
        assert "batch" not in str(error)


class TestState:
    def asked(self, **changes: Any) -> Asked:
        return replace(Asked(tiny_profile(3), 1, 1 * GB, 1 * GB, "fp32"), **changes)

    def tight(self) -> Asked:
        """Enough for hybrid8 alone."""
        small = self.asked(optimizer_state="hybrid8", gpu_memory_bytes=20 * MB, host_memory_bytes=20 * MB)
        return replace(small, gpu_memory_bytes=20 * MB + small.refused().missing_bytes["gpu"], optimizer_state="fp32")

    def test_hybrid8_where_it_suffices(self) -> None:
        error = self.tight().refused()
        assert SmallerState("hybrid8") in error.remedies
        assert "optimizer state hybrid8 instead of fp32" in str(error)

    def test_not_where_it_does_not(self) -> None:
        error = self.asked(gpu_memory_bytes=10 * MB, host_memory_bytes=10 * MB).refused()
        assert SmallerState("hybrid8") not in error.remedies

    def test_not_where_its_update_was_not_measured(self) -> None:
        asked = self.tight()
        update = {
            **asked.profile.update,
            "cpu": {"fp32": asked.profile.update["cpu"]["fp32"], "hybrid8": Rate(per_s=None, reason="no compiler")},
        }
        asked = replace(asked, profile=asked.profile.model_copy(update={"update": update}))
        with pytest.raises(UsageError):
            replace(asked, optimizer_state="hybrid8").solve()
        assert SmallerState("hybrid8") not in asked.refused().remedies


class TestFiles:
    def asked(self, **changes: Any) -> Asked:
        return replace(Asked(with_files(tiny_profile(3), FAST), 1, 40 * MB, 48 * MB), **changes)

    def of_files(self, asked: Asked) -> list[MoreMemory]:
        return [r for r in asked.refused().remedies if isinstance(r, MoreMemory) and r.nvme_bytes]

    def remedied(self, asked: Asked, error: InfeasibleError) -> dict[str, Any]:
        """Enough as a sum and as a flag, which say the same here."""
        (change, again) = [change for change in parsed(asked, str(error)) if "nvme_bytes" in change]
        assert again["nvme_bytes"] == pytest.approx(change["nvme_bytes"], rel=1e-3)
        remedied = replace(asked, **change)
        assert keeps(remedied.solve(), remedied)
        return change

    def test_a_plan_to_look_at_where_the_runtime_executes_none(self) -> None:
        asked = self.asked()
        error = asked.refused()
        (remedy,) = self.of_files(asked)
        assert not remedy.executable
        assert "nvme" not in error.missing_bytes
        assert "--not-executable, only to look at: the runtime does not execute files yet)" in str(error)
        self.remedied(asked, error)

    def test_more_of_them_where_they_are_allowed(self) -> None:
        asked = self.asked(nvme_bytes=2 * MB, executable_only=False)
        error = asked.refused()
        (remedy,) = self.of_files(asked)
        assert remedy.executable
        assert error.missing_bytes["nvme"] == remedy.nvme_bytes
        assert "40 MB of gpu, 48 MB of host and 2 MB of nvme memory" in str(error)
        assert "--not-executable" not in str(error)
        less = with_less(asked, self.remedied(asked, error), "nvme_bytes")
        assert less is not None
        less.refused()

    def test_nothing_to_look_at_once_the_runtime_executes_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("solve", "memory_remedies"):
            monkeypatch.setattr(import_module(f"lazysched.solver.{module}"), "EXECUTABLE", EVERYTHING)
        asked = self.asked()
        error = asked.refused()
        (remedy,) = self.of_files(asked)
        assert remedy.executable
        assert error.missing_bytes["nvme"] == remedy.nvme_bytes
        assert "--not-executable" not in str(error)
        remedied = replace(asked, nvme_bytes=remedy.nvme_bytes)
        assert keeps(remedied.solve(), remedied)

    def test_not_where_they_do_not_help_or_are_not_measured(self) -> None:
        assert self.of_files(self.asked(host_memory_bytes=30 * MB)) == []
        assert self.of_files(self.asked(profile=tiny_profile(3))) == []


def test_limited_page_locking_is_kept_in_mind() -> None:
    profile = tiny_profile(3).model_copy(update={"pin_limit_bytes": 20 * MB})
    links = {**profile.links, "h2d_pageable": profile.links["h2d"], "d2h_pageable": profile.links["d2h"]}
    asked = Asked(profile.model_copy(update={"links": links}), 1, 30 * MB, 10 * MB)
    check_all(asked, asked.refused())


def test_a_large_model() -> None:
    profile = large_profile(SHAPE_3B, CARD, 32, micro_batches=(1, 4))
    asked = Asked(profile, 16, 5 * GB, 24 * GB)
    error = asked.refused()
    for remedy in error.remedies:
        assert not isinstance(remedy, SmallerState)
    check_all(asked, error)


class TestWithoutTime:
    """On a busy machine HiGHS may find nothing at all within its seconds."""

    @pytest.fixture(autouse=True)
    def _highs_finds_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        none = Outcome("time_limit", math.inf, 0.0)
        monkeypatch.setattr(infeasible, "solve_problem", lambda *_, **__: none)

    def test_remedies_are_found_and_work(self) -> None:
        asked = Asked(large_profile(SHAPE_3B, CARD, 32, micro_batches=(1, 4)), 16, 5 * GB, 24 * GB)
        error = asked.refused()
        assert error.missing_bytes
        for change in parsed(asked, str(error)):
            remedied = replace(asked, **change)
            assert keeps(remedied.solve(), remedied), change

    def test_what_a_larger_batch_needs_suffices_for_a_smaller_one(self) -> None:
        asked = Asked(large_profile(SHAPE_3B, CARD, 32, micro_batches=(1, 4)), 16, 5 * GB, 24 * GB)
        missing = [replace(asked, batch_size=size).refused().missing_bytes for size in (8, 12, 16)]
        for less, more in pairwise(missing):
            assert set(more) <= set(less)
            assert all(less[tier] <= more[tier] * 1.01 for tier in more)

    def test_it_is_not_said_that_nothing_fits_where_that_is_not_certain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(infeasible, "nearest", lambda *_: None)
        profile = tiny_profile(3)
        problem = infeasible.Question(
            profile, 1, {"gpu": 1 * GB, "host": 1 * GB, "nvme": 0}, "hybrid8", EXECUTABLE.without_files(),
            lambda candidate, form, scope, pins: Instance(profile, candidate, form, Update(), pins, scope), 0,
        )  # fmt: skip
        sought = infeasible.fitting(problem)
        assert sought.nearest is None
        assert not sought.proven
        assert isinstance(explain(problem, sought.proven), TimeLimitError)
