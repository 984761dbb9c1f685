"""Good documents with one thing changed at random: never a traceback, and the exit code is one of ours."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bad_input.driver import PREPARE, run
from tests.bad_input.files import Files

pytestmark = pytest.mark.slow
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from([2**31, 2**63, -(2**63), 10**40, 10**400]),
    st.floats(allow_nan=True, allow_infinity=True), st.text(max_size=5), st.just([]), st.just({}), st.just([None]),
    st.just({"a": 1}), st.sampled_from(["gpu", "host", "nvme", "input", "all", "hybrid8", "cpu", "bfloat16"]),
)  # fmt: skip
"""What takes the place of a value."""
FUZZ = settings(
    max_examples=20, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*above, key)
        yield from places(inner, (*above, key))


@st.composite
def changed(draw: st.DrawFn, document: Any, depth: int) -> Any:
    """``document`` with one value, not deeper than ``depth``, dropped, doubled or of another kind."""
    result = copy.deepcopy(document)
    *above, last = draw(st.sampled_from([path for path in places(result) if len(path) <= depth]))
    owner = result
    for key in above:
        owner = owner[key]
    kind = draw(st.sampled_from(["replace", "replace", "drop", "rename"]))
    if kind == "replace" or isinstance(owner, list):
        owner[last] = draw(VALUES)
    else:
        value = owner.pop(last)
        if kind == "rename":
            owner[draw(st.text(max_size=4))] = value
    return result


def ended_well(command: str, files: Files) -> None:
    """Exit code 0, or 1 or 2 with one line; an exception would come through."""
    errors = io.StringIO()
    with redirect_stderr(errors), redirect_stdout(io.StringIO()):
        code = run(command, files)
    lines = [line for line in errors.getvalue().splitlines() if line.startswith("error: ")]
    assert code in (0, 1, 2)
    assert len(lines) == (code != 0), errors.getvalue()


def written(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "command",
    [
        "simulate {plan}",
        "explain {plan} --time-limit 0",
        "train --plan {plan} --model {model} --data {data} --output-dir {out} --device cpu --dry-run",
    ],
)
@FUZZ
@given(data=st.data())
def test_plans(command: str, files: Files, prepared: Files, data: st.DataObject) -> None:
    document = json.loads(prepared.plan.read_text())
    if data.draw(st.booleans()):  # half of the changes in the decisions, which a few lines of a thousand are
        document["stages"] = data.draw(changed(document["stages"], 4))
    else:
        document = data.draw(changed(document, 6))
    written(files.plan, document)
    ended_well(command, files)


@FUZZ
@given(data=st.data())
def test_plans_that_are_run(files: Files, prepared: Files, data: st.DataObject) -> None:
    document = json.loads(prepared.plan.read_text()) | {"profile": None}
    written(files.plan, data.draw(changed(document, 6)))
    ended_well("train --plan {plan} --model {model} --data {data} --output-dir {out} --device cpu --max-steps 1", files)


@FUZZ
@given(data=st.data())
def test_profiles(files: Files, prepared: Files, data: st.DataObject) -> None:
    written(files.profile, data.draw(changed(json.loads(prepared.profile.read_text()), 7)))
    ended_well("solve {profile} --batch-size 4 --time-limit 1 -o {root}/new.json", files)


@FUZZ
@given(data=st.data())
def test_configurations(files: Files, prepared: Files, data: st.DataObject) -> None:
    document = json.loads((prepared.model / "config.json").read_text())
    written(files.model / "config.json", data.draw(changed(document, 3)))
    ended_well("train --plan {plan} --model {model} --data {data} --output-dir {out} --device cpu --max-steps 1", files)
    ended_well("solve --hardware rtx4090 --model {model} --batch-size 1 --time-limit 1 -o {root}/new.json", files)


ROWS = (
    {"question": "what is one", "answer": "one"},
    {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "one"}]},
    {
        "conversations": [{"from": "human", "value": "what"}, {"from": "gpt", "value": "one"}],
        "system": "two",
        "tools": "[]",
    },
    {"instruction": "what", "input": "is", "output": "one", "history": [["two", "three"]]},
    {"prompt": [{"role": "user", "content": "what"}], "completion": [{"role": "assistant", "content": "one"}]},
    {"input_ids": [1, 4, 5, 2], "labels": [-100, 4, 5, 2]},
    {"text": "what is one"},
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: next(iter(row)))
@FUZZ
@given(data=st.data())
def test_rows(row: dict[str, Any], files: Files, data: st.DataObject) -> None:
    files.data.write_text("".join(json.dumps(each) + "\n" for each in (row, data.draw(changed(row, 4)))))
    ended_well(PREPARE, files)
