"""Reporting to other programs: the tags of transformers, only when asked, and never at the cost of the run."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazysched.errors import UsageError
from lazysched.runtime import reporters
from lazysched.runtime.reporters import NAMES, Reporters, check_reporters
from lazysched.step_rows import StepRow
from lazysched.train_config import ReporterName

ROW = StepRow(
    0, 1.5, 0.25, 1e-3, tokens=64, trained_tokens=40, step_s=0.5, skipped=False, host_rss_bytes=7, held_out_loss=2.0
)
STAND_IN = """
calls = []
class Run:
    dir = "/somewhere/wandb/offline-run-1/files"
    def log(self, values, step):
        calls.append((step, values))
        if values.get("train/loss") == 13:
            raise OSError("no\\nway")
    def finish(self):
        calls.append("finish")
def init(**arguments):
    calls.append(arguments)
    return Run()
def Settings(**arguments):
    return arguments
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Packages that note what they are asked, in place of W&B and trackio; no key is known."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for name in ("wandb", "trackio"):
        (folder / f"{name}.py").write_text(STAND_IN)
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delenv(f"{name.upper()}_PROJECT", raising=False)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


def opened(output: Path, *names: ReporterName, num_done: int = 0) -> tuple[Reporters, list[str]]:
    """Reporters, and what they said; warnings begin with ``!``."""
    lines: list[str] = []
    made = Reporters(
        names, output, {"seed": 3}, num_done=num_done, steps_per_epoch=4, say=lines.append,
        warn=lambda text: lines.append(f"!{text}"),
    )  # fmt: skip
    return made, lines


def calls_of(name: str) -> list[Any]:
    return sys.modules[name].__dict__["calls"]


SHOWN = {
    "train/loss": 1.5, "train/grad_norm": 0.25, "train/learning_rate": 1e-3, "train/epoch": 0.25, "train/step_s": 0.5,
    "train/tokens_per_s": 128.0, "train/skipped": 0.0, "train/host_rss_bytes": 7.0,
}  # fmt: skip


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_rows_arrive_under_the_names_of_transformers(stand_ins: Path, tmp_path: Path, name: ReporterName) -> None:
    with opened(tmp_path / "my-run", name)[0] as made:
        made(ROW)
    start, *rows, end = calls_of(name)
    assert (start["project"], start["name"], start["config"]) == ("lazysched", "my-run", {"seed": 3})
    assert rows == [(1, SHOWN), (1, {"eval/loss": 2.0})]
    assert end == "finish"


def test_without_a_key_wandb_is_offline_and_says_so(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lines = opened(tmp_path / "out", "wandb")
    assert lines == ["wandb: offline; upload it later with wandb sync /somewhere/wandb/offline-run-1"]
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert opened(tmp_path / "out", "wandb")[1] == ["wandb: online"]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    opened(tmp_path / "out", "wandb")
    assert [call["mode"] for call in calls_of("wandb")] == ["offline", "online", "disabled"]
    assert [call["settings"] for call in calls_of("wandb")] == [{"console": "off"}] * 3


def test_a_key_that_wandb_login_left_is_found(stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n login user\n password k\n")
    assert opened(tmp_path / "out", "wandb")[1] == ["wandb: online"]
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert opened(tmp_path / "out", "wandb")[1][0].startswith("wandb: offline")
    (tmp_path / "netrc").write_text("nonsense")
    assert opened(tmp_path / "out", "wandb")[1][0].startswith("wandb: offline")


def test_nothing_is_imported_unless_asked(stand_ins: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "out")[0] as made:
        made(ROW)
    assert not {"wandb", "trackio"} & set(sys.modules)


def test_one_that_fails_is_told_of_once_and_others_go_on(stand_ins: Path, tmp_path: Path) -> None:
    made, lines = opened(tmp_path / "out", "wandb", "trackio")
    del lines[:]
    calls_of("trackio")[:] = []
    sys.modules["trackio"].__dict__["Run"].log = lambda self, values, step: calls_of("trackio").append(step)
    made(replace(ROW, loss=13.0, held_out_loss=None))
    made(replace(ROW, step=1, held_out_loss=None))
    made.close()
    assert lines == ["!report_to: wandb failed (no way); the run goes on without it"]
    assert calls_of("trackio") == [1, 2, "finish"]
    assert "finish" not in calls_of("wandb")


def test_one_that_does_not_open_does_not_end_the_run(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stand_ins / "wandb.py").write_text("1 / 0")
    made, lines = opened(tmp_path / "out", "wandb")
    assert lines == ["!report_to: wandb failed (division by zero); the run goes on without it"]
    made(ROW)
    made.close()
    assert len(lines) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(reporters, "find_spec", lambda asked: None)
    with pytest.raises(UsageError, match=rf"report_to: {name} is not installed; run pip install 'lazysched\[{name}\]'"):
        check_reporters([name])
    with pytest.raises(UsageError, match="report_to: 'mlflow' is no reporter; name those you want of tensorboard"):
        check_reporters(["mlflow"])


def events_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture
def no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked something"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("no_prompt")
def test_tensorboard_reads_back_what_was_shown(tmp_path: Path) -> None:
    made, lines = opened(tmp_path / "out", "tensorboard")
    folder = tmp_path / "out-tensorboard"
    assert lines == [f"tensorboard: tensorboard --logdir {folder}"]
    for step in range(3):
        made(replace(ROW, step=step, loss=1.5 + step, held_out_loss=2.0 if step == 1 else None))
    assert events_of(folder)["train/loss"] == [(1, 1.5), (2, 2.5), (3, 3.5)], "before it is closed"
    made.close()
    found = events_of(folder)
    assert {tag: value for tag, ((_, value), *_) in found.items() if tag != "eval/loss"} == pytest.approx(SHOWN)
    assert found["eval/loss"] == [(2, 2.0)]
    # A run that goes on after step 2 hides what was shown of later ones.
    made, _ = opened(tmp_path / "out", "tensorboard", num_done=2)
    made(replace(ROW, step=2, loss=9.0))
    made.close()
    assert events_of(folder)["train/loss"] == [(1, 1.5), (2, 2.5), (3, 9.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("no_prompt")
def test_tensorboards_own_variable_names_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "elsewhere"))
    opened(tmp_path / "out", "tensorboard")[0].close()
    assert [*(tmp_path / "elsewhere").iterdir()]
    assert not (tmp_path / "out-tensorboard").exists()
