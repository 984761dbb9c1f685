"""Rows of a benchmark: one figure each, with the machine, versions and command that made it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def make_row(case: str, metric: str, value: float | None, unit: str, machine: str, command: str) -> dict[str, object]:
    """One row; ``value`` is null where nothing was measured, ``command`` makes the figure again."""
    return {
        "case": case, "metric": metric, "value": value, "unit": unit, "machine": machine, "versions": _versions(),
        "command": command, "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }  # fmt: skip


def save_rows(name: str, rows: list[dict[str, object]], folder: Path = RESULTS) -> Path:
    """Write ``rows`` to ``NAME.json``, in place of earlier rows of the same cases."""
    path = folder / f"{name}.json"
    cases = {row["case"] for row in rows}
    kept = [row for row in json.loads(path.read_text()) if row["case"] not in cases] if path.exists() else []
    path.write_text(json.dumps(kept + rows, indent=1) + "\n", encoding="utf-8")
    return path


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "pulp", "highspy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _commit() -> str:
    given = os.environ.get("LAZYSCHED_COMMIT")
    if given:
        return given
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
