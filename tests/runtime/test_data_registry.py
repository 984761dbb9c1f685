"""LLaMA-Factory's registry, with the descriptions that its manual gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lazysched.errors import UsageError
from lazysched.runtime.data.formats import parse_rows
from lazysched.runtime.data.row import Conversation, PlainText, TrainingText
from lazysched.runtime.data.sources import resolve_data

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "be brief"}


def read(folder: Path, fields: Any, row: dict[str, Any] | None = None, name: str = "mine") -> list[TrainingText]:
    (folder / "dataset_info.json").write_text(json.dumps({"mine": fields}))
    (folder / "rows.json").write_text(json.dumps([row or {}]))
    sources = resolve_data(f"{folder}:{name}")
    return [placed.text for source in sources for placed in parse_rows(source.rows(), source.row_format)]


def test_alpaca(tmp_path: Path) -> None:
    row = {"instruction": "2+", "input": "2?", "output": "4", "system": "be brief", "history": [["1+1?", "2"]]}
    columns = {"prompt": "instruction", "query": "input", "response": "output"}
    question = {"role": "user", "content": "2+\n2?"}
    assert read(tmp_path, {"file_name": "rows.json"}, row) == [Conversation((question, ANSWER))]
    columns |= {"system": "system", "history": "history"}
    before = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"})
    (found,) = read(tmp_path, {"file_name": "rows.json", "columns": columns}, row)
    assert found == Conversation((SYSTEM, *before, question, ANSWER))
    columns = {"prompt": "q", "query": None, "response": "a"}
    assert read(tmp_path, {"file_name": "rows.json", "columns": columns}, {"q": "2+2?", "a": "4"}) == [
        Conversation((USER, ANSWER))
    ]


def test_text(tmp_path: Path) -> None:
    fields = {"file_name": "rows.json", "columns": {"prompt": "text"}}
    assert read(tmp_path, fields, {"text": "a b"}) == [PlainText("", "a b")]


def test_sharegpt(tmp_path: Path) -> None:
    fields = {
        "file_name": "rows.json", "formatting": "sharegpt",
        "columns": {"messages": "talk", "system": "s", "tools": "t"},
    }  # fmt: skip
    turns = [
        {"from": "human", "value": "2+2?"}, {"from": "function_call", "value": '{"name": "add", "arguments": {}}'},
        {"from": "observation", "value": "4"}, {"from": "gpt", "value": "4"},
    ]  # fmt: skip
    (found,) = read(tmp_path, fields, {"talk": turns, "s": "be brief", "t": '[{"name": "add"}]'})
    assert isinstance(found, Conversation)
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.tools[0]["function"]["name"] == "add"


def test_openais_words_by_tags(tmp_path: Path) -> None:
    tags = {
        "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
        "system_tag": "system",
    }  # fmt: skip
    fields = {"file_name": "rows.json", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    assert read(tmp_path, fields, {"messages": [SYSTEM, USER, ANSWER]}) == [Conversation((SYSTEM, USER, ANSWER))]
    with pytest.raises(UsageError, match=r"messages\[0\]\['role'\] is 'human'; write one of user, assistant"):
        read(tmp_path, fields, {"messages": [{"role": "human", "content": "a"}]})


def test_several_datasets_each_with_its_format_and_folders_of_files(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for name, text in (("b.jsonl", '{"text": "b"}\n'), ("a.csv", "text\na\n"), ("readme.md", "no data")):
        (tmp_path / "many" / name).write_text(text)
    (tmp_path / "one.json").write_text(json.dumps([{"instruction": "2+2?", "output": "4"}]))
    known = {"many": {"file_name": "many", "columns": {"prompt": "text"}}, "one": {"file_name": "one.json"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(known))
    sources = resolve_data(f"{tmp_path}:many,one")
    texts = [placed.text for source in sources for placed in parse_rows(source.rows(), source.row_format)]
    assert texts == [PlainText("", "a"), PlainText("", "b"), Conversation((USER, ANSWER))]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"file_name": "rows.json", "ranking": True}, "mine: ranking: pairs of preferences"),
        ({"file_name": "rows.json", "num_samples": 5}, "mine: num_samples: not supported"),
        ({"script_url": "x"}, "mine: script_url: not supported"),
        ({"file_name": "rows.json", "columns": {"images": "i"}}, "columns: images: not supported"),
        ({"file_name": "rows.json", "columns": {"prompt": 1}}, "columns: not an object of strings"),
        ({"file_name": "rows.json", "formatting": "sharegpt", "tags": {"x": "y"}}, "tags: x: not supported"),
        ({"file_name": "rows.json", "formatting": "chatml"}, "formatting: 'chatml' is not known"),
        ({"file_name": "no.json"}, "file_name: .*no.json: no such file"),
        ({}, "file_name: missing"),
        ("rows.json", "mine: a str, not an object"),
        ({"file_name": "rows.json"}, "row 1: no key 'instruction', which the format .*: mine needs"),
    ],
)
def test_refuses(tmp_path: Path, fields: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read(tmp_path, fields)
    assert "\n" not in str(caught.value)


def test_refuses_names_and_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"dataset_info.json: no dataset 'other'; it has mine"):
        read(tmp_path, {"file_name": "rows.json"}, name="other")
    with pytest.raises(UsageError, match=rf"Is a directory.*name a dataset of its dataset_info.json: {tmp_path}:NAME"):
        resolve_data(tmp_path)
    with pytest.raises(UsageError, match=r"data_format: text: dataset_info\.json has the format already"):
        resolve_data(f"{tmp_path}:mine", "text")
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        resolve_data(f"{tmp_path}:mine")
    (tmp_path / "dataset_info.json").unlink()
    with pytest.raises(UsageError, match=r"has no dataset_info\.json; name a file"):
        resolve_data(f"{tmp_path}:mine")
