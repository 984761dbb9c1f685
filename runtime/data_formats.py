"""Data files: rows of JSON or JSONL become conversations and texts, whichever of the usual formats they are in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazysched.errors import UsageError

Message = dict[str, str]
"""``role`` and ``content``."""


@dataclass(frozen=True)
class Conversation:
    """Turns for a chat template; the assistant's are trained.

    Attributes:
        messages: in order; other roles than ``assistant`` are prompts.
        first_trained: assistant turns before this index belong to the prompt too.
    """

    messages: tuple[Message, ...]
    first_trained: int = 0


@dataclass(frozen=True)
class PlainText:
    """Text that no template touches; ``completion`` is trained, ``prompt`` is not."""

    prompt: str
    completion: str


TrainingText = Conversation | PlainText


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Objects of a JSON list or of a JSONL file, in order; blank lines are skipped.

    Raises:
        UsageError: the file is missing, unreadable, empty or not JSON, or a row is not an object.
    """
    text = _read_text(Path(path))
    if not text.strip():
        raise UsageError(f"{path}: the file is empty; give one JSON object per line, or a JSON list of objects")
    rows = _parse_list(text, path) if text.lstrip().startswith("[") else _parse_lines(text, path)
    if not rows:
        raise UsageError(f"{path}: the list has no rows; give at least one object")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UsageError(f"{path}: row {number} is a {type(row).__name__}, not an object; write {{...}} a row")
    return rows


def _read_text(path: Path) -> str:
    if not path.exists():
        raise UsageError(f"{path}: no such file; check the path of the data")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text at byte {error.start}; give JSON or JSONL") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give a JSON or JSONL file") from None


def _parse_list(text: str, path: str | Path) -> list[Any]:
    try:
        rows: list[Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: not JSON at line {error.lineno} ({error.msg}); mend that line") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: JSON that cannot be read ({error}); mend it") from None
    return rows


def _parse_lines(text: str, path: str | Path) -> list[Any]:
    rows = []
    # Not splitlines(): it also cuts at U+2028 and its like, which JSON strings may hold as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{path}: not JSON at line {number} ({error.msg}); write one whole object per line, or a list"
            ) from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: line {number} cannot be read ({error}); mend that line") from None
    return rows


class _Row:
    """One row, with errors that name the file and the row."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values, self._where = values, where

    def error(self, message: str) -> UsageError:
        """The error that ``message`` describes."""
        return UsageError(f"{self._where}: {message}")

    def require(self, keys: tuple[str, ...], format_name: str) -> None:
        """Refuse a row that lacks what the first one has."""
        for key in keys:
            if key not in self._values:
                raise self.error(f"no key {key!r}, which row 1 has (format {format_name}); add it or drop the row")

    def is_list(self, key: str) -> bool:
        """Whether the value is a list, so messages."""
        return isinstance(self._values[key], list)

    def string(self, key: str) -> str:
        """The text under ``key``."""
        return self._checked(self._values[key], repr(key))

    def optional_string(self, key: str) -> str:
        """The text under ``key``; empty where it is absent or null."""
        return "" if self._values.get(key) is None else self.string(key)

    def messages(self, key: str) -> tuple[Message, ...]:
        """The messages under ``key``, at least one."""
        value = self._values[key]
        if not isinstance(value, list) or not value:
            raise self.error(f"{key!r} is not a list of messages; write [{{'role': ..., 'content': ...}}, ...]")
        return tuple(self._message(message, f"{key}[{index}]") for index, message in enumerate(value))

    def _message(self, message: Any, name: str) -> Message:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise self.error(f"{name} has no 'role' and 'content'; write {{'role': ..., 'content': ...}}")
        return {key: self._checked(message[key], f"{name}[{key!r}]") for key in ("role", "content")}

    def _checked(self, value: Any, name: str) -> str:
        if not isinstance(value, str):
            raise self.error(f"{name} is a {type(value).__name__}, not a string; write text")
        try:
            # JSON can escape half of a surrogate pair, which no tokenizer takes.
            value.encode()
        except UnicodeEncodeError:
            raise self.error(f"{name} holds an unpaired surrogate (\\ud800-\\udfff); mend the escape") from None
        return value


def _ask(question: str, answer: str) -> Conversation:
    return Conversation(({"role": "user", "content": question}, {"role": "assistant", "content": answer}))


def _from_question(row: _Row) -> TrainingText:
    return _ask(row.string("question"), row.string("answer"))


def _from_messages(row: _Row) -> TrainingText:
    return Conversation(row.messages("messages"))


def _from_alpaca(row: _Row) -> TrainingText:
    given = row.optional_string("input")
    instruction = row.string("instruction")
    return _ask(f"{instruction}\n\n{given}" if given else instruction, row.string("output"))


def _from_prompt(row: _Row) -> TrainingText:
    if row.is_list("prompt") != row.is_list("completion"):
        raise row.error("'prompt' and 'completion' are of two kinds; write two strings or two lists of messages")
    if not row.is_list("prompt"):
        return PlainText(row.string("prompt"), row.string("completion"))
    prompt = row.messages("prompt")
    return Conversation(prompt + row.messages("completion"), first_trained=len(prompt))


def _from_text(row: _Row) -> TrainingText:
    return PlainText("", row.string("text"))


@dataclass(frozen=True)
class _Format:
    name: str
    keys: tuple[str, ...]
    parse: Callable[[_Row], TrainingText]


# The first whose keys are there wins: published files carry a rendered `text` or a `prompt` beside the real columns.
_FORMATS = (
    _Format("messages", ("messages",), _from_messages),
    _Format("question/answer", ("question", "answer"), _from_question),
    _Format("alpaca", ("instruction", "output"), _from_alpaca),
    _Format("prompt/completion", ("prompt", "completion"), _from_prompt),
    _Format("text", ("text",), _from_text),
)
_MAX_KEYS_SHOWN = 10


def parse_rows(rows: list[dict[str, Any]], source: str) -> list[TrainingText]:
    """Conversations and texts of ``rows``, one each; the keys of the first row give the format of all.

    Formats: ``messages``; ``question`` and ``answer``; alpaca (``instruction``, ``output``, perhaps ``input``);
    ``prompt`` and ``completion`` (two strings, or two lists of messages); ``text``. Other keys are ignored.

    Args:
        rows: at least one.
        source: the file's name for errors.

    Raises:
        UsageError: the format is unknown, or a row does not follow it.
    """
    row_format = _detect(rows[0], source)
    texts = []
    for number, values in enumerate(rows, 1):
        row = _Row(values, f"{source}: row {number}")
        row.require(row_format.keys, row_format.name)
        texts.append(row_format.parse(row))
    return texts


def _detect(first: dict[str, Any], source: str) -> _Format:
    for candidate in _FORMATS:
        if first.keys() >= set(candidate.keys):
            return candidate
    found = ", ".join(repr(key) for key in list(first)[:_MAX_KEYS_SHOWN]) or "none"
    more = ", ..." if len(first) > _MAX_KEYS_SHOWN else ""
    known = "; ".join(f"{item.name} ({', '.join(item.keys)})" for item in _FORMATS)
    raise UsageError(f"{source}: row 1 has the keys {found}{more}, no known format; rename them to one of: {known}")
