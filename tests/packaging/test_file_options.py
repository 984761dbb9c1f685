"""``solve --nvme-dir DIR --nvme SIZE --not-executable``: what is refused, what is said, and what the plan may use."""

from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from lazysched import file_options
from lazysched.cli import main
from lazysched.errors import UsageError
from lazysched.schemas import Plan
from lazysched.schemas.executable import check_executable
from tests.packaging.test_cli import refused
from tests.solver.synthetic import tiny_profile
from tests.solver.test_file_plans import FAST, with_files

SOLVE = ["solve", "profile.json", "--gpu-memory", "40MB", "-o", "plan.json", "--time-limit", "5"]
TIGHT = ["--batch-size", "1", "--host-memory", "48MB"]
ROOMY = ["--batch-size", "1", "--host-memory", "1GB"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1))
    (tmp_path / "disk").mkdir()
    with_files(tiny_profile(3), FAST).save("profile.json")
    return tmp_path


def words(text: str) -> str:
    return " ".join(text.split())


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (["--nvme", "lots"], "--nvme: 'lots' is not a size"),
            (["--nvme-dir", "disk"], "--nvme-dir: disk: how much of it may be used is missing; add for example --nvme"),
            (["--nvme-dir", "disk", "--nvme", "0"], "--nvme-dir: disk: how much of it may be used is missing"),
            (["--nvme-dir", "absent", "--nvme", "1GB"], "--nvme-dir: absent: no such folder; make it first"),
            (["--nvme-dir", "profile.json", "--nvme", "1GB"], "--nvme-dir: profile.json: no such folder"),
            (["--nvme-dir", "disk", "--nvme", "9000TB"], "are free in disk; give less, make room"),
            (["--nvme", "1GB", "--sweep", "nvme=0:1GB:1GB", "--not-executable"], "--nvme: means nothing where --sweep"),
            (["--sweep", "nvme=0:1GB:1GB"], "--sweep: nvme: the runtime does not execute files yet"),
            (
                ["--sweep", "nvme=0:9000TB:3000TB", "--nvme-dir", "disk", "--not-executable"],
                "--nvme: 9e+03 TB is more than the",
            ),
            (["--nvme", "9000000000TB", "--not-executable"], "nvme_memory: 1e21 or more bytes is no budget"),
        ],
    )
    def test_of_arguments(self, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
        before = sorted(Path().iterdir())
        assert line in refused(capsys, [*SOLVE, *ROOMY, *arguments])
        assert sorted(Path().iterdir()) == before

    def test_of_a_folder_that_cannot_be_written(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refusing = SimpleNamespace(access=lambda path, mode: False, W_OK=os.W_OK, X_OK=os.X_OK)
        monkeypatch.setattr(file_options, "os", refusing)
        line = refused(capsys, [*SOLVE, *ROOMY, "--nvme-dir", "disk", "--nvme", "1MB"])
        assert line == "error: --nvme-dir: disk: cannot be written; name a folder you may write"

    def test_of_a_profile_without_figures_of_files(self, capsys: pytest.CaptureFixture[str]) -> None:
        tiny_profile(3).save("profile.json")
        line = refused(capsys, [*SOLVE, *ROOMY, "--nvme", "1GB", "--not-executable"])
        assert "profile: links.nvme_read: not measured (missing); profile again with --storage" in line

    def test_of_an_estimate_without_them(self, capsys: pytest.CaptureFixture[str]) -> None:
        tiny_profile(3).model_copy(update={"estimated": True}).save("profile.json")
        line = refused(capsys, [*SOLVE, *ROOMY, "--nvme", "1GB", "--not-executable"])
        assert line.endswith("write it into a hardware file of yours")

    def test_exactly_what_is_free_is_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
        asked = file_options.file_settings("5kB", Path("disk"), True, None)
        assert asked == {"nvme_bytes": 5000, "executable_only": False}
        with pytest.raises(UsageError, match="more than the 5 kB that are free"):
            file_options.file_settings("5001B", Path("disk"), True, None)


def test_a_plan_that_can_run_has_no_files_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SOLVE, *ROOMY, "--nvme", "1GB", "--nvme-dir", "disk"]) == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.startswith("warning: --nvme 1 GB: the runtime does not execute files yet, so this plan uses none")
    assert "train refuses" not in said.out
    plan = Plan.load("plan.json")
    assert plan.budget_bytes["nvme"] == 0
    check_executable(plan)


def test_it_is_not_said_once_the_runtime_executes_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_options, "executes_files", lambda: True)
    settings = {"nvme_bytes": 5, "executable_only": True}
    assert file_options.without_unexecuted_files(settings) == settings
    assert capsys.readouterr().err == ""


def test_a_plan_to_look_at_has_files_and_train_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SOLVE, *TIGHT, "--nvme", "1GB", "--nvme-dir", "disk", "--not-executable"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    shown = words(said.out)
    assert "only to look at, train refuses it: stages." in shown
    assert "nvme is not executable yet" in shown
    assert "nvme peak" in shown
    assert "nvme_read per step" in shown
    plan = Plan.load("plan.json")
    assert plan.predicted is not None
    assert 0 < plan.predicted.peak_bytes["nvme"] <= plan.budget_bytes["nvme"] == 10**9
    with pytest.raises(UsageError, match="nvme is not executable yet"):
        check_executable(plan)


def test_batches_and_sweeps_know_files(capsys: pytest.CaptureFixture[str]) -> None:
    tight = ["--host-memory", "48MB"]
    assert main([*SOLVE, "--batch-size", "auto", *tight, "--nvme", "1GB", "--not-executable"]) == 0
    assert "train refuses it" in words(capsys.readouterr().out)
    sweep = ["--sweep", "nvme=0:12MB:6MB", "--nvme-dir", "disk", "--not-executable"]
    assert main([*SOLVE, "--batch-size", "1", *tight, *sweep]) == 0
    shown = words(capsys.readouterr().out)
    assert "nvme and time" in shown
    assert "train refuses it" in shown
    with Path("plan.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["budget_bytes"]) for row in rows] == [0, 6 * 10**6, 12 * 10**6]
    assert rows[0]["status"] == "infeasible"
    assert 0 < int(rows[-1]["nvme_peak_bytes"]) <= 12 * 10**6
