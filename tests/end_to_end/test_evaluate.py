"""``evaluate``: questions as in training, greedy answers, and the last number decides."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lazysched.cli import main
from lazysched.runtime import exact_match as module
from lazysched.runtime.exact_match import exact_match, last_number
from tests.end_to_end.tiny_folder import make_model

ROWS = [("one plus two", "the answer is 3"), ("ten", "#### 1,024.0"), ("two plus two plus two", "-6")]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", "7"), ("#### 1,234", "1234"), ("-5 degrees", "-5"), ("cost $2.50", "2.50"),
        ("no number", None), ("first 3, then 12 apples", "12"), ("", None),
    ],
)  # fmt: skip
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in ROWS))
    return path


WHOLE: dict[str, set[str]] = {"missing_keys": set(), "mismatched_keys": set()}
"""What transformers says of a folder where nothing is missing."""


class Network:
    """Stands in for the model: answers with the tokens of its texts, and keeps what it was asked."""

    generation_config = SimpleNamespace(eos_token_id=[2])

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers, self.asked = answers, list[dict[str, Any]]()

    def to(self, _: torch.device) -> Network:
        return self

    def eval(self) -> Network:
        return self

    def generate(self, **asked: Any) -> torch.Tensor:
        self.asked.append(asked)
        own = [self.answers.pop(0) for _ in range(len(asked["input_ids"]))]
        longest = max(map(len, own))
        padded = [row + [asked["pad_token_id"]] * (longest - len(row)) for row in own]
        return torch.cat([asked["input_ids"], torch.tensor(padded)], dim=1)


def test_questions_end_where_the_answer_begins_and_are_padded_on_the_left(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = Network([[5], [6, 7], [8]])
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (network, WHOLE))
    seen: list[tuple[int, int]] = []
    found = exact_match(str(model), str(data), batch_size=2, report=lambda *counts: seen.append(counts))
    assert [answer.expected for answer in found.answers] == ["3", "1024.0", "-6"]
    assert [answer.place for answer in found.answers] == [f"{data}: row {k}" for k in (1, 2, 3)]
    assert seen == [(2, 0), (3, 0)]
    # The shorter questions come first; all of a batch end at the same place.
    first = network.asked[0]
    assert (first["do_sample"], first["max_new_tokens"]) == (False, 512)
    assert first["attention_mask"][:, -1].tolist() == [1, 1]
    texts = [
        tokenizer.decode(ids[mask.bool()])
        for asked in network.asked
        for ids, mask in zip(asked["input_ids"], asked["attention_mask"], strict=True)
    ]
    assert [text.split() for text in texts] == [
        ["<s>", "user", *question.split(), "</s>", "<s>", "assistant"] for question in ("ten", ROWS[0][0], ROWS[2][0])
    ]


def test_numbers_not_texts_are_compared(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = ["it is 1024", "3 it is, not 4", "so -6.00 in all"]  # in order of length of the questions
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (Network([]), WHOLE))
    monkeypatch.setattr(module, "_generate", lambda *args: [(texts.pop(0), False) for _ in args[2]])
    found = exact_match(str(model), str(data))
    assert [answer.is_right for answer in found.answers] == [False, True, True]
    assert found.num_right == 2
    found.save(tmp_path / "answers.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["given"] for row in rows] == ["4", "1024", "-6.00"]


def test_answers_that_were_cut_are_told(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first ends with the last token that it may have, the second before it; the third does not end."""
    given = [[5, 6, 2], [7, 2], [8, 9, 10]]
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (Network([list(row) for row in given]), WHOLE)
    )
    file = tmp_path / "a.jsonl"
    command = ["evaluate", "--model", str(model), "--data", str(data), "--device", "cpu", "-o", str(file)]
    assert main([*command, "--max-new-tokens", "3"]) == 0
    assert "warning: 1 of 3 answers were cut at --max-new-tokens 3; give more" in capsys.readouterr().out
    # The shorter questions were answered first.
    assert [json.loads(line)["is_cut"] for line in file.read_text().splitlines()] == [False, False, True]
    assert main([*command, "--max-new-tokens", "4"]) == 0
    assert "were cut" not in capsys.readouterr().out


def test_a_real_model_answers(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-rows", "2", "--max-new-tokens", "3", "--device", "cpu", "-o", str(tmp_path / "a.jsonl")]
    assert main(["evaluate", "--model", str(model), "--data", str(data), *flags]) == 0
    said = capsys.readouterr().out
    assert "exact match: 0 of 2 (0.0%)" in said
    assert "warning: 2 of 2 answers were cut at --max-new-tokens 3; give more" in said
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "one", "answer": "two"}, "row 1: its answer 'two' holds no number to match"),
        ({"text": "one two 3"}, "row 1: no question with an answer"),
        ({"messages": [{"role": "user", "content": "1"}]}, "row 1: no question with an answer"),
    ],
)
def test_rows_that_ask_nothing_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["evaluate", "--model", str(model), "--data", str(tmp_path / "rows.jsonl")]) == 2
    assert message in capsys.readouterr().err
