"""One row of data while it is read, and the texts that rows become."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

from lazysched.errors import UsageError

Message: TypeAlias = dict[str, Any]
"""``role`` and ``content``, perhaps ``tool_calls`` and the like, as chat templates take it."""


@dataclass(frozen=True)
class Conversation:
    """Turns for a chat template; the assistant's are trained.

    Attributes:
        messages: in order; other roles than ``assistant`` are prompts.
        first_trained: assistant turns before this index belong to the prompt too.
        tools: functions that the assistant may call, as JSON schemas.
        left_out: indices of assistant turns that the row asks not to train.
    """

    messages: tuple[Message, ...]
    first_trained: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlainText:
    """Text that no template touches; ``completion`` is trained, ``prompt`` is not."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class TokenIds:
    """A row that was tokenised before.

    Attributes:
        input_ids: at least one.
        labels: as many; each the token of its place, or -100 where nothing is trained.
    """

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]


TrainingText: TypeAlias = Conversation | PlainText | TokenIds


@dataclass(frozen=True)
class PlacedText:
    """A text and what errors call its row."""

    place: str
    text: TrainingText


class Row:
    """One row, with errors that name the file, the row and the field.

    Args:
        values: column -> value.
        place: file and row for errors.
    """

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self._values, self.place = values, place

    def error(self, message: str) -> UsageError:
        """The error that ``message`` describes."""
        return UsageError(f"{self.place}: {message}")

    def require(self, keys: tuple[str, ...], format_name: str) -> None:
        """Refuse a row that lacks a column of its format."""
        for key in keys:
            if key not in self._values:
                raise self.error(f"no key {key!r}, which the format {format_name} needs; add it or drop the row")

    def value(self, key: str) -> Any:
        """What stands under ``key``; None where it is absent."""
        return self._values.get(key)

    def is_list(self, key: str) -> bool:
        """Whether the value is a list, so messages."""
        return isinstance(self._values[key], list)

    def string(self, key: str) -> str:
        """The text under ``key``."""
        return self.checked_string(self._values.get(key), repr(key))

    def optional_string(self, key: str | None) -> str:
        """The text under ``key``; empty where it is absent or null."""
        return "" if key is None or self._values.get(key) is None else self.string(key)

    def objects(self, key: str) -> list[Any]:
        """The list under ``key``, at least one element."""
        value = self._values.get(key)
        if not isinstance(value, list) or not value:
            raise self.error(f"{key!r} is not a list of messages; write [{{'role': ..., 'content': ...}}, ...]")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """The whole numbers under ``key``, at least one."""
        value = self._values.get(key)
        if not isinstance(value, list) or not value:
            raise self.error(f"{key!r} is not a list of token ids; write [1, 2, ...]")
        for index, item in enumerate(value):
            if not isinstance(item, int) or isinstance(item, bool) or item < (-100 if key == "labels" else 0):
                raise self.error(f"{key}[{index}] is {item!r}; write a token id, 0 or more")
            if item >= 2**31:
                raise self.error(f"{key}[{index}] is {item!r}, beyond any vocabulary; write a token id")
        return tuple(value)

    def tools(self, key: str | None) -> tuple[dict[str, Any], ...]:
        """JSON schemas of the functions under ``key``, a list or its JSON text; none where it is absent or empty."""
        value = None if key is None else self._values.get(key)
        if isinstance(value, str) and value.strip():
            value = self.parsed(value, repr(key))
        if not value:
            return ()
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise self.error(f"{key!r} is not a list of tools; write [{{'name': ..., 'parameters': ...}}, ...]")
        # Templates expect the wrapping of OpenAI's format; LLaMA-Factory's files do without it.
        return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in value)

    def parsed(self, text: str, name: str) -> Any:
        """The JSON value that ``text`` is."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.error(f"{name} is not JSON ({error}); mend it") from None

    def checked_string(self, value: Any, name: str) -> str:
        """``value``, which is text that can be encoded."""
        if not isinstance(value, str):
            raise self.error(f"{name} is a {type(value).__name__}, not a string; write text")
        try:
            # JSON can escape half of a surrogate pair, which no tokenizer takes.
            value.encode()
        except UnicodeEncodeError:
            raise self.error(f"{name} holds an unpaired surrogate (\\ud800-\\udfff); mend the escape") from None
        return value
