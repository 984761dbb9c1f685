"""``log.jsonl``: one JSON object a step, written by a run while it trains and read by whoever looks at it.

JSON has no word for a number that is not finite. Such a loss or norm is kept as it was, as one of the texts ``"NaN"``,
``"Infinity"`` and ``"-Infinity"``, which ``float()`` reads in Python, ``Number()`` in JavaScript, and
``astype(float)`` in a column of pandas.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

LOG_FILE = "log.jsonl"
"""In the output folder of a run, and in each of its checkpoints."""
LOG_HEAD = '{"step": '
"""Every line begins with it, by which our logs are told from files of others."""
MEASURED = ("step_s", "tokens_per_s", "host_rss_bytes", "predicted_step_s")
"""Keys of a line whose values another run of the same steps may have otherwise."""


@dataclass(frozen=True)
class StepRow:
    """What one step reports; ``step_s`` is the time from the end of the step before, on ``compute``."""

    step: int
    """Counted from 0; in the file from 1, as on the screen."""
    loss: float
    """Mean over the trained tokens of the step."""
    grad_norm: float
    """Global, before clipping."""
    learning_rate: float
    tokens: int
    """All that went through the model, padding included."""
    trained_tokens: int
    """Those that the loss counts."""
    step_s: float
    skipped: bool
    """Whether the step changed nothing because its gradient was not finite."""
    host_rss_bytes: int | None = None
    """Physical memory of the process when the step's numbers were read."""
    predicted_step_s: float | None = None
    """The plan's, in the first row of each process that trained."""
    held_out_loss: float | None = None
    """After the step, where it was taken then."""
    epoch: int | None = None
    """Where the gradient was not finite: the epoch of the step's first row, counted from 0."""
    data_rows: tuple[int, ...] | None = None
    """Likewise: the rows that the step held, counted from 1 through all files of the data."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the step over its time; 0 where a clock saw no time pass."""
        return self.tokens / self.step_s if self.step_s > 0 else 0.0

    def as_line(self) -> str:
        """The row as a line of the log; what is None is left out."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        known["step"] = self.step + 1
        known["tokens_per_s"] = round(self.tokens_per_s, 1)
        return json.dumps({name: _in_json(value) for name, value in known.items()}, allow_nan=False) + "\n"


_FLOATS = [field.name for field in fields(StepRow) if str(field.type).startswith("float")]
_WHOLE = [field.name for field in fields(StepRow) if str(field.type).startswith("int")]
_LISTS = [field.name for field in fields(StepRow) if str(field.type).startswith("tuple")]
_NAMES = {field.name for field in fields(StepRow)}


def row_of(line: str) -> StepRow:
    """The row that a line of the log holds.

    Raises:
        ValueError: it holds none.
    """
    values = json.loads(line)
    if not isinstance(values, dict) or not isinstance(values.get("skipped"), bool):
        raise ValueError(f"{line.strip()[:60]!r} is no step")
    known: dict[str, Any] = {name: value for name, value in values.items() if name in _NAMES}
    try:
        known |= {name: float(known[name]) for name in _FLOATS if name in known}
        known |= {name: int(known[name]) for name in _WHOLE if name in known}
        known |= {name: tuple(map(int, known[name])) for name in _LISTS if name in known}
        return StepRow(**known | {"step": known["step"] - 1})
    except KeyError:
        raise ValueError("step is missing") from None
    except TypeError as error:
        raise ValueError(str(error)) from None


def rows_of(text: str) -> list[StepRow]:
    """The rows of a log, up to a last line that was cut while it was written.

    Raises:
        ValueError: a line is no step, or steps are missing or doubled.
    """
    whole, newline, _ = text.rpartition("\n")
    rows = [row_of(line) for line in (whole + newline).splitlines()]
    if rows and rows[0].step < 0:  # of a version that counted from 0
        rows = [replace(row, step=row.step + 1) for row in rows]
    if [row.step for row in rows] != [*range(len(rows))]:
        raise ValueError(f"steps are not 1 to {len(rows)}, one a line")
    return rows


def _in_json(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
