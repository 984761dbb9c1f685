from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lazysched.errors import UsageError
from lazysched.runtime.data import files
from lazysched.runtime.data.files import PlacedRow
from lazysched.runtime.data.formats import parse_rows
from lazysched.runtime.data.row import Conversation, PlainText, TrainingText


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [row.values for row in files.read_rows(path)]


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "rows.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


class TestReadRows:
    ROWS = ({"text": "one"}, {"text": "two\u2028still two"})

    def test_a_list_and_lines_give_the_same_rows(self, tmp_path: Path) -> None:
        lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in self.ROWS)
        assert read_rows(write(tmp_path, json.dumps(self.ROWS, indent=2))) == list(self.ROWS)
        assert read_rows(write(tmp_path, lines + "\n")) == list(self.ROWS)

    def test_byte_order_mark_and_windows_line_ends(self, tmp_path: Path) -> None:
        content = "\r\n".join(json.dumps(row) for row in self.ROWS).encode("utf-8-sig")
        assert read_rows(write(tmp_path, content)) == list(self.ROWS)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "the file is empty"),
            (" \n\n", "the file is empty"),
            ("[]", "the list has no rows"),
            ('{"text": "a"}\n\n{"text": ', r"not JSON at line 3"),
            ('[{"text": "a"},\n {"text" "b"}]', r"not JSON at line 2"),
            ('{\n "text": "a"\n}', r"not JSON at line 1"),
            ('{"text": "a"}\n"b"', r"row 2 is a str, not an object"),
            ("[[1]]", r"row 1 is a list, not an object"),
            (b"PAR1\xff\xfe", "not UTF-8 text at byte 4"),
        ],
    )
    def test_refuses(self, tmp_path: Path, content: str | bytes, message: str) -> None:
        path = write(tmp_path, content)
        with pytest.raises(UsageError, match=message) as caught:
            read_rows(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_refuses_what_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"no\.json: no such file"):
            read_rows(tmp_path / "no.json")
        with pytest.raises(UsageError, match=r"cannot be read \(Is a directory\)"):
            read_rows(tmp_path)


def parse(rows: list[dict[str, Any]]) -> list[TrainingText]:
    placed = (PlacedRow(f"rows.json: row {number}", row) for number, row in enumerate(rows, 1))
    return [row.text for row in parse_rows(placed)]


def parse_one(**row: Any) -> TrainingText:
    return parse([row])[0]


USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


class TestFormats:
    def test_each_format(self) -> None:
        asked = Conversation((USER, ANSWER))
        assert parse_one(question="2+2?", answer="4") == asked
        assert parse_one(messages=[USER, ANSWER]) == asked
        assert parse_one(instruction="2+2?", input="", output="4") == asked
        assert parse_one(instruction="2+2?", input=None, output="4") == asked
        assert parse_one(instruction="2+2?", output="4") == asked
        assert parse_one(prompt="2+2=", completion="4") == PlainText("2+2=", "4")
        assert parse_one(prompt=[USER], completion=[ANSWER]) == Conversation((USER, ANSWER), first_trained=1)
        assert parse_one(text="2+2=4") == PlainText("", "2+2=4")

    def test_alpaca_input_follows_the_instruction(self) -> None:
        conversation = parse_one(instruction="Add.", input="2 2", output="4")
        assert isinstance(conversation, Conversation)
        assert conversation.messages[0]["content"] == "Add.\n\n2 2"

    def test_columns_beside_the_format_do_not_matter(self) -> None:
        assert parse_one(prompt="2+2?", prompt_id="x", messages=[USER, ANSWER]) == Conversation((USER, ANSWER))
        assert parse_one(instruction="2+2?", output="4", text="### 2+2? 4") == Conversation((USER, ANSWER))

    def test_unknown_format_names_what_was_found_and_what_is_known(self) -> None:
        with pytest.raises(UsageError, match=r"keys 'ask', 'response', no known format.*question/answer.*alpaca"):
            parse_one(ask="2+2?", response="4")
        with pytest.raises(UsageError, match="keys none, no known format"):
            parse_one()

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([{"text": "a"}, {"txt": "b"}], r"rows.json: row 2: no key 'text', which the format text needs"),
            ([{"question": "a", "answer": 4}], r"row 1: 'answer' is a int, not a string"),
            ([{"text": None}], r"'text' is a NoneType, not a string"),
            ([{"messages": []}], r"'messages' is not a list of messages"),
            ([{"messages": "hello"}], r"'messages' is not a list of messages"),
            ([{"messages": [USER, {"from": "gpt", "value": "4"}]}], r"messages\[1\] has no 'role' and 'content'"),
            ([{"messages": [{"role": "user", "content": ["a"]}]}], r"messages\[0\]\['content'\] is a list"),
            ([{"prompt": [USER], "completion": "4"}], r"'prompt' and 'completion' are of two kinds"),
            ([{"text": "\ud83d"}], r"'text' holds an unpaired surrogate"),
        ],
    )
    def test_refuses(self, rows: list[dict[str, Any]], message: str) -> None:
        with pytest.raises(UsageError, match=message) as caught:
            parse(rows)
        assert "\n" not in str(caught.value)
