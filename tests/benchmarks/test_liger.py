"""The Liger benchmark's smallest case runs on a CPU, where Liger itself has no kernels and its figures are null."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

LIGER = Path(__file__).resolve().parents[2] / "benchmarks" / "liger.py"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LIGER), *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    done = run(tmp_path, "--device", "cpu", "--smoke")
    assert done.returncode == 0, done.stderr
    for case in ("block", "loss"):
        for metric in ("plain_s", "compiled_s", "compiled_weight_gradient_error"):
            assert any(case in line and metric in line for line in done.stdout.splitlines()), metric
    assert done.stdout.count("not measured") == 4


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="Liger is installed")
def test_without_liger_it_ends_in_one_line(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "error: liger-kernel is not installed; pip install liger-kernel"
