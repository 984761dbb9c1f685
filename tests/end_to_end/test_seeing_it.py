"""Seeing a run: the trace, what the report sets against the prediction, and a profile refined by the run."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lazysched
from lazysched.cli import main
from lazysched.lower import lower
from lazysched.runtime.chosen_steps import TIMED_STEPS
from lazysched.runtime.loop import History
from lazysched.runtime.report import comparison_table
from lazysched.runtime.train_result import TrainResult
from lazysched.schemas import Plan, Profile, Program, Recording
from lazysched.solver import simulate
from lazysched.step_rows import StepRow
from lazysched.timeline import moved_bytes
from tests.end_to_end.tiny_folder import make_data, make_model

SEQ_LEN = "24"


@dataclass(frozen=True)
class Case:
    """A model with its profile, plan and data."""

    model: Path
    profile: Path
    plan: Path
    data: Path

    @property
    def program(self) -> Program:
        return lower(Plan.load(self.plan), Profile.load(self.profile).stages)

    def train(self, output: Path, num_steps: int, *extra: str) -> int:
        return main(
            ["train", "--plan", str(self.plan), "--model", str(self.model), "--data", str(self.data), "--output-dir",
             str(output), "--device", "cpu", "--max-steps", str(num_steps), *extra]
        )  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("seen")
    made = Case(
        make_model(folder / "model"), folder / "profile.json", folder / "plan.json", make_data(folder / "d.jsonl")
    )
    profile = ["profile", str(made.model), "--device", "cpu", "--seq-len", SEQ_LEN, "--micro-batch", "2"]
    assert main([*profile, "-o", str(made.profile)]) == 0
    assert main(["solve", str(made.profile), "--batch-size", "4", "-o", str(made.plan)]) == 0
    on_host(made.plan)
    return made


def on_host(plan: Path) -> None:
    """Let a block stream and be updated on the host, so that every engine has something to do."""
    document = json.loads(plan.read_text())
    document["stages"]["block.1"] |= {"weights": "host", "state": "host", "input_tier": "host"}
    plan.write_text(json.dumps(document))


def events_of(trace: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """Row -> engine, and the complete events."""
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return rows, [event for event in events if event["ph"] == "X"]


@pytest.mark.parametrize(
    ("flags", "steps"), [([], [2, 3, 4]), (["--trace-steps", "-1:"], [5]), (["--trace-steps", ":2"], [0, 1])]
)
def test_a_trace_holds_every_operation_of_the_chosen_steps(
    case: Case, tmp_path: Path, flags: list[str], steps: list[int]
) -> None:
    trace = tmp_path / "trace.json"
    assert case.train(tmp_path / "out", 6, "--trace", str(trace), *flags) == 0
    rows, events = events_of(trace)
    ops = case.program.ops.values()
    assert {op.engine for op in ops} == {"compute", "h2d", "d2h", "cpu"}
    found = [(event["args"]["step"], event["args"]["id"], rows[event["tid"]]) for event in events]
    assert found == [(step, op.id, op.engine) for step in steps for op in ops]
    recording = Recording.load(tmp_path / "out" / "measured_ops.json")
    assert recording.steps == sorted({2, 3, 4, *steps} - {0, 1}), "warm-up says nothing of what operations take"
    # In line, one thing at a time; a nanosecond is the resolution of the file.
    assert all(before["ts"] + before["dur"] <= after["ts"] + 1e-3 for before, after in pairwise(events))


def test_a_run_says_what_its_operations_took(case: Case, tmp_path: Path) -> None:
    result = lazysched.train(
        Plan.load(case.plan), model=str(case.model), data=str(case.data), output_dir=str(tmp_path / "out"),
        device="cpu", max_steps=6, console=Console(file=io.StringIO()),
    )  # fmt: skip
    assert result.timed is not None
    assert result.timed.steps == (3, 4)
    assert result.timed.moved_bytes == moved_bytes(case.program.ops.values())
    assert set(result.timed.exposed_s) == {"h2d", "d2h", "cpu"}
    assert min(*result.timed.exposed_s.values(), result.timed.idle_s) > 0
    recording = Recording.load(tmp_path / "out" / "measured_ops.json")
    assert recording.steps == [*range(6)[TIMED_STEPS]]
    repeats = sum(timed.duration.repeats for timed in recording.durations)
    assert repeats == 3 * sum(bool(op.cost) for op in case.program.ops.values())
    text = shown(result)
    for engine in ("h2d", "d2h", "cpu"):
        assert f"compute waits for {engine}" in text
    assert "not measured" not in text


def test_skipped_steps_and_warm_up_do_not_count() -> None:
    row = StepRow(2, 1.0, 1.0, 1e-3, tokens=8, trained_tokens=4, step_s=0.5, skipped=False)
    rows = [replace(row, step=step, skipped=step == 3) for step in range(6)]
    assert [History(rows).counts(step) for step in range(6)] == [False, False, True, False, True, True]
    assert [History(rows, num_restored=2).counts(step) for step in range(6)] == [False] * 4 + [True] * 2


def test_a_run_too_short_to_be_timed_says_so(case: Case, tmp_path: Path) -> None:
    result = lazysched.train(
        Plan.load(case.plan), model=str(case.model), data=str(case.data), output_dir=str(tmp_path / "out"),
        device="cpu", max_steps=2, console=Console(file=io.StringIO()),
    )  # fmt: skip
    assert result.timed is None
    assert not (tmp_path / "out" / "measured_ops.json").exists()
    assert shown(result).count("not measured") == 6  # three engines, idle, two directions


def shown(result: TrainResult) -> str:
    text = io.StringIO()
    Console(file=text, width=100).print(comparison_table(result, "training"))
    return text.getvalue()


def test_a_profile_refined_by_a_run_predicts_that_run(case: Case, tmp_path: Path) -> None:
    out, refined = tmp_path / "out", tmp_path / "refined.json"
    assert case.train(out, 6) == 0
    command = ["profile", "--from-run", str(out), "--profile", str(case.profile), "-o", str(refined)]
    assert main(command) == 0
    plan, recording, profile = Plan.load(case.plan), Recording.load(out / "measured_ops.json"), Profile.load(refined)
    assert any(name.startswith("refined.") for name in profile.notes)
    step_s = simulate(case.program, profile, micro_batch=plan.micro_batch).step_s
    measured_s = sum(timed.duration.seconds * timed.duration.repeats for timed in recording.durations)
    assert step_s == pytest.approx(measured_s / len(recording.steps))


def test_a_run_of_another_model_does_not_refine(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.train(tmp_path / "out", 3) == 0
    recording = tmp_path / "out" / "measured_ops.json"
    recording.write_text(recording.read_text().replace('"model_id": "', '"model_id": "Other'))
    capsys.readouterr()
    command = ["profile", "--from-run", str(tmp_path / "out"), "--profile", str(case.profile)]
    assert main([*command, "-o", str(tmp_path / "refined.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "from_run: model_id: the run had Other" in line
    assert not (tmp_path / "refined.json").exists()


@pytest.mark.parametrize(
    ("trace", "steps", "named"),
    [
        ("t.json", "6:", "trace_steps: 6: holds none of the run's 6 steps"),
        (None, "1:2", "trace_steps: 1:2 without a trace"),
        ("out/t.json", "1:2", "lies in the output folder"),
        ("absent/t.json", "1:2", "absent does not exist"),
    ],
)
def test_traces_that_cannot_be_are_refused_before_the_run(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: str | None, steps: str, named: str
) -> None:
    flags = [] if trace is None else ["--trace", str(tmp_path / trace)]
    assert case.train(tmp_path / "out", 6, *flags, "--trace-steps", steps) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
