"""``lazysched data prepare`` and ``data preview`` as a person runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lazysched.cli import main
from lazysched.runtime.data import dataset as dataset_module
from tests.end_to_end.tiny_folder import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data") / "model")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {"question": "what is one plus two", "answer": "the answer is three"},
        {"question": "what is one plus two plus one plus two plus one plus two", "answer": "nine"},
        {"question": "two plus two", "answer": "the answer is four plus one plus one"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(verb: str, data: Path | str, model: Path, *extra: str) -> int:
    return main(["data", verb, "--data", str(data), "--model", str(model), "--seq-len", "16", *extra])


SHOWN = """\
row 1: 15 tokens, 5 trained
- <s>│user│what│is│one│plus│two│</s>│<s>│assistant
+ the│answer│is│three│</s>
row 2: 16 tokens, 0 trained, dropped, answer beyond the sequence length
- <s>│user│what│is│one│plus│two│plus│one│plus│two│plus│one│plus│two│</s>
row 3: 16 tokens, 8 trained, cut at the sequence length
- <s>│user│two│plus│two│</s>│<s>│assistant
+ the│answer│is│four│plus│one│plus│one
"""


def test_preview_marks_what_is_trained(data: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("preview", data, model) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(SHOWN)
    counts, lengths, folder = shown.removeprefix(SHOWN).splitlines()
    assert counts.endswith(
        "2 of 3 rows: 31 tokens, 13 of them trained, 1 dropped, answer beyond the sequence length, 1 truncated"
    )
    assert lengths == "tokens a row: shortest 15, median 15, 95 % 15, longest 16"
    assert Path(folder.removeprefix("tokens: ")).is_dir()


@pytest.mark.parametrize(("rows", "lines"), [("3:4", slice(5, 8)), ("2:", slice(3, 8)), ("-2:-1", slice(3, 5))])
def test_preview_of_chosen_rows(
    data: Path, model: Path, rows: str, lines: slice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("preview", data, model, "--rows", rows) == 0
    assert capsys.readouterr().out.splitlines()[:-3] == SHOWN.splitlines()[lines]


def test_prepare_says_where_and_train_would_find_it(
    data: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("prepare", data, model) == 0
    prepared = capsys.readouterr().out
    monkeypatch.setattr(dataset_module, "Encoder", None)  # nothing is tokenised again
    assert run("prepare", data, model) == 0
    assert capsys.readouterr().out == prepared
    assert "2 of 3 rows" in prepared


def test_a_folder_for_tokens(data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prepare", data, model, "--cache-dir", str(tmp_path / "tokens")) == 0
    (folder,) = (tmp_path / "tokens").iterdir()
    assert f"tokens: {folder}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--rows", "9:"], "rows: none of the data's 3 rows, counted from 1; give others with --rows"),
        (["--rows", "x"], "--rows: 'x' is not a range"),
        (["--data-format", "qa"], "data_format: 'qa' is not known; use one of messages,"),
        (["--data-format", "text"], "row 1: no key 'text', which the format text needs"),
    ],
)
def test_refuses(data: Path, model: Path, extra: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("preview", data, model, *extra) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_data_come_before_the_model_is_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prepare", tmp_path / "no.jsonl", tmp_path / "no-model") == 2
    assert "no.jsonl: no such file" in capsys.readouterr().err
