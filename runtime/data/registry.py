"""LLaMA-Factory's ``dataset_info.json``, read as it is: names of datasets, where they lie, what their columns mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazysched.errors import UNREADABLE_JSON, UsageError
from lazysched.runtime.data.formats import RowFormat, asked, conversation_of, read_history
from lazysched.runtime.data.messages import Tags
from lazysched.runtime.data.row import Conversation, PlainText, Row, TrainingText

REGISTRY = "dataset_info.json"
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_OPTIONAL_COLUMNS = ("system", "tools", "history")
_ROLE_TAGS = {
    "user_tag": ("human", "user"), "assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "function_call"), "system_tag": ("system", "system"),
}  # fmt: skip
"""Tag -> its default and the role of chat templates."""
_KNOWN = {
    "hf_hub_url",
    "ms_hub_url",
    "file_name",
    "formatting",
    "subset",
    "split",
    "folder",
    "columns",
    "tags",
    "ranking",
}
"""Fields that are read; others would change what is trained, so they are refused."""


@dataclass(frozen=True)
class Entry:
    """One dataset of a registry.

    Attributes:
        where: file and name for errors.
        folder: of the registry.
        fields: as they stand in the file.
        row_format: how its rows are read.
    """

    where: str
    folder: Path
    fields: Mapping[str, Any]
    row_format: RowFormat


def read_entries(registry: Path, names: list[str]) -> list[Entry]:
    """The datasets that ``names`` names.

    Raises:
        UsageError: the registry cannot be read, or has no such name, or a field is not supported.
    """
    try:
        known = json.loads(registry.read_text(encoding="utf-8"))
    except UNREADABLE_JSON as error:
        raise UsageError(f"{registry}: not valid JSON ({' '.join(str(error).split())}); mend it") from None
    if not isinstance(known, dict):
        raise UsageError(f"{registry}: a {type(known).__name__}, not an object; write {{'name': {{...}}}}")
    entries = []
    for name in names:
        if name not in known:
            raise UsageError(f"{registry}: no dataset {name!r}; it has {', '.join(sorted(known)) or 'none'}")
        entries.append(_entry(registry, name, known[name]))
    return entries


def _entry(registry: Path, name: str, fields: Any) -> Entry:
    where = f"{registry}: {name}"
    if not isinstance(fields, dict):
        raise UsageError(f"{where}: a {type(fields).__name__}, not an object; write {{'file_name': ...}}")
    _refuse_unknown(fields, _KNOWN, where)
    if fields.get("ranking"):
        raise UsageError(f"{where}: ranking: pairs of preferences are not trained here; name a supervised dataset")
    columns, tags = (_strings(fields, key, where) for key in ("columns", "tags"))
    formatting = fields.get("formatting", "alpaca")
    if formatting == "alpaca":
        return Entry(where, registry.parent, fields, _alpaca(columns, where))
    if formatting in ("sharegpt", "openai"):
        return Entry(where, registry.parent, fields, _sharegpt(columns, tags, where))
    raise UsageError(f"{where}: formatting: {formatting!r} is not known; use alpaca or sharegpt")


def _refuse_unknown(fields: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in sorted(fields.keys() - known):
        raise UsageError(f"{where}: {key}: not supported; leave it out, or use one of {', '.join(sorted(known))}")


def _strings(fields: Mapping[str, Any], key: str, where: str) -> dict[str, str]:
    values = fields.get(key) or {}
    if not isinstance(values, dict) or not all(isinstance(value, str | None) for value in values.values()):
        raise UsageError(f"{where}: {key}: not an object of strings; write {{'name': 'column'}}")
    return {name: value for name, value in values.items() if value is not None}


def _alpaca(columns: dict[str, str], where: str) -> RowFormat:
    _refuse_unknown(columns, {"prompt", "query", "response", *_OPTIONAL_COLUMNS}, f"{where}: columns")
    names = _COLUMNS | columns
    prompt, query, response = (names[key] for key in ("prompt", "query", "response"))
    if columns.keys() == {"prompt"}:  # what LLaMA-Factory calls a pre-training dataset
        return RowFormat(where, (prompt,), lambda row: PlainText("", row.string(prompt)))

    def parse(row: Row) -> TrainingText:
        # One line break, as LLaMA-Factory joins them.
        question = "\n".join(filter(None, (row.string(prompt), row.optional_string(query))))
        system, history = row.optional_string(names.get("system")), read_history(row, names.get("history"))
        conversation = asked(row, question, row.string(response), system=system, history=history)
        return Conversation(conversation.messages, tools=row.tools(names.get("tools")))

    return RowFormat(where, (prompt, response), parse)


def _sharegpt(columns: dict[str, str], tags: dict[str, str], where: str) -> RowFormat:
    _refuse_unknown(columns, {"messages", *_OPTIONAL_COLUMNS}, f"{where}: columns")
    _refuse_unknown(tags, {"role_tag", "content_tag", *_ROLE_TAGS}, f"{where}: tags")
    names = _COLUMNS | columns
    roles = {tags.get(tag, default): role for tag, (default, role) in _ROLE_TAGS.items()}
    spelled = Tags(tags.get("role_tag", "from"), tags.get("content_tag", "value"), roles)

    def parse(row: Row) -> TrainingText:
        return conversation_of(row, names["messages"], spelled, system=names.get("system"), tools=names.get("tools"))

    return RowFormat(where, (names["messages"],), parse)
