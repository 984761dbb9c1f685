"""Training some parameters only, from the command line: profile, solve, train, resume."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lazysched.cli import main
from lazysched.errors import UsageError
from lazysched.schemas import Plan, Profile
from tests.end_to_end.small_runs import SmallRun, weights_of
from tests.end_to_end.tiny_folder import make_data, make_model
from tests.one_thread import one_thread

__all__ = ["one_thread"]

LAST = ["--trainable", "layers.2.", "--trainable", "^model.norm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data, and a plan that trains the last of three blocks and the final norm."""
    folder = tmp_path_factory.mktemp("frozen")
    make_model(folder / "model")
    make_data(folder / "rows.jsonl")
    profile, plan = str(folder / "profile.json"), str(folder / "plan.json")
    shape = ["--seq-len", "16", "--micro-batch", "2", "--device", "cpu"]
    assert main(["profile", str(folder / "model"), "-o", profile, *shape, *LAST]) == 0
    assert main(["solve", profile, "--batch-size", "4", "-o", plan, "--gpu-memory", "1GB", "--host-memory", "1GB"]) == 0
    return folder


def train(folder: Path, output: Path, *flags: str, steps: int = 2) -> list[str]:
    inputs = ["--model", str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--device", "cpu"]
    run = ["--plan", str(folder / "plan.json"), "--output-dir", str(output), "--max-steps", str(steps)]
    return ["train", *inputs, *run, *flags]


def test_only_what_the_pattern_says_is_trained(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, plan = Profile.load(folder / "profile.json"), Plan.load(folder / "plan.json")
    assert plan.trainable == profile.trainable == ["layers.2.", "^model.norm"]
    structures = [stage.structure for stage in profile.stages]
    assert structures[1:-1] == ["LlamaDecoderLayer-forward"] * 2 + ["LlamaDecoderLayer"]
    [forward] = profile.variants["LlamaDecoderLayer-forward"][2]
    assert (forward.backward.median_s, forward.working_backward_bytes) == (0.0, 0)
    assert main(train(folder, tmp_path / "out", "--learning-rate", "1e-2")) == 0
    assert "trained: layers.2., ^model.norm: 7,776 of 26,368 parameters (29.5 %)" in capsys.readouterr().out
    before, after = (load_file(path / "model.safetensors") for path in (folder / "model", tmp_path / "out"))
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in after if "layers.2." in name or name == "model.norm.weight"}
    report = (tmp_path / "out" / "report.html").read_text()
    frozen = r"weights [^<]*, frozen: no gradients, no state, saves nothing"
    assert re.search(rf"<th>block\.0\.\.1</th><td>{frozen}</td>", report)


@pytest.mark.parametrize(
    "patterns", [["^model.norm", "layers.2."], ["layers.2.self", "layers.2.mlp", "layers.2.*norm", r"model\.norm"]]
)
def test_other_words_for_the_same_parameters_are_fine(folder: Path, tmp_path: Path, patterns: list[str]) -> None:
    flags = [part for pattern in patterns for part in ("--unfrozen-parameters", pattern)]
    assert main(train(folder, tmp_path / "out", "--dry-run", *flags)) == 0


def test_what_the_plan_does_not_train_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(train(folder, tmp_path / "out", "--trainable", "layers.1.")) == 2
    error = capsys.readouterr().err
    refusal = "trainable: layers.1., the plan trains layers.2., ^model.norm; profile and solve for it, or leave it out"
    assert error == f"error: {refusal}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainable", "layers.7."], "trainable: 'layers.7.' is in no parameter's name; they look like model.layers"),
        (["--trainable", "["], "trainable: '[' is no regular expression"),
        (["--trainable", ""], "trainable: '' is in every name"),
    ],
)
def test_profiling_refuses_wrong_patterns_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    target = tmp_path / "profile.json"
    assert (
        main(["profile", str(folder / "model"), "-o", str(target), "--device", "cpu", "--seq-len", "16", *flags]) == 2
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not target.exists()


def test_without_a_plan_the_pattern_is_profiled_and_kept_apart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAZYSCHED_PROFILES", str(tmp_path / "profiles"))
    own = [
        flag
        for flag in train(folder, tmp_path / "out", "--dry-run")
        if flag not in ("--plan", str(folder / "plan.json"))
    ]
    shape = ["--per-device-train-batch-size", "2", "--max-length", "16", "--gpu-memory", "1GB", "--host-memory", "1GB"]
    assert main([*own, *shape, *LAST]) == 0
    assert "trained: layers.2., ^model.norm: 7,776 of 26,368 parameters (29.5 %)" in capsys.readouterr().out
    assert main([*own, *shape]) == 0
    said = capsys.readouterr().out
    assert "measured before" not in said
    assert "trained: everything: 26,368 of 26,368 parameters (100 %)" in said
    assert len(list((tmp_path / "profiles").iterdir())) == 2
    assert main([*own, *shape, "--trainable", "("]) == 2


def test_a_resumed_run_has_the_same_bits_and_trains_the_same_parameters(tmp_path: Path) -> None:
    run = SmallRun.make(tmp_path)
    plan = run.plan(trainable=["layers.1.mlp", "norm"])
    run.train(plan, tmp_path / "whole", 4, save_steps=2)
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", cut / "checkpoint-2")
    parts = {name.split(" ")[0] for name in weights_of(cut / "checkpoint-2")}
    assert any(name.startswith("model.layers.1.mlp.up_proj.weight.first") for name in parts)
    assert not any(name.startswith("model.layers.0.mlp.up_proj.weight.") for name in parts)
    with pytest.raises(
        UsageError, match=r"^trainable: None, and .* was made with layers.1.mlp, norm; give a plan that"
    ):
        run.train(run.plan(), cut, 4, resume=True)
    run.train(plan, cut, 4, resume=True, save_steps=2)
    assert weights_of(cut) == weights_of(tmp_path / "whole")
