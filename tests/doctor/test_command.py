"""``lazysched doctor``: text, JSON, exit codes, what it refuses; with real children, and with a torch that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lazysched.cli import main
from lazysched.doctor import examine as examining
from lazysched.doctor.examine import examine, probes
from lazysched.doctor.looking import Probe, Verdict, ok, problem
from lazysched.doctor.report import Report
from lazysched.doctor.scene import Scene
from tests.doctor.scenes import HUNG, WITH_GPU, WITHOUT_GPU, scene
from tests.doctor.test_gpu import OTHER_CARD
from tests.packaging.test_cli import refused

ROOT = Path(__file__).resolve().parents[2]
OF_GPU, OF_MODEL = {"driver", "link", "numa", "pinning"}, {"tokenizer", "vocabulary"}
ALWAYS = {
    "python", "packages", "torch", "host_memory", "memlock", "wsl", "threads", "optimizer", "graphs", "disk",
    "direct_io", "free_space",
}  # fmt: skip


def broken() -> Verdict:
    raise RuntimeError("a probe with a mistake")


FINE, BAD = Probe("fine", lambda: ok("it is")), Probe("bad", lambda: problem("it is [not]", "mend it"))
BROKEN = Probe("broken", broken)


def finds(monkeypatch: pytest.MonkeyPatch, *found: Probe) -> None:
    monkeypatch.setattr(examining, "probes", lambda made: list(found))


@pytest.mark.parametrize(
    ("found", "options", "code"),
    [
        ([FINE], [], 0),
        ([FINE, BAD], [], 1),
        ([FINE, BROKEN], [], 1),
        ([FINE, BROKEN], ["--allow-unknown"], 0),
        ([BAD, BROKEN], ["--allow_unknown"], 1),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, found: list[Probe], options: list[str], code: int, form: list[str]
) -> None:
    finds(monkeypatch, *found)
    assert main(["doctor", *options, *form]) == code


def test_json_is_a_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    finds(monkeypatch, FINE, BAD, BROKEN)
    main(["doctor", "--json"])
    printed = capsys.readouterr().out
    assert json.loads(printed) == {
        "version": 1,
        "findings": [
            {"probe": "fine", "status": "ok", "detail": "it is", "remedy": None},
            {"probe": "bad", "status": "problem", "detail": "it is [not]", "remedy": "mend it"},
            {
                "probe": "broken",
                "status": "unknown",
                "detail": "the probe failed: RuntimeError: a probe with a mistake",
                "remedy": None,
            },
        ],
    }
    assert Report.model_validate_json(printed).count("unknown") == 1


def test_text_is_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    finds(monkeypatch, FINE, BAD, BROKEN)
    main(["doctor"])
    printed = capsys.readouterr().out
    for shown in ("fine", "it is [not]", "→ mend it", "unknown", "1 ok, 1 problem, 1 unknown"):
        assert shown in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--dir", "absent"], "--dir: absent is no folder; make it, or name another"),
        (["--dir", "file"], "--dir: file is no folder"),
        (["--model", "absent"], "--model: absent holds no config.json; name the folder of a model"),
        (["--model", "."], "--model: . holds no config.json"),
        (["--device", "tpu"], "tpu"),
        (["--fix"], "--fix"),
    ],
)
def test_wrong_usage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert named in refused(capsys, ["doctor", *arguments])


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({"torch": WITH_GPU}, ALWAYS | OF_GPU | {"gpu"}),
        ({"torch": WITH_GPU, "device": "cpu"}, ALWAYS),
        ({"torch": WITHOUT_GPU}, ALWAYS | {"gpu"}),
        ({"torch": WITHOUT_GPU, "device": "cuda"}, ALWAYS | OF_GPU | {"gpu"}),
        ({"torch": WITHOUT_GPU, "model": Path()}, ALWAYS | OF_MODEL | {"gpu"}),
    ],
)
def test_probes_that_mean_something(tmp_path: Path, made: dict[str, object], expected: set[str]) -> None:
    names = [probe.name for probe in probes(scene(tmp_path, OTHER_CARD, **made))]  # type: ignore[arg-type]
    assert set(names) == expected
    assert len(names) == len(expected)


def test_on_a_machine_that_shows_nothing_no_look_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the system, no child that answers: what is ok is what this process sees itself."""
    monkeypatch.setattr("lazysched.doctor.scene.ask_child", lambda *arguments: refuse())
    monkeypatch.setattr("lazysched.doctor.children.subprocess.Popen", lambda *arguments, **named: refuse())
    statuses = {
        finding.probe: finding.status for finding in examine(scene(tmp_path, torch=HUNG, pinning=HUNG)).findings
    }
    seen_otherwise = {"python", "packages", "threads", "direct_io", "free_space", "memlock"}
    assert {name for name, status in statuses.items() if status != "unknown"} <= seen_otherwise
    assert (ALWAYS | OF_GPU | {"gpu"}) == set(statuses)


def refuse() -> None:
    raise PermissionError(1, "Operation not permitted")


def test_a_real_child(tmp_path: Path) -> None:
    found = Scene(tmp_path, device="cpu").self_test()
    assert (found.built, found.on_gpu, found.wrong) == (True, None, [])


@pytest.mark.slow
def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--device", "cpu", "--dir", str(tmp_path)])
    report = Report.model_validate_json(capsys.readouterr().out)
    assert code == report.exit_code()
    assert {finding.probe for finding in report.findings} == ALWAYS
    found = {finding.probe: finding for finding in report.findings}
    assert (found["torch"].status, found["optimizer"].status) == ("ok", "ok"), report
    assert "same bits as the reference" in found["optimizer"].detail


def test_without_a_torch_that_loads(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch here')", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "lazysched", "doctor", "--json", "--device", "cpu"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    found = {finding.probe: finding for finding in Report.model_validate_json(result.stdout).findings}
    for name in ("torch", "optimizer"):
        assert (found[name].status, found[name].detail) == ("unknown", "failed: ModuleNotFoundError: no torch here")
    for name in ("python", "threads", "memlock", "direct_io"):
        assert found[name].status in {"ok", "problem"}, found[name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu(tmp_path: Path) -> None:
    """What depends on the machine may be unknown; what this test itself uses may not."""
    report = examine(Scene(tmp_path, device="cuda"))
    found = {finding.probe: finding for finding in report.findings}
    assert set(found) == ALWAYS | OF_GPU | {"gpu"}
    assert torch.cuda.get_device_name(0) in found["gpu"].detail
    for name in ("torch", "gpu", "optimizer", "graphs", "pinning"):
        assert found[name].status == "ok", found[name]
    assert "triton on the GPU" in found["optimizer"].detail
    assert all("the probe failed" not in finding.detail for finding in report.findings), report
