"""What may be loaded by what: each case is a process of its own, far from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lazysched.solver import solve
from lazysched.step_rows import StepRow
from tests.solver.synthetic import tiny_profile

ROOT = Path(__file__).resolve().parents[2]
REPORT = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"


def _loaded(tmp_path: Path, code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after ``code``."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"{code}\n{REPORT}"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split())


def _import_all(room: str) -> str:
    """Code that imports every module of a room's folder, but for the one that needs Triton where there is none."""
    has_triton = find_spec("triton") is not None
    files = sorted(file for file in (ROOT / room).rglob("*.py") if has_triton or "triton" not in file.name)
    names = [".".join(("lazysched", *file.relative_to(ROOT).with_suffix("").parts)) for file in files]
    return "\n".join(f"import {name.removesuffix('.__init__')}" for name in names)


@pytest.mark.parametrize(
    "code",
    [
        "import lazysched",
        "from lazysched import Plan, Profile, Program",
        "import lazysched.cli; assert lazysched.cli.main(['--help']) == 0",
        "import lazysched.cli; assert lazysched.cli.main(['train', '--help']) == 0",
        "import lazysched.cli; assert lazysched.cli.main(['train', '--plan=p', '--model=m', '--data=d', "
        "'--output-dir=o']) == 2",
        "import lazysched.cli; assert lazysched.cli.main(['explain', '--help']) == 0",
        "import lazysched.cli; assert lazysched.cli.main(['explain', 'p']) == 2",
        "import lazysched.cli; assert lazysched.cli.main(['simulate', 'p']) == 2",
        "import lazysched.cli; assert lazysched.cli.main(['compare', 'p', 'q']) == 2",
        "import lazysched.cli; assert lazysched.cli.main(['report', '--help']) == 0",
        "import lazysched.cli; assert lazysched.cli.main(['train', '--report-to=nobody', '--plan=p', '--model=m', "
        "'--data=d', '--output-dir=o']) == 2",
        "import lazysched.cli; assert lazysched.cli.main(['doctor', '--help']) == 0",
        "import lazysched.cli; assert lazysched.cli.main(['doctor', '--dir', 'absent']) == 2",
        "import lazysched.doctor.examine, lazysched.doctor.child",
        "import lazysched.profiles.refine",
        "import lazysched.profiles.estimate, lazysched.profiles.library_files, lazysched.profiles.shapes",
    ],
)
def test_light_entries_load_nothing_heavy(tmp_path: Path, code: str) -> None:
    assert not _loaded(tmp_path, code) & {"torch", "transformers", "pulp", "reasoning_gym"}


def test_planning_by_an_estimate_never_loads_torch(tmp_path: Path) -> None:
    config = '{"model_type": "llama", "num_hidden_layers": 2}'
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    arguments = ["solve", "--hardware", "rtx4090", "--model", "config.json", "--batch-size", "2", "-o", "plan.json"]
    code = f"import lazysched.cli; assert lazysched.cli.main({arguments}) == 0"
    assert not _loaded(tmp_path, code) & {"torch", "transformers"}
    assert (tmp_path / "plan.json").is_file()


def test_the_solver_never_loads_torch(tmp_path: Path) -> None:
    assert not _loaded(tmp_path, _import_all("solver")) & {"torch", "transformers"}


@pytest.mark.parametrize("command", ["explain --time-limit 0 p.json", "simulate p.json", "compare p.json p.json"])
def test_looking_at_plans_never_loads_torch(tmp_path: Path, command: str) -> None:
    profile = tiny_profile(2)
    solve(profile, batch_size=1, gpu_memory_bytes=10**8, host_memory_bytes=10**9).plan.save(tmp_path / "p.json")
    code = f"import lazysched.cli; assert lazysched.cli.main({command.split()!r}) == 0"
    assert not _loaded(tmp_path, code) & {"torch", "transformers"}


def test_looking_at_a_run_never_loads_torch(tmp_path: Path) -> None:
    row = StepRow(0, 1.0, 1.0, 1e-3, tokens=8, trained_tokens=4, step_s=0.5, skipped=False)
    (tmp_path / "log.jsonl").write_text(row.as_line())
    assert not _loaded(tmp_path, "import lazysched.cli; assert lazysched.cli.main(['report', '.']) == 0") & {
        "torch", "transformers",
    }  # fmt: skip
    assert (tmp_path / "report.html").is_file()


def test_sweeping_budgets_never_loads_torch(tmp_path: Path) -> None:
    tiny_profile(2).save(tmp_path / "profile.json")
    budgets = ["--host-memory", "1GB", "--sweep", "gpu-memory=50MB:100MB:50MB"]
    command = ["solve", "profile.json", "--batch-size", "1", *budgets, "-o", "p.json"]
    code = f"import lazysched.cli; assert lazysched.cli.main({command!r}) == 0"
    assert not _loaded(tmp_path, code) & {"torch", "transformers"}


@pytest.mark.parametrize("room", ["runtime", "profiles"])
def test_runtime_and_profiles_never_load_the_solver(tmp_path: Path, room: str) -> None:
    assert not _loaded(tmp_path, _import_all(room)) & {"pulp", "highspy"}


def test_the_three_steps_are_functions(tmp_path: Path) -> None:
    code = "import lazysched; assert all(callable(getattr(lazysched, n)) for n in ('profile', 'solve', 'train'))"
    _loaded(tmp_path, code)


def test_an_unknown_name_is_an_attribute_error(tmp_path: Path) -> None:
    _loaded(tmp_path, "import lazysched; assert not hasattr(lazysched, 'optimise')")
