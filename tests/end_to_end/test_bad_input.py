"""Bad input: one line that says what to do, the right exit code, nothing left behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from lazysched.cli import main
from lazysched.step_rows import LOG_FILE
from tests.bad_input.files import Files, edit, prepare
from tests.end_to_end.tiny_folder import make_model


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return prepare(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def files(prepared: Files, tmp_path: Path) -> Files:
    """Copies that a test may spoil."""
    return prepared.copied_to(tmp_path / "copies")


def train(files: Files, *extra: str) -> int:
    return main(
        ["train", "--plan", str(files.plan), "--model", str(files.model), "--data", str(files.data), "--output-dir",
         str(files.output), "--device", "cpu", "--max-steps", "4", *extra]
    )  # fmt: skip


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What stands on stderr: exactly one line, no traceback."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def test_the_prepared_input_trains(files: Files) -> None:
    assert train(files) == 0
    assert (files.output / "model.safetensors").is_file()


def test_missing_data(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.data.unlink()
    assert train(files) == 2
    assert "data.jsonl" in one_line(capsys)


def test_truncated_safetensors(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    weights = files.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert train(files) == 2
    assert "truncated or damaged" in one_line(capsys)
    assert not files.output.exists()


def grow_tokenizer(files: Files, **special: str) -> None:
    """Give the tokenizer more tokens than the embedding has rows; the last is the word ``extra``."""
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    rows = json.loads((files.model / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([*(f"more{i}" for i in range(rows)), "extra"])
    tokenizer.add_special_tokens(special)
    tokenizer.save_pretrained(files.model)


def test_a_tokenizer_larger_than_the_embedding(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    grow_tokenizer(files)
    assert train(files) == 0  # no row of the data has such a token
    capsys.readouterr()
    with files.data.open("a") as data:
        data.write(json.dumps({"question": "what is extra", "answer": "extra"}) + "\n")
    assert train(files) == 2
    assert re.search(
        r"tokenizer: the data has the token id \d+, the model's embedding only \d+ rows;", one_line(capsys)
    )


def test_a_pad_beyond_the_embedding_does_no_harm(files: Files) -> None:
    grow_tokenizer(files, pad_token="<pad>")
    assert train(files) == 0


def test_plan_for_another_model(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in files.model.iterdir():
        path.unlink()
    make_model(files.model, hidden_size=48)
    capsys.readouterr()  # transformers shows a bar while it writes
    assert train(files) == 2
    assert "solve for this model" in one_line(capsys)
    assert not files.output.exists()


def test_plan_for_other_hardware_warns_and_trains(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    edit(files.plan, lambda plan: plan.update(hardware_id="some-other-machine[/red]"))
    assert train(files) == 0
    assert "solved for some-other-machine[/red]" in " ".join(capsys.readouterr().out.split())


def test_plan_with_an_unknown_key(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    edit(files.plan, lambda plan: plan["stages"]["block.0"].update(wieghts="gpu"))
    assert train(files) == 2
    assert "stages.block.0.wieghts: unknown key" in one_line(capsys)


def test_plan_whose_saved_bytes_are_wrong(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    measured = json.loads(files.profile.read_text())["variants"]["LlamaDecoderLayer"]

    def spoil(plan: dict) -> None:
        variants = measured[str(plan["micro_batch"])]
        variant = next(variant for variant in variants if variant["name"] == "all")
        variant["saved"]["intermediates"] += 256
        plan["profile"] = None  # or the plan would contradict it
        plan["variants"]["LlamaDecoderLayer:all"] = variant
        for stage, choice in plan["stages"].items():
            if stage.startswith("block."):
                choice.update(save="all", saved_tiers={"intermediates": "gpu"})

    edit(files.plan, spoil)
    assert train(files) == 1
    assert "profile and solve again" in one_line(capsys)
    assert not files.output.exists()


@pytest.mark.parametrize("change", [{"compiled": True}, {"saved": {}}])
def test_plan_whose_variants_are_not_what_runs(
    files: Files, change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(plan: dict) -> None:
        next(variant for key, variant in plan["variants"].items() if key.startswith("Llama")).update(change)
        plan["profile"] = None  # or the plan would contradict it

    edit(files.plan, spoil)
    assert train(files) == 2
    assert "plan: stages.block.0." in one_line(capsys)


@pytest.mark.parametrize("text", ["", "[]"])
def test_empty_dataset(files: Files, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    files.data.write_text(text)
    assert train(files) == 2
    assert "data.jsonl" in one_line(capsys)


def test_all_labels_masked(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    long_question = " ".join(["what"] * 40)
    files.data.write_text(json.dumps({"question": long_question, "answer": "one"}) + "\n")
    assert train(files) == 2
    assert "all labels are masked" in one_line(capsys)


def test_batch_that_cannot_fit(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.plan.unlink()
    command = ["solve", str(files.profile), "--batch-size", "4", "--gpu-memory", "100KB", "-o", str(files.plan)]
    assert main(command) == 1
    message = one_line(capsys)
    assert "gpu" in message.lower()
    assert "+" in message
    assert "--gpu-memory" in message
    assert not files.plan.exists()


def test_batch_size_that_no_micro_batch_divides(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.plan.unlink()
    assert main(["solve", str(files.profile), "--batch-size", "3", "-o", str(files.plan)]) == 2
    assert "3" in one_line(capsys)
    assert not files.plan.exists()


def test_a_profile_without_a_rate_of_the_format(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    edit(files.profile, lambda profile: profile["update"]["cpu"].pop("hybrid8"))
    command = ["solve", str(files.profile), "--batch-size", "4", "-o", str(files.plan)]
    assert main(command) == 2
    assert "profile: update.cpu.hybrid8: not measured (missing); profile again" in one_line(capsys)
    assert main([*command, "--optimizer-state", "fp32"]) == 0
    assert {choice["state_format"] for choice in json.loads(files.plan.read_text())["stages"].values()} == {"fp32"}
    assert train(files) == 0


def test_clipping_with_a_plan_that_updates_before_the_norm_is_known(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["solve", str(files.profile), "--batch-size", "4", "-o", str(files.plan), "--no-finite-check"]
    assert main(command) == 2
    assert "--max-grad-norm 0 --no-finite-check" in one_line(capsys)
    assert main([*command, "--max-grad-norm", "0"]) == 0
    assert train(files, "--max-grad-norm", "1") == 2
    assert "max_grad_norm: 1.0: this plan updates before the gradient norm is known" in one_line(capsys)
    assert not files.output.exists()
    assert train(files) == 0


def test_losses_that_are_not_finite_stop_the_run(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    path = files.model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 1e38)  # finite, logits are not
    save_file(tensors, path, metadata={"format": "pt"})
    assert train(files) == 1
    assert "3 steps in a row, last in head" in one_line(capsys)
    assert [file.name for file in files.output.iterdir()] == [LOG_FILE]


def test_an_output_folder_with_other_files_is_left_alone(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.output.mkdir()
    (files.output / "thesis.txt").write_text("years of work")
    assert train(files) == 2
    assert "thesis.txt" in one_line(capsys)
    assert (files.output / "thesis.txt").read_text() == "years of work"


def test_a_damaged_tokenizer(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    (files.model / "tokenizer.json").write_text("{")
    assert train(files) == 2
    assert "tokenizer cannot be read" in one_line(capsys)


def test_folders_of_other_people_beside_the_output_stay(files: Files) -> None:
    others = [files.output.with_name(f".out.{name}") for name in ("tmp-notes", "old-backup")]
    for folder in others:
        folder.mkdir()
        (folder / "thesis.txt").write_text("years of work")
    assert train(files) == 0
    assert all((folder / "thesis.txt").is_file() for folder in others)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--adam-beta1", "1"], "adam_beta1"),
        (["--weight-decay", "inf"], "weight_decay"),
        (["--learning-rate", "nan"], "learning-rate"),
        (["--adam-epsilon", "1e-31"], "adam_epsilon"),
        (["--warmup-ratio", "1.5"], "warmup-ratio"),
        (["--num-train-epochs", "0", "--max-steps", "1"], "num_train_epochs"),
    ],
)
def test_numbers_out_of_range(files: Files, flags: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(files, *flags) == 2
    assert word in one_line(capsys)
