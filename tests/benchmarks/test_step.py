"""The step benchmark's smallest case runs on a CPU and reports every figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

STEP = Path(__file__).resolve().parents[2] / "benchmarks" / "step.py"


def test_smoke(tmp_path: Path) -> None:
    command = [sys.executable, str(STEP), "--device", "cpu", "--smoke"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout[done.stdout.rindex("{") :])
    assert figures["tokens_per_s"] > 0
    assert figures["predicted_step_s"] > 0
    assert figures["peak_gpu_bytes"] is None  # not measured on a CPU
