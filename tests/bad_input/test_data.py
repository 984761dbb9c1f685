"""Data: files of every format, rows of every shape, and ``dataset_info.json``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.bad_input.driver import EVALUATE, PREPARE, TRAIN, Bad, check, parametrized
from tests.bad_input.files import Files
from tests.end_to_end.tiny_folder import make_data

Spoil = Callable[[Files], object]
PREVIEW = PREPARE.replace("prepare", "preview")
REGISTRY = PREPARE.replace("{data}", "{root}:mine")


def text(content: str | bytes) -> Spoil:
    """The data file holds this."""
    return lambda files: files.data.write_bytes(content.encode() if isinstance(content, str) else content)


def rows(*values: Any) -> Spoil:
    """One JSON value a line."""
    return text("".join(json.dumps(value) + "\n" for value in values))


def second(value: Any) -> Spoil:
    """A good row, then ``value``."""
    return rows({"question": "what is one", "answer": "one"}, value)


def other(name: str, content: str | bytes) -> Spoil:
    """A file beside the data."""
    return lambda files: (files.root / name).write_bytes(content.encode() if isinstance(content, str) else content)


def registry(fields: Any, whole: Any = None) -> Spoil:
    """A ``dataset_info.json`` with the dataset ``mine``."""
    return other("dataset_info.json", json.dumps({"mine": fields} if whole is None else whole))


def chat(*messages: Any, **more: Any) -> Spoil:
    return rows({"messages": list(messages), **more})


def named(suffix: str) -> str:
    return PREPARE.replace("{data}", "{root}/d" + suffix)


USER, ANSWER = {"role": "user", "content": "what is one"}, {"role": "assistant", "content": "one"}

FILE_ROWS = (
    Bad("no such file", PREPARE, ("{data}: no such file", "check the path"), lambda files: files.data.unlink()),
    Bad("no such file to preview", PREVIEW, ("{data}: no such file",), lambda files: files.data.unlink()),
    Bad("no such file to train on", TRAIN, ("{data}: no such file",), lambda files: files.data.unlink()),
    Bad("no such file to evaluate", EVALUATE, ("{sums}: no such file",), lambda files: files.sums.unlink()),
    Bad("a folder", PREPARE.replace("{data}", "{root}"), ("{root}", "Is a directory", "name one of its files")),
    Bad("a hub name without network", PREPARE.replace("{data}", "nobody/nothing"), ("nobody/nothing", "pip install")),
    Bad("an empty file", PREPARE, ("{data}: the file is empty", "one JSON object per line"), text("")),
    Bad("white space", PREPARE, ("{data}: the file is empty",), text(" \n\n\t\n")),
    Bad("an empty list", PREPARE, ("{data}: the list has no rows", "at least one"), text("[]")),
    Bad("half a list", PREPARE, ("{data}: not JSON at line 1", "mend"), text('[{"question": "a"')),
    Bad("a list without end", PREPARE, ("{data}", "mend it"), text("[" * 100000)),
    Bad("half a line", PREPARE, ("{data}: not JSON at line 2", "one whole object per line"), text('{"text": "a"}\n{"te\n')),
    Bad("an object over lines", PREPARE, ("{data}: not JSON at line 1",), text('{\n"question": "a"\n}\n')),
    Bad("a line of brackets", PREPARE, ("{data}: line 1 cannot be read", "mend that line"), text('{"a":' * 100000)),
    Bad("a number of 5000 digits", PREPARE, ("{data}: line 1 cannot be read",), text('{"text": ' + "1" * 5000 + "}")),
    Bad("no text", PREPARE, ("{data}: not UTF-8 text at byte 0",), text(b"\xff\xfe{\x00")),
    Bad("Latin-1", PREPARE, ("{data}: not UTF-8 text at byte",), text('{"text": "für"}'.encode("latin-1"))),
    Bad("a pickle", PREPARE, ("{data}: not UTF-8",), text(b"\x80\x04\x95\x00")),
    Bad("a number a line", PREPARE, ("{data}: row 1 is a int, not an object",), text("1\n2\n")),
    Bad("a list of lists", PREPARE, ("{data}: row 1 is a list, not an object",), text("[[1]]")),
    Bad("null", PREPARE, ("{data}: row 1 is a NoneType",), text("null\n")),
    Bad("an empty CSV", named(".csv"), ("d.csv: the file is empty",), other("d.csv", "")),
    Bad("a CSV of names alone", named(".csv"), ("d.csv: the file is empty",), other("d.csv", "question,answer\n")),
    Bad("a field too many", named(".csv"), ("d.csv: row 2 (line 3): 3 fields", "2 columns", "double quotes"),
        other("d.csv", "question,answer\na,b\na,b,c\n")),
    Bad("a field too few", named(".tsv"), ("d.tsv: row 1 (line 2): 1 fields",), other("d.tsv", "question\tanswer\na\n")),
    Bad("a quote without end", named(".csv"), ("d.csv: not CSV at line", "mend the quotes"),
        other("d.csv", 'question,answer\n"a,b\n')),
    Bad("two columns of one name", named(".csv"), ("d.csv: two columns have one name", "rename"),
        other("d.csv", "question,question\na,b\n")),
    Bad("a CSV in Latin-1", named(".csv"), ("d.csv: not UTF-8", "save it as UTF-8"),
        other("d.csv", "question,answer\nfür,b\n".encode("latin-1"))),
    Bad("Parquet without its package", named(".parquet"), ("d.parquet", "pyarrow"), other("d.parquet", "PAR1")),
)  # fmt: skip

ROW_ROWS = (
    Bad("no known column", PREPARE, ("{data}: row 1 has the keys 'q', 'a'", "rename"), rows({"q": "a", "a": "b"})),
    Bad("no columns", PREPARE, ("{data}: row 1 has the keys none", "rename"), rows({})),
    Bad("two formats", PREPARE, ("{data}: row 1 fits more than one format", "--data-format"),
        rows({"question": "a", "answer": "b", "query": "a", "response": "b"})),
    Bad("another format than asked for", f"{PREPARE} --data-format alpaca", ("row 1: no key 'instruction'", "alpaca")),
    Bad("a format that there is not", f"{PREPARE} --data-format csv", ("data_format: 'csv' is not known", "alpaca")),
    Bad("a key is missing", PREPARE, ("{data}: row 2: no key 'answer'", "question/answer"), second({"question": "a"})),
    Bad("another format in row 2", PREPARE, ("{data}: row 2: no key",), second({"text": "a"})),
    Bad("a number for an answer", PREPARE, ("{data}: row 2: 'answer' is a int", "write text"), second({"question": "a", "answer": 1})),
    Bad("null for a question", PREPARE, ("{data}: row 2: 'question' is a NoneType",), second({"question": None, "answer": "b"})),
    Bad("half a surrogate", PREPARE, ("{data}: row 2", "unpaired surrogate"), second({"question": "\ud800", "answer": "b"})),
    Bad("text that is a list", PREPARE, ("{data}: row 1: 'text' is a list",), rows({"text": ["a"]})),
    Bad("alpaca of numbers", PREPARE, ("{data}: row 1: 'output' is a int",), rows({"instruction": "a", "output": 4})),
    Bad("alpaca with a list as input", PREPARE, ("{data}: row 1: 'input'",), rows({"instruction": "a", "input": [], "output": "b"})),
    Bad("alpaca with a bad history", PREPARE, ("{data}: row 1: history[0] is no pair",),
        rows({"instruction": "a", "output": "b", "history": ["a"]})),
    Bad("messages in words", PREPARE, ("{data}: row 1: 'messages' is not a list",), rows({"messages": "hello"})),
    Bad("no messages", PREPARE, ("{data}: row 1: 'messages' is not a list",), chat()),
    Bad("a message in words", PREPARE, ("{data}: row 1: messages[0] has no 'role'",), chat("hello")),
    Bad("a message without role", PREPARE, ("{data}: row 1: messages[0] has no 'role'",), chat({"content": "a"})),
    Bad("a message of null", PREPARE, ("{data}: row 1: messages[1]['content'] is a NoneType",), chat(USER, {"role": "assistant", "content": None})),
    Bad("a message of parts", PREPARE, ("{data}: row 1: messages[0]['content'] is a list",), chat({"role": "user", "content": [{"type": "text"}]}, ANSWER)),
    Bad("a role of 5", PREPARE, ("{data}: row 1: messages[0]['role'] is a int",), chat({"role": 5, "content": "a"}, ANSWER)),
    Bad("the assistant begins", PREPARE, ("{data}: row 1: the first message is the assistant's",), chat(ANSWER)),
    Bad("nobody answers", PREPARE, ("{data}: all labels are masked",), chat(USER)),
    Bad("a role that there is not in ShareGPT", PREPARE, ("{data}: row 1", "'robot'", "write one of"),
        rows({"conversations": [{"from": "robot", "value": "a"}]})),
    Bad("a role that no template has", PREPARE, ("{data}: row 1: messages[0]['role'] is 'robot'; write one of system, developer, user",),
        rows({"messages": [{"role": "robot", "content": "a"}]})),
    Bad("half a turn", PREPARE, ("{data}: row 1: messages[1]['weight'] is 0.5; write 0 to leave the turn out",),
        rows({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a", "weight": 0.5}]})),
    Bad("parts of a turn", PREPARE, ("{data}: row 1: messages[1]['training_detail']: parts of a turn cannot", "split the row"),
        rows({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a", "training_detail": [{"begin_offset": 0}]}]})),
    Bad("a preference", PREPARE, ("{data}: row 1: 'label' marks a preference", "drop the column"), rows({"prompt": "a", "completion": "b", "label": False})),
    Bad("all turns left out", PREPARE, ("{data}: all labels are masked: 0 rows have their answer beyond", "1 have none; check the format, and what leaves turns out"),
        rows({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a", "weight": 0}]})),
    Bad("ShareGPT without words", PREPARE, ("{data}: row 1: conversations[0] has no 'from'",), rows({"conversations": [{"from": "human"}]})),
    Bad("a call that is none", PREPARE, ("{data}: row 1", "is no call"), chat(USER, {"role": "assistant", "tool_calls": [5]})),
    Bad("a call with arguments that are no JSON", PREPARE, ("{data}: row 1", "arguments is not JSON"),
        chat(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]})),
    Bad("tools that are none", PREPARE, ("{data}: row 1: 'tools' is not a list of tools",), chat(USER, ANSWER, tools=[5])),
    Bad("tools that the template leaves out", PREPARE, ("{data}: row 1: tools", "chat template leaves them out"),
        chat(USER, ANSWER, tools=[{"name": "f"}])),
    Bad("a prompt of two kinds", PREPARE, ("{data}: row 1: 'prompt' and 'completion' are of two kinds",),
        rows({"prompt": "a", "completion": [ANSWER]})),
    Bad("tokens in words", PREPARE, ("{data}: row 1: 'input_ids' is not a list of token ids",), rows({"input_ids": "abc"})),
    Bad("a token below 0", PREPARE, ("{data}: row 1: input_ids[1] is -1",), rows({"input_ids": [1, -1]})),
    Bad("half a token", PREPARE, ("{data}: row 1: input_ids[0] is 1.5",), rows({"input_ids": [1.5]})),
    Bad("a token of 40 bits", PREPARE, ("{data}: row 1: input_ids[0] is", "beyond any vocabulary"), rows({"input_ids": [2**40]})),
    Bad("labels of another length", PREPARE, ("{data}: row 1: 'labels' has 1 elements, 'input_ids' 2",), rows({"input_ids": [1, 2], "labels": [1]})),
    Bad("labels shifted by one", PREPARE, ("{data}: row 1: labels[0] is 2", "not the next one"), rows({"input_ids": [1, 2, 3], "labels": [2, 3, -100]})),
    Bad("a token beyond the vocabulary", TRAIN, ("token id 200", "97 rows"), rows({"input_ids": [1, 200, 3]}), shown="{data}: 1 of 1 rows"),
    Bad("every answer beyond the length", f"{PREPARE} --seq-len 2", ("{data}: all labels are masked", "2"), lambda files: make_data(files.data, 3)),
    Bad("most answers beyond the length", f"{PREPARE} --seq-len 9", ("{data}: labels of 2 of 3 rows are masked", "--seq-len"),
        rows({"question": "what is one " * 4, "answer": "one"}, {"question": "what " * 12, "answer": "one"}, {"question": "what", "answer": "one"})),
    Bad("nothing to evaluate", EVALUATE, ("{sums}: row 1", "no question with an answer"),
        lambda files: files.sums.write_text('{"text": "a"}\n')),
    Bad("an answer without number", EVALUATE, ("{sums}: row 1", "holds no number"),
        lambda files: files.sums.write_text('{"question": "a", "answer": "two"}\n')),
    Bad("an evaluation of nobody's answer", EVALUATE, ("{sums}: row 1", "no question with an answer"),
        lambda files: files.sums.write_text(json.dumps({"messages": [USER]}) + "\n")),
)  # fmt: skip

FIELDS = {"file_name": "data.jsonl", "columns": {"prompt": "question", "response": "answer"}}
REGISTRY_ROWS = (
    Bad("no registry", REGISTRY, ("{root}: has no dataset_info.json",)),
    Bad("a registry that is no JSON", REGISTRY, ("dataset_info.json: not valid JSON", "mend"), other("dataset_info.json", "{")),
    Bad("a registry without end", REGISTRY, ("dataset_info.json: not valid JSON",), other("dataset_info.json", "[" * 100000)),
    Bad("a registry of no text", REGISTRY, ("dataset_info.json: not valid JSON",), other("dataset_info.json", b"\xff")),
    Bad("a list for a registry", REGISTRY, ("dataset_info.json: a list",), registry(None, [])),
    Bad("another dataset", REGISTRY, ("dataset_info.json: no dataset 'mine'", "it has yours"), registry(None, {"yours": {}})),
    Bad("a dataset in words", REGISTRY, ("mine: a str, not an object",), registry("data.jsonl")),
    Bad("no file named", REGISTRY, ("mine: file_name: missing",), registry({})),
    Bad("a file of 5", REGISTRY, ("mine: file_name: missing",), registry({"file_name": 5})),
    Bad("a file that is not there", REGISTRY, ("mine: file_name: {root}/no.json: no such file",), registry({"file_name": "no.json"})),
    Bad("a file above the folder", REGISTRY, ("mine: file_name: '../data.jsonl' leads out of {root}",), registry({"file_name": "../data.jsonl"})),
    Bad("a file above by a detour", REGISTRY, ("'a/../../x.json' leads out of",), registry({"file_name": "a/../../x.json"})),
    Bad("a file of the system", REGISTRY, ("'/etc/passwd' leads out of",), registry({"file_name": "/etc/passwd"})),
    Bad("a file with a null", REGISTRY, ("mine: file_name",), registry({"file_name": "a\0b"})),
    Bad("a script to run", REGISTRY, ("mine: script_url: not supported",), registry({"script_url": "x.py"})),
    Bad("a formatting that there is not", REGISTRY, ("formatting: 'xml' is not known",), registry(FIELDS | {"formatting": "xml"})),
    Bad("a formatting of 5", REGISTRY, ("formatting: 5 is not known",), registry(FIELDS | {"formatting": 5})),
    Bad("preferences", REGISTRY, ("mine: ranking",), registry(FIELDS | {"ranking": True})),
    Bad("columns in words", REGISTRY, ("mine: columns: not an object",), registry(FIELDS | {"columns": "all"})),
    Bad("a column of pictures", REGISTRY, ("columns: images: not supported",), registry(FIELDS | {"columns": {"images": "i"}})),
    Bad("a tag of 5", REGISTRY, ("mine: tags: not an object of strings",), registry(FIELDS | {"formatting": "sharegpt", "tags": {"role_tag": 5}})),
    Bad("a hub name of 5", REGISTRY, ("mine: hf_hub_url: 5", "owner/name"), registry({"hf_hub_url": 5})),
    Bad("a column that no row has", REGISTRY, ("row 1: no key 'q'",), registry(FIELDS | {"columns": {"prompt": "q", "response": "answer"}})),
    Bad("a format beside the registry's", f"{REGISTRY} --data-format text", ("data_format: text", "leave one of them out"), registry(FIELDS)),
)  # fmt: skip


@parametrized(FILE_ROWS)
def test_bad_files(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)


@parametrized(ROW_ROWS)
def test_bad_rows(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)


@parametrized(REGISTRY_ROWS)
def test_bad_registries(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)
