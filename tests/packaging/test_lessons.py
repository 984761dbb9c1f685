"""Each row of ``docs/lessons.md`` names tests that exist, or says why there is none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    line
    for line in (ROOT / "docs" / "lessons.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| what people saw")
]
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def functions(path: Path) -> set[str]:
    return {
        node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_what_a_row_names_exists(row: str) -> None:
    named = _TEST.findall(row)
    assert named or "**Open**" in row or "**does not apply**" in row.lower(), row
    assert row.count("`tests/") == len(named), "a test is written in another way"
    for file, name in named:
        assert name in functions(ROOT / file), f"{file}::{name}"


def test_there_is_a_row_for_each_kind() -> None:
    assert len(ROWS) >= 37
