"""Timelines in Chrome's trace format, which Perfetto and chrome://tracing open.

One process, a row for each engine, one complete event (``"ph": "X"``) for each operation of each step, in microseconds
from the first one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from lazysched.errors import RunError, UsageError
from lazysched.schemas import Engine, Program
from lazysched.timeline import Interval

ROWS: tuple[Engine, ...] = ("compute", "h2d", "d2h", "cpu")
"""Engines in the order of their rows; they have one even where they do nothing, others only where they do."""
PROCESS = 1


def chrome_trace(program: Program, intervals: Sequence[Interval]) -> dict[str, Any]:
    """The trace as a JSON object.

    Args:
        program: whose operations the intervals are of.
        intervals: of any steps, seconds.
    """
    origin_s = min((interval.start_s for interval in intervals), default=0.0)
    used = {interval.engine for interval in intervals}
    known: tuple[Engine, ...] = get_args(Engine)
    engines: list[Engine] = [*ROWS, *(engine for engine in known if engine in used and engine not in ROWS)]
    rows = {engine: row for row, engine in enumerate(engines, start=1)}
    events = [_event(program, interval, rows[interval.engine], origin_s) for interval in intervals]
    return {"traceEvents": [*_names(engines), *events], "displayTimeUnit": "ms"}


def _names(engines: Sequence[Engine]) -> Iterable[dict[str, Any]]:
    """Metadata events: names of the process and its rows, and their order."""
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "args": {"name": "lazysched"}}
    for row, engine in enumerate(engines, start=1):
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": row, "args": {"name": engine}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": row, "args": {"sort_index": row}}


def _event(program: Program, interval: Interval, row: int, origin_s: float) -> dict[str, Any]:
    op = program.ops[interval.op]
    start_ns, end_ns = (round(1e9 * (moment_s - origin_s)) for moment_s in (interval.start_s, interval.end_s))
    return {
        "ph": "X", "name": op.id, "cat": op.kind, "pid": PROCESS, "tid": row,
        "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000,
        "args": {
            "id": op.id, "step": interval.step, "stage": op.stage, "phase": op.phase, "micro_batch": op.micro_batch,
            "bytes": op.num_bytes,
        },
    }  # fmt: skip


def check_trace_file(path: Path, output_dir: Path) -> None:
    """Refuse, before a run, a file that could not be written after it.

    Args:
        path: of the trace.
        output_dir: of the run, which replaces that folder whole.

    Raises:
        UsageError: the file's folder is missing, the path is a folder, or it lies in ``output_dir``.
    """
    target = path.resolve()
    if not target.parent.is_dir() and output_dir.resolve() not in target.parents:
        raise UsageError(f"trace: {path}: the folder {path.parent} does not exist; make it first")
    if target.is_dir():
        raise UsageError(f"trace: {path} is a folder; name a file")
    if output_dir.resolve() in target.parents:
        raise UsageError(f"trace: {path} lies in the output folder, which is replaced whole; name a file outside it")


def save_chrome_trace(path: Path, program: Program, intervals: Sequence[Interval]) -> None:
    """Write the trace to ``path``.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(chrome_trace(program, intervals)) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); name a file you may write") from None
