"""What is left when whoever reads the output goes away, and when Ctrl-C comes before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lazysched.cli import OUTPUT_CLOSED
from lazysched.schemas import Plan
from lazysched.solver import solve
from tests.solver.synthetic import tiny_profile

MB = 10**6
SOLVE = ["solve", "profile.json", "--batch-size", "1", "--host-memory", "1GB", "-o", "new.json"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(tiny_profile(3), batch_size=1, gpu_memory_bytes=60 * MB, host_memory_bytes=1000 * MB).plan


@pytest.fixture
def folder(tmp_path: Path, plan: Plan) -> Path:
    tiny_profile(3).save(tmp_path / "profile.json")
    plan.save(tmp_path / "plan.json")
    return tmp_path


def run_unread(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program with nobody at the other end of its output."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        return subprocess.run(
            [sys.executable, "-m", "lazysched", *arguments],
            cwd=folder, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False, timeout=120,
        )  # fmt: skip
    finally:
        os.close(write_end)


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ([*SOLVE, "--gpu-memory", "60MB"], {"new.json"}),
        ([*SOLVE, "--sweep", "gpu-memory=60MB:60MB:1MB"], {"new.json", "new.csv"}),
        (["simulate", "plan.json", "--trace", "new.json"], {"new.json"}),
        (["plot", "plan.json", "-o", "new.html"], {"new.html"}),
        (["compare", "plan.json", "plan.json", "--json"], set[str]()),
    ],
)
def test_files_are_written_though_nobody_reads_the_output(
    folder: Path, arguments: list[str], written: set[str]
) -> None:
    ended = run_unread(folder, *arguments)
    assert (ended.returncode, ended.stderr) == (OUTPUT_CLOSED, "")
    assert {path.name for path in folder.iterdir()} == {"profile.json", "plan.json"} | written


INTERRUPTED_WHILE_IMPORTING = """
import runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
runpy.run_module("lazysched", run_name="__main__")
"""


def run_script(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


def test_ctrl_c_while_importing_is_one_line(tmp_path: Path) -> None:
    ended = run_script(tmp_path, INTERRUPTED_WHILE_IMPORTING)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "error: interrupted\n")


INTERRUPTED_AMID_A_DESTRUCTOR = """
import signal, time
from lazysched import __main__, cli

class Closing:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)  # Python prints the KeyboardInterrupt and goes on

def main():
    Closing()
    time.sleep(300)

cli.main = main
__main__.entry_point()
"""


def test_ctrl_c_amid_a_destructor_is_not_lost(tmp_path: Path) -> None:
    ended = run_script(tmp_path, INTERRUPTED_AMID_A_DESTRUCTOR)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "error: interrupted\n")


def test_other_errors_of_destructors_are_shown_as_before(tmp_path: Path) -> None:
    script = INTERRUPTED_AMID_A_DESTRUCTOR.replace("signal.raise_signal(signal.SIGINT)", "raise OSError(5)")
    ended = run_script(tmp_path, script.replace("time.sleep(300)", "return 0"))
    assert ended.returncode == 0
    assert "OSError: 5" in ended.stderr
