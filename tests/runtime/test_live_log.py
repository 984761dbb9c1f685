"""The log of a run: one line a step, valid JSON whatever the numbers, and kept through a full disk and other runs."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from lazysched.runtime.folders import foreign_entry
from lazysched.runtime.live_log import LiveLog
from lazysched.step_rows import LOG_FILE, MEASURED, StepRow, row_of, rows_of

ROW = StepRow(
    0, 1.5, 0.25, 1e-3, tokens=64, trained_tokens=40, step_s=0.5, skipped=False, host_rss_bytes=7, predicted_step_s=0.4
)


def steps(num: int) -> list[StepRow]:
    return [replace(ROW, step=step, predicted_step_s=None if step else 0.4) for step in range(num)]


def text_of(folder: Path) -> str:
    return (folder / LOG_FILE).read_text(encoding="utf-8")


def never(text: str) -> None:
    raise AssertionError(text)


def test_a_line_holds_all_and_reads_back() -> None:
    line = replace(ROW, held_out_loss=2.0).as_line()
    assert json.loads(line) == {
        "step": 1, "loss": 1.5, "grad_norm": 0.25, "learning_rate": 1e-3, "tokens": 64, "trained_tokens": 40,
        "step_s": 0.5, "skipped": False, "host_rss_bytes": 7, "predicted_step_s": 0.4, "held_out_loss": 2.0,
        "tokens_per_s": 128.0,
    }  # fmt: skip
    assert set(MEASURED) < set(json.loads(line))
    assert row_of(line) == replace(ROW, held_out_loss=2.0)
    assert "held_out_loss" not in ROW.as_line()


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_what_is_not_finite_is_kept_as_it_was_in_valid_json(value: float, text: str) -> None:
    line = replace(ROW, loss=value, grad_norm=value).as_line()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    values = json.loads(line, parse_constant=refuse)
    assert values["loss"] == values["grad_norm"] == text
    assert str(float(values["loss"])) == str(value)
    assert str(row_of(line).loss) == str(value)
    frame = pd.DataFrame(json.loads(entry) for entry in (line, ROW.as_line()))
    assert str(frame.loss.astype(float)[0]) == str(value)


@pytest.mark.parametrize(
    "text",
    ["{}\n", "3\n", ROW.as_line() * 2, replace(ROW, step=1).as_line(), '{"step": 1, "skipped": true}\n',
     '{"skipped": true}\n'],
)  # fmt: skip
def test_what_is_no_log_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no step|are not 1 to|missing"):
        rows_of(text)


def test_steps_of_a_version_that_counted_from_0_are_read() -> None:
    old = "".join(replace(ROW, step=step - 1).as_line() for step in range(3))
    assert old.startswith('{"step": 0,')
    assert [row.step for row in rows_of(old)] == [0, 1, 2]


def test_a_last_line_that_was_cut_is_left_out() -> None:
    assert rows_of(ROW.as_line() + replace(ROW, step=1).as_line()[:40]) == [ROW]
    assert rows_of("") == rows_of('{"st') == []


def test_every_row_is_there_when_it_is_known_and_the_file_only_grows(tmp_path: Path) -> None:
    log = LiveLog(tmp_path / "out", [], never)
    assert not (tmp_path / "out").exists()
    first, *others = steps(3)
    log(first)
    file = (tmp_path / "out" / LOG_FILE).stat().st_ino
    for row in others:
        before = text_of(tmp_path / "out")
        log(row)
        assert text_of(tmp_path / "out") == before + row.as_line()
    assert (tmp_path / "out" / LOG_FILE).stat().st_ino == file
    assert os.listdir(tmp_path / "out") == [LOG_FILE]
    assert foreign_entry(tmp_path / "out") is None


def test_a_resumed_run_goes_on_behind_the_rows_of_its_checkpoint(tmp_path: Path) -> None:
    """Rows after the checkpoint, and a line that was cut, come again."""
    rows = steps(6)
    (tmp_path / LOG_FILE).write_text("".join(row.as_line() for row in rows[:5]) + rows[5].as_line()[:30])
    log = LiveLog(tmp_path, rows[:3], never)
    assert rows_of(text_of(tmp_path)) == rows[:3]
    for row in rows[3:]:
        log(row)
    assert rows_of(text_of(tmp_path)) == rows
    assert os.listdir(tmp_path) == [LOG_FILE]


def test_the_log_of_another_run_is_kept(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        LiveLog(tmp_path, [], never)(replace(ROW, loss=loss))
    LiveLog(tmp_path, [replace(ROW, loss=3.0)], never)
    assert sorted(os.listdir(tmp_path)) == ["log.1.jsonl", "log.2.jsonl", LOG_FILE]
    losses = [row_of((tmp_path / name).read_text()).loss for name in ("log.1.jsonl", "log.2.jsonl", LOG_FILE)]
    assert losses == [1.0, 2.0, 3.0]
    assert foreign_entry(tmp_path) is None


def test_only_logs_of_ours_are_ours(tmp_path: Path) -> None:
    (tmp_path / LOG_FILE).write_text('{"loss": 1.0}\n')
    assert foreign_entry(tmp_path) == LOG_FILE
    (tmp_path / LOG_FILE).write_text('{"ste')  # cut in its first line
    assert foreign_entry(tmp_path) is None
    (tmp_path / "my.jsonl").write_text(ROW.as_line())
    assert foreign_entry(tmp_path) == "my.jsonl"


def test_a_full_disk_costs_lines_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    log = LiveLog(tmp_path, [], warnings.append)
    rows = steps(5)
    log(rows[0])

    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", no_space)
        patch.setattr(Path, "write_text", no_space)
        log(rows[1])
        log(rows[2])
    assert rows_of(text_of(tmp_path)) == rows[:1]
    (warning,) = warnings
    assert warning.endswith(f"{LOG_FILE}: cannot be written (No space left on device); the run goes on without it")
    for row in rows[3:]:
        log(row)
    assert rows_of(text_of(tmp_path)) == rows
    assert len(warnings) == 1
