"""Ctrl-C while ``lazysched solve`` searches: the best plan so far is written, or nothing, and never half of it."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lazysched.schemas import Plan
from tests.solver.synthetic import CARD, SHAPE_7B, large_profile

GUARD_S = 120
"""No run may take longer, however busy the machine is."""
DRIVER = """
import os, signal, sys, threading
import lazysched.solver
from lazysched.cli import main
from lazysched.solver import explore, highs, many, milp, outer_search, recipes, remedies, workers
ctrl_c = lambda: os.kill(os.getpid(), signal.SIGINT)

def press_in(owner, name, calls_before=0, delay_s=0.0):
    original = getattr(owner, name)
    seen = []
    def pressing(*args, **kwargs):
        seen.append(name)
        if len(seen) == calls_before + 1:
            threading.Timer(delay_s, ctrl_c).start() if delay_s else ctrl_c()
        return original(*args, **kwargs)
    setattr(owner, name, pressing)

{presses}
print("ready", flush=True)
sys.exit(main(sys.argv[1:]))
"""
BEFORE_ANY_PLAN = 'press_in(recipes, "best_of_rule")'
AMID_THE_BOUNDS = 'press_in(outer_search, "count_bound_s")'
AFTER_THE_RECIPES = 'press_in(outer_search.Search, "_explore")'
WHILE_DESCENDING = 'press_in(outer_search, "explore_all")'
BEFORE_A_PROGRAM = 'press_in(highs._WarmHighs, "callSolver", calls_before=18)'  # 15 give quick bounds
AMID_THE_PROOF = 'press_in(milp.PlacementProgram, "solve", delay_s=0.1)'
OTHER_PROCESSES = "os.sched_getaffinity = lambda _: range(8); explore.PARALLEL_BLOCKS = 1"
AMID_OTHER_PROCESSES = 'press_in(outer_search, "explore_all", delay_s=2.0)'
WHILE_EXPLAINING = 'press_in(remedies, "remedies")'
AGAIN = 'press_in(outer_search.Search, "_incumbent")'


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    plan: Plan | None


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    large_profile(SHAPE_7B, CARD, 48, micro_batches=(2, 4, 8)).save(path)
    return path


def start(profile_file: Path, folder: Path, presses: str, gpu_memory: str = "24GB") -> subprocess.Popen[str]:
    command = ["solve", str(profile_file), "--batch-size", "16", "-o", str(folder / "plan.json")]
    command += ["--gpu-memory", gpu_memory, "--host-memory", "100GB", "--gap", "0", "--time-limit", "600"]
    code = DRIVER.format(presses=presses)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *command], stdout=pipe, stderr=pipe, text=True)


def end(process: subprocess.Popen[str], folder: Path) -> Ended:
    try:
        out, err = process.communicate(timeout=GUARD_S)
    finally:
        process.kill()
    files = {path.name for path in folder.iterdir()}
    assert files <= {"plan.json"}
    return Ended(process.returncode, out, err, Plan.load(folder / "plan.json") if files else None)


def pressed(profile_file: Path, folder: Path, *presses: str, gpu_memory: str = "24GB") -> Ended:
    return end(start(profile_file, folder, "\n".join(presses), gpu_memory), folder)


def check_nothing(ended: Ended) -> None:
    assert (ended.code, ended.err, ended.plan) == (130, "error: interrupted\n", None)


def check_incumbent(ended: Ended) -> None:
    assert (ended.code, ended.err) == (0, "")
    assert "interrupted: this is the best plan that was found until then" in " ".join(ended.out.split())
    assert ended.plan is not None
    assert ended.plan.solver is not None
    assert ended.plan.solver.status == "feasible"
    assert 0 < ended.plan.solver.bound_s <= ended.plan.solver.objective_s
    assert ended.plan.predicted is not None
    assert ended.plan.predicted.peak_bytes["gpu"] <= 24 * 10**9


@pytest.mark.parametrize("press", [AMID_THE_BOUNDS, BEFORE_ANY_PLAN])
def test_nothing_is_written_before_there_is_a_plan(profile_file: Path, tmp_path: Path, press: str) -> None:
    check_nothing(pressed(profile_file, tmp_path, press))


@pytest.mark.parametrize("press", [AFTER_THE_RECIPES, WHILE_DESCENDING, BEFORE_A_PROGRAM, AMID_THE_PROOF])
def test_the_best_plan_so_far_is_written(profile_file: Path, tmp_path: Path, press: str) -> None:
    check_incumbent(pressed(profile_file, tmp_path, press))


def test_other_processes_end_too(profile_file: Path, tmp_path: Path) -> None:
    check_incumbent(pressed(profile_file, tmp_path, OTHER_PROCESSES, AMID_OTHER_PROCESSES))


def test_a_second_one_ends_all(profile_file: Path, tmp_path: Path) -> None:
    check_nothing(pressed(profile_file, tmp_path, AFTER_THE_RECIPES, AGAIN))


def test_nothing_is_written_while_infeasibility_is_explained(profile_file: Path, tmp_path: Path) -> None:
    check_nothing(pressed(profile_file, tmp_path, WHILE_EXPLAINING, gpu_memory="6GB"))


@pytest.mark.parametrize("after_s", [0.3, 1.0, 2.5])
def test_at_any_moment(profile_file: Path, tmp_path: Path, after_s: float) -> None:
    process = start(profile_file, tmp_path, "")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    ended = end(process, tmp_path)
    if ended.code == 130:
        check_nothing(ended)
    elif "interrupted" in ended.out:
        check_incumbent(ended)
    else:
        assert ended.plan is not None  # it was done before, and perhaps about to leave
        assert ended.code in (0, -signal.SIGINT)


ONE_CORE, TWO_CORES = (f"os.sched_getaffinity = lambda _: range({count})" for count in (1, 2))
SECOND_BUDGET = 'press_in(many, "answer", calls_before=1)'
THIRD_BUDGET = 'press_in(workers, "_hand_out", calls_before=2)'  # when one of the first two is there


def swept(folder: Path, *presses: str) -> tuple[Ended, list[dict[str, str]]]:
    """What became of a sweep of three budgets, and the rows of its table."""
    large_profile(SHAPE_7B, CARD, 3, micro_batches=(2,)).save(folder / "small.json")
    command = ["solve", str(folder / "small.json"), "--batch-size", "2", "-o", str(folder / "plan.json")]
    command += ["--sweep", "gpu-memory=16GB:24GB:4GB", "--host-memory", "100GB"]
    code = DRIVER.format(presses="\n".join(presses))
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=GUARD_S)
    plan, table = folder / "plan.json", folder / "plan.csv"
    rows = list(csv.DictReader(table.read_text().splitlines())) if table.exists() else []
    return Ended(done.returncode, done.stdout, done.stderr, Plan.load(plan) if plan.exists() else None), rows


@pytest.mark.parametrize("presses", [(ONE_CORE, SECOND_BUDGET), (TWO_CORES, THIRD_BUDGET)], ids=["in turn", "beside"])
def test_what_a_sweep_has_solved_is_written(tmp_path: Path, presses: tuple[str, str]) -> None:
    ended, rows = swept(tmp_path, *presses)
    assert (ended.code, ended.plan is not None) == (0, True)
    assert "interrupted: Ctrl-C came first" in " ".join(ended.out.split())
    statuses = [row["status"] for row in rows]
    assert (len(statuses), statuses.count("interrupted")) == (3, 2)
    assert all(float(row["step_s"]) > 0 for row in rows if row["status"] != "interrupted")


def test_a_sweep_that_has_solved_nothing_writes_nothing(tmp_path: Path) -> None:
    ended, rows = swept(tmp_path, ONE_CORE, 'press_in(many, "answer")')
    assert (ended.code, ended.plan, rows) == (130, None, [])


def test_highs_stops_amid_a_program(tmp_path: Path) -> None:
    """Without an end of its own for ten minutes; the guard sees to it that it does not go on."""
    code = """
import os, signal, threading
from lazysched.solver.highs import solve_problem
from lazysched.solver.interrupts import INTERRUPTS
from tests.solver.test_highs import knapsack
problem, _ = knapsack(300, 9000)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
with INTERRUPTS.handled():
    try:
        print(solve_problem(problem, gap=0.0, time_limit_s=600, seed=0))
    except KeyboardInterrupt:
        print("stopped")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD_S, check=False)
    assert (done.stdout, done.stderr) == ("stopped\n", "")
