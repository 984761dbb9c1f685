"""``kill -9`` at random moments of training and saving: what goes on has the bits of a run never interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_runs_that_are_killed_thirty_times_end_as_one_never_interrupted(tmp_path: Path) -> None:
    """The program compares every checkpoint that is chosen, every result and every log with those of a whole run."""
    command = [sys.executable, "-m", "tests.end_to_end.killed_runs", str(tmp_path), "1", "30"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["by_clock"] + counts["while_writing"] >= 30
    assert min(counts["by_clock"], counts["while_writing"], counts["resumed"]) >= 8, counts
    assert counts["finished"] > 0
