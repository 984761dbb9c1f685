"""What a trace viewer reads, and where a trace may be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lazysched.chrome_trace import check_trace_file, chrome_trace, save_chrome_trace
from lazysched.errors import RunError, UsageError
from lazysched.schemas import Op, Program
from lazysched.timeline import Interval

FIELDS = {"stage": "block.1", "phase": "backward", "micro_batch": 2, "num_bytes": 7}
PROGRAM = Program(
    plan_hash="", edges=[], buffers={},
    ops={
        "fetch": Op.model_validate({"id": "fetch", "kind": "copy", "engine": "h2d", "priority": 0, **FIELDS}),
        "totals": Op.model_validate({"id": "totals", "kind": "totals", "engine": "compute", "priority": 1}),
    },
)  # fmt: skip
INTERVALS = [Interval("fetch", "h2d", 100.0, 100.25, 3), Interval("totals", "compute", 100.25, 100.5, 3)]


def test_an_event_for_each_operation_in_the_row_of_its_engine(tmp_path: Path) -> None:
    save_chrome_trace(tmp_path / "trace.json", PROGRAM, INTERVALS)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(rows.values()) == ["compute", "h2d", "d2h", "cpu"]
    assert len({event["pid"] for event in events}) == 1
    fetch, totals = (event for event in events if event["ph"] == "X")
    assert (rows[fetch["tid"]], rows[totals["tid"]]) == ("h2d", "compute")
    assert (fetch["ts"], fetch["dur"]) == (0.0, 250_000.0)
    assert (totals["ts"], totals["dur"]) == (250_000.0, 250_000.0)
    assert fetch["args"] == {
        "id": "fetch", "step": 3, "stage": "block.1", "phase": "backward", "micro_batch": 2, "bytes": 7,
    }  # fmt: skip


def test_engines_beyond_the_usual_have_a_row_where_they_work() -> None:
    read = Op.model_validate({"id": "read", "kind": "read", "engine": "nvme_read", "priority": 0})
    program = PROGRAM.model_copy(update={"ops": {"read": read}})
    names = [event["args"].get("name") for event in chrome_trace(program, [Interval("read", "nvme_read", 0, 1, 0)])[
        "traceEvents"]]  # fmt: skip
    assert "nvme_read" in names
    assert "nvme_write" not in names


def test_files_that_could_not_be_written_are_refused_before_the_run(tmp_path: Path) -> None:
    output = tmp_path / "out"
    check_trace_file(tmp_path / "trace.json", output)
    for path, reason in (
        (tmp_path / "absent" / "trace.json", "does not exist"),
        (tmp_path, "is a folder"),
        (output / "trace.json", "lies in the output folder"),
    ):
        with pytest.raises(UsageError, match=reason):
            check_trace_file(path, output)


def test_a_file_that_cannot_be_written_after_the_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be written"):
        save_chrome_trace(tmp_path / "gone" / "trace.json", PROGRAM, INTERVALS)
