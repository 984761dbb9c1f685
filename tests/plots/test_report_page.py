"""``lazysched report``: what a run's folder holds as one page, whole runs, short ones, and ones that did not end."""

from __future__ import annotations

import hashlib
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from lazysched.cli import main
from lazysched.lower import lower
from lazysched.report_command import end_report
from lazysched.run_plots import MOST_POINTS, draw_loss, draw_step_time, log_frame, thinned
from lazysched.runtime.folders import foreign_entry
from lazysched.schemas import Plan
from lazysched.schemas.run import Run
from lazysched.solver import simulate_plan, solve
from lazysched.step_rows import LOG_FILE, StepRow
from lazysched.timeline import last_two_steps, timed_steps
from tests.plots.test_plan_page import Elements
from tests.solver.synthetic import tiny_profile

MB = 1_000_000
ROW = StepRow(0, 3.0, 0.5, 1e-3, tokens=64, trained_tokens=40, step_s=0.5, skipped=False, host_rss_bytes=10**9)
PROFILE = tiny_profile(3)


def rows(num: int, **changes: object) -> list[StepRow]:
    made = [replace(ROW, step=step, loss=3.0 / (step + 1), **changes) for step in range(num)]  # type: ignore[arg-type]
    return [replace(row, held_out_loss=2.5) if row.step == 3 else row for row in made]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(PROFILE, batch_size=2, gpu_memory_bytes=50 * MB, host_memory_bytes=1000 * MB, time_limit_s=3).plan


@pytest.fixture(scope="module")
def record(plan: Plan) -> Run:
    """A run that was as its plan predicted."""
    intervals, program = simulate_plan(plan).intervals, lower(plan, PROFILE.stages)
    return Run(
        model="some/<model>", data="d.jsonl", eval_data="h.jsonl", hardware_id="a machine",
        settings={"learning_rate": 1e-3, "max_grad_norm": 1.0, "seed": 42}, log_sha256="", measured_step_s=0.125,
        timed=timed_steps(program, intervals, in_line=False), timeline=last_two_steps(intervals),
        peak_bytes={"gpu": 40 * MB}, predicted_peak_bytes={"gpu": 39 * MB}, held_out_loss_before=3.25,
        held_out_loss_after=0.75, versions={"lazysched": "0"},
    )  # fmt: skip


def folder_of(path: Path, log: list[StepRow], record: Run | None = None, plan: Plan | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    text = "".join(row.as_line() for row in log)
    (path / LOG_FILE).write_text(text)
    if record is not None:
        record.model_copy(update={"log_sha256": hashlib.sha256(text.encode()).hexdigest()}).save(path / "run.json")
    if plan is not None:
        plan.save(path / "plan.json")
    return path


def page_of(folder: Path) -> str:
    assert main(["report", str(folder)]) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<svg.*?</svg>|<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL).split())


def test_the_page_of_a_whole_run_needs_nothing_else(tmp_path: Path, record: Run, plan: Plan) -> None:
    page = page_of(folder_of(tmp_path / "out", rows(6), record, plan))
    elements = Elements(page)
    # Loss; norm and rate; pace and memory; a step measured and predicted.
    assert elements.tags.count("svg") == 5
    assert not {"script", "link", "iframe"} & set(elements.tags)
    assert all(reference.startswith(("#", "data:")) for reference in elements.references)
    assert not re.search(r"url\((?!#)|@import", page)
    assert "<model>" not in page
    text = text_of(page)
    for shown in (
        "Training of some/&lt;model&gt;", "a machine; lazysched 0", "d.jsonl, held out h.jsonl", "384, 240 of them",
        "3.0000 in the first step, 0.5000 in the last", "3.2500 before, 0.7500 at the end", "learning_rate 0.001",
        "125 ms", "40 MB", "39 MB", "measured, step", "predicted", "2 rows of", "block.0", "weights",
    ):  # fmt: skip
        assert shown in text, shown
    assert plan.predicted is not None
    for engine in plan.predicted.exposed_s:
        assert f"compute waits for {engine}" in text


def test_the_page_is_ours_and_the_same_every_time(tmp_path: Path, record: Run, plan: Plan) -> None:
    folder = folder_of(tmp_path / "out", rows(6))
    first = page_of(folder)
    assert foreign_entry(folder) is None, "the next run may replace the folder"
    assert page_of(folder) == first
    (folder / "report.html").write_text("<!DOCTYPE html><p>mine")
    assert foreign_entry(folder) == "report.html"


def test_a_run_too_short_to_be_timed_says_so(tmp_path: Path, record: Run, plan: Plan) -> None:
    short = record.model_copy(
        update={"timed": None, "timeline": [], "measured_step_s": None, "held_out_loss_before": None}
    )
    text = text_of(page_of(folder_of(tmp_path / "out", rows(1), short, plan)))
    assert "Too few steps were timed for a picture." in text
    assert "not measured" in text
    assert "held-out loss" not in text


def test_a_run_whose_steps_were_all_skipped(tmp_path: Path, record: Run, plan: Plan) -> None:
    log = rows(3, skipped=True, grad_norm=math.inf)
    log = [replace(row, loss=math.nan) for row in log]
    text = text_of(page_of(folder_of(tmp_path / "out", log, record, plan)))
    assert "nan in the first step, nan in the last" in text
    assert "3, gradient not finite" in text


def test_a_resumed_run_says_what_an_earlier_process_did(tmp_path: Path, record: Run, plan: Plan) -> None:
    resumed = record.model_copy(update={"num_restored": 4})
    text = text_of(page_of(folder_of(tmp_path / "out", rows(6), resumed, plan)))
    assert "6, 4 of them by an earlier process" in text
    assert "3.2500 after step 4, 0.7500 at the end" in text


def test_a_run_that_did_not_end_shows_what_is_known(tmp_path: Path, record: Run, plan: Plan) -> None:
    folder = folder_of(tmp_path / "out", rows(5))
    with (folder / LOG_FILE).open("a") as file:
        file.write(ROW.as_line()[:25])  # killed while it wrote
    text = text_of(page_of(folder))
    assert "This run has not come to its end" in text
    assert "Predicted and measured" not in text
    folder_of(folder / "checkpoint-4", rows(4), None, plan)
    text = text_of(page_of(folder))
    assert f"Training of {plan.model_id}" in text
    assert "2 rows of" in text
    # The result of an earlier run in the same folder says nothing of this one.
    record.save(folder / "run.json")
    assert "This run has not come to its end" in text_of(page_of(folder))


def test_a_plan_by_hand_has_no_prediction(tmp_path: Path, record: Run, plan: Plan) -> None:
    bare = plan.model_copy(update={"profile": None, "predicted": None})
    page = page_of(folder_of(tmp_path / "out", rows(6), record, bare))
    assert Elements(page).tags.count("svg") == 4


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = folder_of(tmp_path / "empty", [])
    other = tmp_path / "other"
    other.mkdir()
    (other / LOG_FILE).write_text('{"loss": 3}\n')
    good = folder_of(tmp_path / "good", rows(2))
    for arguments, named in (
        (["absent"], "log.jsonl: cannot be read (No such file or directory); name the --output-dir of a run"),
        ([str(empty)], "log.jsonl: holds no step yet"),
        ([str(other)], "is no step; name the --output-dir of a run"),
        ([str(good), "-o", str(tmp_path / "absent" / "r.html")], "absent does not exist"),
        ([], "Missing argument 'OUTPUT_DIR'"),
    ):
        assert main(["report", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert named in line
    assert main(["report", str(good), "-o", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").is_file()
    assert not (good / "report.html").exists()


def test_without_matplotlib_a_run_ends_well_and_says_how_to_get_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "out", rows(2))
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("html_page", "report_page", "run_plots", "plots"):
        monkeypatch.delitem(sys.modules, f"lazysched.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    end_report(folder, Console(width=60))
    (line,) = capsys.readouterr().out.splitlines()
    remedy = f"run pip install 'lazysched[plot]', then lazysched report {folder}"
    assert line == f"no report: matplotlib is not installed; {remedy}"
    assert not (folder / "report.html").exists()


def test_a_fault_in_a_picture_does_not_fail_a_run_whose_model_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "out", rows(2))
    monkeypatch.setattr("lazysched.report_page.report_page", lambda _: 1 / 0)
    end_report(folder, Console(width=200))
    assert capsys.readouterr().out.startswith("no report: ZeroDivisionError: division by zero; the model is saved")
    assert not (folder / "report.html").exists()


# ---- pictures


def test_what_is_not_finite_is_missing_in_pictures_alone() -> None:
    frame = log_frame([replace(ROW, loss=math.inf), replace(ROW, step=1, loss=math.nan), replace(ROW, step=2)])
    assert [*frame.index] == [1, 2, 3]
    assert [*frame.loss.isna()] == [True, True, False]


def test_held_out_losses_are_points_where_they_were_taken() -> None:
    axes = Figure().subplots()
    draw_loss(axes, log_frame([*rows(6)]), before=3.25, after=0.75)
    loss, held_out = axes.lines
    assert np.asarray(loss.get_xdata()).tolist() == [1, 2, 3, 4, 5, 6]
    assert np.asarray(held_out.get_xydata()).tolist() == [[0, 3.25], [4, 2.5], [6, 0.75]]
    axes = Figure().subplots()
    draw_loss(axes, log_frame([*rows(6)]), before=3.25, after=0.75, num_restored=2)
    assert np.asarray(axes.lines[1].get_xydata()).tolist() == [[2, 3.25], [4, 2.5], [6, 0.75]]
    axes = Figure().subplots()
    draw_loss(axes, log_frame([*rows(6)]), before=0.75, after=0.75, num_restored=6)
    assert np.asarray(axes.lines[1].get_xydata()).tolist() == [[4, 2.5], [6, 0.75]]


def test_skipped_steps_are_marked() -> None:
    axes = Figure().subplots()
    log = rows(6)
    log[2] = replace(log[2], skipped=True)
    draw_loss(axes, log_frame(log))
    assert np.asarray(axes.lines[-1].get_xdata()).tolist() == [3]


def test_long_runs_are_drawn_as_means() -> None:
    values = pd.Series(range(1, 10_001), index=range(1, 10_001), dtype=float)
    shown = thinned(values)
    assert MOST_POINTS * 0.9 < len(shown) <= MOST_POINTS
    assert [*shown.index] == pytest.approx([*shown])
    assert thinned(values[:MOST_POINTS]) is not None
    assert len(thinned(values[:MOST_POINTS])) == MOST_POINTS


def test_a_first_step_that_compiles_does_not_flatten_the_others() -> None:
    log = rows(100)
    log[0] = replace(log[0], step_s=60.0)
    axes = Figure().subplots()
    draw_step_time(axes, log_frame(log), 0.4)
    assert axes.get_ylim()[1] < 1000
    assert axes.get_title(loc="right") == "longest: 6e+04 ms"
