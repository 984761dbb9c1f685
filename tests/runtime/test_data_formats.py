from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lazysched.errors import UsageError
from lazysched.runtime.data import files
from lazysched.runtime.data.files import PlacedRow
from lazysched.runtime.data.formats import format_named, parse_rows
from lazysched.runtime.data.row import Conversation, PlainText, TokenIds, TrainingText


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


SYSTEM = {"role": "system", "content": "be brief"}
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

    def test_query_and_response(self) -> None:
        """MetaMathQA's columns."""
        row = parse_one(query="2+2?", response="4", original_question="1+1?", type="x")
        assert row == Conversation((USER, ANSWER))

    def test_sharegpt(self) -> None:
        turns = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
        assert parse_one(conversations=turns) == Conversation((USER, ANSWER))
        assert parse_one(conversations=turns, system="be brief") == Conversation((SYSTEM, USER, ANSWER))
        own = [{"from": "system", "value": "be brief"}, *turns]
        assert parse_one(conversations=own, system="other") == Conversation((SYSTEM, USER, ANSWER))
        assert parse_one(conversations=[USER, ANSWER]) == Conversation((USER, ANSWER))

    def test_tools_in_sharegpt_and_in_openais_words_are_the_same(self) -> None:
        tool = {"name": "add", "parameters": {"type": "object"}}
        call = {"name": "add", "arguments": {"a": 2}}
        turns = [
            {"from": "human", "value": "2+2?"}, {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "4"}, {"from": "gpt", "value": "4"},
        ]  # fmt: skip
        calls = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]
        messages = [
            USER, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "4"}, ANSWER
        ]  # fmt: skip
        ours = parse_one(conversations=turns, tools=json.dumps([tool]))
        assert ours == parse_one(messages=messages, tools=[{"type": "function", "function": tool}])
        assert isinstance(ours, Conversation)
        assert ours.tools == ({"type": "function", "function": tool},)
        assert ours.messages[1]["tool_calls"][0]["function"] == call
        assert parse_one(messages=messages, tools="") == Conversation(ours.messages)

    @pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"training": False}, {"loss": 0}])
    def test_turns_that_a_row_leaves_out(self, mark: dict[str, Any]) -> None:
        turns = [USER, ANSWER | mark, USER | {"weight": 1}, ANSWER | {"weight": None}]
        whole = Conversation((USER, ANSWER, USER, ANSWER), left_out=(1,))
        assert parse_one(messages=turns) == parse_one(conversations=turns) == whole
        human, gpt = {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}
        assert parse_one(conversations=[human, gpt | mark, human, gpt]) == whole
        after_system = Conversation((SYSTEM, *whole.messages), left_out=(2,))
        assert parse_one(conversations=turns, system="be brief") == after_system
        answered = parse_one(prompt=[USER], completion=[ANSWER | mark, USER, ANSWER])
        assert answered == Conversation(whole.messages, first_trained=1, left_out=(1,))

    def test_alpaca_with_system_and_history(self) -> None:
        before = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
        row = parse_one(instruction="2+2?", output="4", system="be brief", history=[["1+1?", "2"]])
        assert row == Conversation((SYSTEM, *before, USER, ANSWER))

    def test_tokens(self) -> None:
        assert parse_one(input_ids=[5, 6], labels=[-100, 6], text="a b") == TokenIds((5, 6), (-100, 6))
        assert parse_one(input_ids=[5, 6], attention_mask=[1, 1]) == TokenIds((5, 6), (5, 6))

    def test_columns_of_two_formats_are_refused_until_one_is_chosen(self) -> None:
        row = {"question": "2+2?", "answer": "4", "query": "1+1?", "response": "2"}
        with pytest.raises(
            UsageError, match="row 1 fits more than one format, question/answer and query/response; choose one with --"
        ):
            parse_one(**row)
        (chosen,) = parse_rows([PlacedRow("row 1", row)], format_named("question/answer"))
        assert chosen.text == Conversation((USER, ANSWER))
        with pytest.raises(UsageError, match="data_format: 'qa' is not known; use one of messages, sharegpt"):
            format_named("qa")

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
            (
                [{"conversations": [{"from": "bot", "value": "4"}]}],
                r"conversations\[0\]\['from'\] is 'bot'; write one of",
            ),
            ([{"conversations": [{"from": "gpt"}]}], r"conversations\[0\] has no 'from' and 'value'"),
            ([{"conversations": [{"from": "function_call", "value": "add(2)"}]}], r"conversations\[0\] is not JSON"),
            ([{"conversations": [{"from": "function_call", "value": "[1]"}]}], r"is no call; write {'name'"),
            (
                [{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": 1}]}]}],
                "is a int, not an",
            ),
            ([{"messages": [USER], "tools": "[1]"}], r"'tools' is not a list of tools"),
            ([{"messages": [USER], "tools": "{"}], r"'tools' is not JSON"),
            ([{"instruction": "a", "output": "b", "history": [["c"]]}], r"history\[0\] is no pair"),
            ([{"input_ids": "5"}], r"'input_ids' is not a list of token ids"),
            ([{"input_ids": [5, -1]}], r"input_ids\[1\] is -1; write a token id"),
            ([{"input_ids": [2**31]}], r"beyond any vocabulary"),
            ([{"input_ids": [5, 6], "labels": [5]}], r"'labels' has 1 elements, 'input_ids' 2"),
            ([{"input_ids": [5, 6], "labels": [6, 7]}], r"labels\[0\] is 6, .* the token itself, not the next one"),
            ([{"text": "\ud83d"}], r"'text' holds an unpaired surrogate"),
        ],
    )
    def test_refuses(self, rows: list[dict[str, Any]], message: str) -> None:
        with pytest.raises(UsageError, match=message) as caught:
            parse(rows)
        assert "\n" not in str(caught.value)
