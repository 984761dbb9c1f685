"""The command line: what it refuses, what it calls, how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from lazysched.cli import app, main
from lazysched.errors import InfeasibleError, RunError
from lazysched.profiles.library_files import load_hardware
from lazysched.schemas import Figure, Hardware, Plan, Profile

ROOT = Path(__file__).resolve().parents[2]

PROFILE = Profile(
    hardware_id="any", model_id="tiny", device="cpu", compute_dtype="float32", seq_len=8, loss_chunk_tokens=8,
    stages=[], variants={}, links={}, update={}, total_bytes={}, free_bytes={},
)  # fmt: skip
PLAN = Plan(
    model_id="tiny", hardware_id="any", compute_dtype="float32", batch_size=2, seq_len=8, micro_batch=2,
    accumulation=1, loss_chunk_tokens=8, stages={}, variants={}, budget_bytes={},
)  # fmt: skip
TRAIN = ["train", "--model", "m", "--data", "d.jsonl", "--output-dir", "out"]


class Calls(dict[str, Any]):
    """Stands in for a computing function: keeps what it was called with."""

    def __init__(self, result: object = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.result, self.error = result, error
        self.positional: tuple[Any, ...] = ()

    def __call__(self, *positional: Any, **keywords: Any) -> object:
        self.positional = positional
        self.update(keywords)
        if self.error is not None:
            raise self.error
        return self.result


class Solution:
    """What the command reads of a solution."""

    plan = PLAN


def replace_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    """Put a module that holds ``content`` in the place of the real one."""
    module = ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    PROFILE.save("profile.json")
    PLAN.save("plan.json")
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], exit_code: int = 2) -> str:
    """The one line on stderr of a command that is refused."""
    assert main(arguments) == exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["solve", "absent.json", "--batch-size", "2", "-o", "p.json"], "absent.json: no such file"),
        (["solve", "profile.json", "-o", "p.json"], "--batch-size"),
        (["solve", "profile.json", "--batch-size", "0", "-o", "p.json"], "--batch-size"),
        (["solve", "profile.json", "--batch-size", "2", "--nvme", "lots", "-o", "p.json"], "--nvme: 'lots'"),
        (["solve", "profile.json", "--batch-size", "2", "-o", "absent/p.json"], "folder absent does not exist"),
        (["solve", "profile.json", "--batch-size", "2", "--optimizer-state", "int4", "-o", "p"], "--optimizer-state"),
        (["profile", "model", "-o", "."], "is a folder"),
        (["profile", "-o", "p.json"], "MODEL: missing"),
        (["profile", "model", "--pin-limit", "lots", "-o", "p.json"], "--pin-limit: 'lots' is not a size"),
        (["profile", "model", "--pin-limit", "-5GB", "-o", "p.json"], "--pin-limit: '-5GB' is not a size"),
        (["profile", "model", "--pin-limit", "16", "-o", "p.json"], "--pin-limit: '16' is not a size"),
        (
            ["profile", "--pin-limit", "1GB", "--from-run", ".", "--profile", "profile.json", "-o", "p"],
            "--pin-limit: means nothing",
        ),
        (["profile", "--profile", "profile.json", "-o", "p.json"], "--from-run: missing"),
        (["profile", "--from-run", ".", "-o", "p.json"], "--profile: missing"),
        (["profile", "model", "--from-run", ".", "--profile", "profile.json", "-o", "p.json"], "MODEL: means nothing"),
        (["profile", "--seq-len", "8", "--from-run", ".", "--profile", "profile.json", "-o", "p"], "--seq-len: means"),
        (["profile", "--packing", "--from-run", ".", "--profile", "profile.json", "-o", "p"], "--packing: means"),
        (["profile", "--from-run", "out", "--profile", "profile.json", "-o", "p.json"], "out: no such folder"),
        (["profile", "--from-run", ".", "--profile", "profile.json", "-o", "p.json"], "has no measured_ops.json"),
        (["profile", "--from-run", ".", "--profile", "plan.json", "-o", "p.json"], "is a plan, not a profile"),
        (["solve", "--batch-size", "2", "-o", "p.json"], "PROFILE: missing"),
        (["solve", "--hardware", "rtx4090", "--batch-size", "2", "-o", "p.json"], "--model: missing"),
        (["solve", "--model", "config.json", "--batch-size", "2", "-o", "p.json"], "PROFILE: missing"),
        (
            ["solve", "profile.json", "--hardware", "rtx4090", "--batch-size", "2", "-o", "p.json"],
            "--hardware: means nothing beside PROFILE",
        ),
        (["solve", "profile.json", "--seq-len", "8", "--batch-size", "2", "-o", "p.json"], "--seq-len: means nothing"),
        (
            ["solve", "profile.json", "--micro-batch", "2", "--batch-size", "2", "-o", "p.json"],
            "--micro-batch: 2: the profile has figures for none",
        ),
        (
            ["solve", "--hardware", "rtx490", "--model", "c.json", "--batch-size", "2", "-o", "p.json"],
            "'rtx490' is not in the library; use rtx4090, rtx3090, rtx5090, ",
        ),
        (
            ["solve", "--hardware", "plan.json", "--model", "c.json", "--batch-size", "2", "-o", "p.json"],
            "plan.json: is a plan, not a hardware file",
        ),
        (
            ["solve", "--hardware", "h200", "--model", "c.json", "--batch-size", "2", "-o", "p.json"],
            "model: c.json: no such file",
        ),
        (["profile", "model", "--hardware-only", "-o", "p.yaml"], "MODEL: means nothing with --hardware-only"),
        (["profile", "--hardware-only", "--seq-len", "8", "-o", "p.yaml"], "--seq-len: means nothing with --hardware"),
        (["profile", "--hardware-only", "--no-compile", "-o", "p.yaml"], "--compile: means nothing with --hardware"),
        ([*TRAIN, "--plan", "plan.json", "--trace-steps", "3"], "--trace-steps: '3'"),
        ([*TRAIN, "--plan", "absent.json"], "absent.json: no such file"),
        ([*TRAIN, "--plan", "plan.json", "--lr-scheduler-type", "step"], "--lr-scheduler-type"),
        ([*TRAIN, "--plan", "plan.json", "--save-steps", "-1"], "--save-steps"),
        ([*TRAIN, "--plan", "plan.json", "--save_total_limit", "0"], "--save-total-limit"),
        ([*TRAIN, "--plan", "plan.json", "--resume", "--resume-from-checkpoint", "x"], "resume_from_checkpoint: x"),
        (["dance"], "dance"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_and_exit_code_2(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    before = sorted(in_tmp.iterdir())
    assert named in refused(capsys, arguments)
    assert sorted(in_tmp.iterdir()) == before


def test_every_option_says_what_it_is() -> None:
    for command in get_command(app).commands.values():  # type: ignore[attr-defined]
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{command.name} {parameter.name}"


def test_an_unknown_key_of_a_plan_is_named(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (in_tmp / "plan.json").read_text(encoding="utf-8")
    (in_tmp / "edited.json").write_text(text.replace('"micro_batch"', '"microbatch"'), encoding="utf-8")
    assert "edited.json: micro" in refused(capsys, [*TRAIN, "--plan", "edited.json"])


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (RunError("disk full:\n  free some space"), 1, "error: disk full: free some space"),
        (InfeasibleError("gpu: 3 GB short"), 1, "error: gpu: 3 GB short"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
    ],
)
def test_a_failed_run_is_one_line(
    in_tmp: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    exit_code: int,
    line: str,
) -> None:
    replace_module(monkeypatch, "lazysched.runtime.train", prepare=Calls(error=error))
    assert refused(capsys, [*TRAIN, "--plan", "plan.json"], exit_code) == line


def test_our_own_bugs_keep_their_traceback(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_module(monkeypatch, "lazysched.runtime.train", prepare=Calls(error=AssertionError("broken invariant")))
    with pytest.raises(AssertionError, match="broken invariant"):
        main([*TRAIN, "--plan", "plan.json"])


@pytest.mark.parametrize("spelling", ["--gpu-memory", "--gpu_memory"])
def test_solve_passes_bytes_and_writes_the_plan(in_tmp: Path, monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
    find_plan, show = Calls(Solution), Calls()
    replace_module(monkeypatch, "lazysched.solver", solve=find_plan)
    replace_module(monkeypatch, "lazysched.solver.report", print_solution=show)
    assert main(["solve", "profile.json", "--batch-size", "2", spelling, "24GB", "-o", "new.json"]) == 0
    assert find_plan.positional == (PROFILE,)
    assert callable(find_plan.pop("report"))
    assert find_plan == {
        "batch_size": 2, "gpu_memory_bytes": 24 * 10**9, "host_memory_bytes": None, "nvme_bytes": 0,
        "executable_only": True, "pins": [], "max_grad_norm": 1.0, "check_finite": True, "optimizer_state": "hybrid8",
        "time_limit_s": 30.0, "gap": None, "seed": 0,
    }  # fmt: skip
    assert show.positional[:2] == (Solution, PROFILE)
    assert Plan.load("new.json") == PLAN


def test_norm_zero_gives_clipping_up(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_plan = Calls(Solution)
    replace_module(monkeypatch, "lazysched.solver", solve=find_plan)
    replace_module(monkeypatch, "lazysched.solver.report", print_solution=Calls())
    assert main(["solve", "profile.json", "--batch-size", "2", "--max-grad-norm", "0", "-o", "new.json"]) == 0
    assert find_plan["max_grad_norm"] is None


def test_solve_passes_format_and_check(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_plan = Calls(Solution)
    replace_module(monkeypatch, "lazysched.solver", solve=find_plan)
    replace_module(monkeypatch, "lazysched.solver.report", print_solution=Calls())
    flags = ["--optimizer-state", "fp32", "--max-grad-norm", "0", "--no-finite-check"]
    assert main(["solve", "profile.json", "--batch-size", "2", *flags, "-o", "new.json"]) == 0
    assert (find_plan["optimizer_state"], find_plan["check_finite"]) == ("fp32", False)


def test_profile_passes_every_micro_batch_and_writes(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Calls(PROFILE)
    replace_module(monkeypatch, "lazysched.profiles.measure", profile=measure)
    assert (
        main(["profile", "model", "--micro-batch", "2", "--micro-batch", "8", "--device", "cpu", "--pin-limit", "1.5GB",
              "-o", "new.yaml"]) == 0
    )  # fmt: skip
    assert measure.positional == ("model",)
    assert callable(measure.pop("report"))
    assert measure == {
        "device": "cpu", "dtype": None, "seq_len": 1024, "micro_batches": [2, 8], "storage_dir": None,
        "compiled": None, "packing": False, "pin_limit_bytes": 1_500_000_000, "trainable": None,
        "full_determinism": False,
    }  # fmt: skip
    assert Profile.load("new.yaml") == PROFILE


def test_hardware_only_measures_no_model_and_says_what_it_found(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = {
        "matmul_flop_per_s": Figure(value=7.2e14, source="measured", spread=0.02, note="8192 x 8192, 2026-11-30"),
        "cpu_update_fp32_per_s": Figure(value=9.9e8, source="measured", spread=0.64),
        "price_usd_per_hour": Figure(value=None, note="ask"),
        "context_bytes": Figure(value=None, note="ask"),
    }
    hardware = load_hardware("h200").model_copy(update=found)
    measure = Calls(hardware)
    replace_module(monkeypatch, "lazysched.profiles.hardware", measure_hardware=measure)
    flags = ["--hardware-only", "--device", "cpu", "--storage", "disk", "--pin-limit", "2GB"]
    assert main(["profile", *flags, "-o", "mine.yaml"]) == 0
    assert measure == {"device": "cpu", "storage_dir": "disk", "pin_limit_bytes": 2 * 10**9}
    assert Hardware.load("mine.yaml") == hardware
    said = capsys.readouterr()
    rows = [" ".join(line.replace("│", " ").split()) for line in said.out.splitlines()]
    assert "matmul 720 TFLOP/s 2 % 8192 x 8192" in rows
    assert "cpu update fp32 990 M parameters/s 64 %" in rows
    assert any(row.startswith("h2d 55.4 GB/s profile of") for row in rows)
    assert "no figure for context, price: ask" in rows
    assert max(len(line) for line in said.out.splitlines() if "│" in line) == 80
    warning = "1 of 2 figures vary by more than 25 % between repeats (cpu_update_fp32_per_s)"
    assert said.err.startswith(f"warning: {warning}")


def test_an_estimate_takes_the_place_of_a_profile(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_tmp / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}', encoding="utf-8")
    flags = ["--hardware", "RTX4090", "--model", "config.json", "--seq-len", "512", "--micro-batch", "2"]
    assert main(["solve", *flags, "--micro-batch", "4", "--batch-size", "4", "-o", "new.json"]) == 0
    profile = Plan.load("new.json").profile
    assert profile is not None
    assert (profile.estimated, profile.seq_len) == (True, 512)
    assert sorted(profile.variants["LlamaDecoderLayer"]) == [2, 4]
    captured = capsys.readouterr()
    assert "the profile holds estimates" in " ".join(captured.out.split())
    (line,) = captured.err.splitlines()
    assert line.startswith("note: NVIDIA GeForce RTX 4090: host memory 128 GB (assumed); assumed: a desktop with 16 ")
    assert line.endswith("library/rtx4090.yaml")


@pytest.mark.parametrize(
    ("changes", "flags", "told"),
    [
        ({}, ["--gpu-memory", "24GB", "--host-memory", "64GB"], ""),
        ({}, ["--gpu-memory", "25GB"], "note: --gpu-memory 25 GB is more than the GPU's 24 GB\n"),
        ({}, ["--host-memory", "65GB"], "note: --host-memory 65 GB is more than the host's 64 GB\n"),
        ({"estimated": True}, ["--host-memory", "65GB"], ""),
        ({"device": "cpu"}, ["--gpu-memory", "25GB", "--host-memory", "63GB"], ""),
        (
            {"device": "cpu"}, ["--gpu-memory", "25GB", "--host-memory", "64GB"],
            "note: --gpu-memory and --host-memory 89 GB is more than the machine's 88 GB\n",
        ),
        ({"device": "cpu"}, ["--host-memory", "89GB"], "note: --host-memory 89 GB is more than the machine's 88 GB\n"),
    ],
)  # fmt: skip
def test_more_memory_than_the_machine_has_is_told(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    changes: dict[str, object], flags: list[str], told: str,
) -> None:  # fmt: skip
    replace_module(monkeypatch, "lazysched.solver", solve=Calls(Solution))
    replace_module(monkeypatch, "lazysched.solver.report", print_solution=Calls())
    total_bytes = {"gpu": 24 * 10**9, "host": 64 * 10**9}
    PROFILE.model_copy(update={"device": "cuda", "total_bytes": total_bytes, **changes}).save("card.json")
    assert main(["solve", "card.json", "--batch-size", "2", *flags, "-o", "new.json"]) == 0
    assert capsys.readouterr().err == told


def test_train_passes_the_plan_and_its_flags(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = SimpleNamespace(
        measured_step_s=None,
        predicted_step_s=1.5,
        num_skipped=0,
        timed=None,
        predicted_exposed_s={},
        predicted_moved_bytes={},
        peak_bytes={},
        held_out_loss_before=None,
        output_dir=Path("out"),
    )
    run = Calls(SimpleNamespace(plan=PLAN, to_end=lambda: result))
    replace_module(monkeypatch, "lazysched.runtime.train", prepare=run)
    flags = ["--max-steps", "3", "--learning_rate", "1e-4", "--trace", "t.json", "--trace-steps", "1:3"]
    assert main([*TRAIN, "--plan", "plan.json", *flags]) == 0
    assert run.positional == (PLAN,)
    assert (run["trace"], run["trace_steps"]) == ("t.json", slice(1, 3))
    assert (run["max_steps"], run["learning_rate"], run["device"], run["max_grad_norm"]) == (3, 1e-4, None, None)


def test_the_program_ends_with_the_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lazysched", "solve", "absent.json", "--batch-size", "2", "-o", "plan.json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: absent.json: no such file; check the path\n"
