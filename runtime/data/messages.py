"""Lists of messages, in OpenAI's words (role, content) and in ShareGPT's (from, value), for chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lazysched.errors import short_repr
from lazysched.runtime.data.row import Message, Row

_FUNCTION_CALL = "function_call"
_KEPT = ("name", "tool_call_id", "reasoning_content")
"""Keys beside role and content that templates know."""
_IS_TRAINED = ("weight", "train", "training", "loss")
"""Keys by which files leave a turn out: of OpenAI, two of Axolotl, and of ms-swift."""
_PARTS = "training_detail"
"""Axolotl's key for parts of a turn."""


@dataclass(frozen=True)
class Tags:
    """How a file spells messages.

    Attributes:
        role: key of who speaks.
        content: key of what is said.
        roles: who speaks -> role of chat templates; None: as they are.
    """

    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] | None = None


_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
OPENAI = Tags(roles={role: role for role in _ROLES})
SHAREGPT = Tags(
    "from",
    "value",
    {
        "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
        "observation": "tool", "tool": "tool", "function_call": _FUNCTION_CALL,
    },
)  # fmt: skip


def read_messages(row: Row, key: str, tags: Tags) -> tuple[Message, ...]:
    """Messages under ``key``, at least one.

    Raises:
        UsageError: something is not as ``tags`` say.
    """
    return tuple(_message(row, value, f"{key}[{index}]", tags) for index, value in enumerate(row.objects(key)))


def read_left_out(row: Row, key: str) -> tuple[int, ...]:
    """Indices of messages under ``key`` that are not to be trained: by ``weight``, ``train``, ``training`` or ``loss``.

    Raises:
        UsageError: one of these is neither true nor false, nor 1 or 0.
    """
    return tuple(
        index for index, value in enumerate(row.objects(key)) if not _is_trained(row, value, f"{key}[{index}]")
    )


def _is_trained(row: Row, message: Mapping[str, Any], name: str) -> bool:
    """Whether none of the message's own keys leaves it out."""
    if message.get(_PARTS):
        raise row.error(f"{name}[{_PARTS!r}]: parts of a turn cannot be left out; remove it, or split the row")
    values = {key: message[key] for key in _IS_TRAINED if message.get(key) is not None}
    for key, value in values.items():
        if value not in (0, 1):
            raise row.error(f"{name}[{key!r}] is {short_repr(value)}; write 0 to leave the turn out, 1 to train it")
    return all(values.values())


def _message(row: Row, value: Any, name: str, tags: Tags) -> Message:
    has_calls = isinstance(value, dict) and bool(value.get("tool_calls"))
    if not isinstance(value, dict) or tags.role not in value or not (has_calls or tags.content in value):
        raise row.error(
            f"{name} has no {tags.role!r} and {tags.content!r}; write {{{tags.role!r}: ..., {tags.content!r}: ...}}"
        )
    role = row.checked_string(value[tags.role], f"{name}[{tags.role!r}]")
    if tags.roles is not None:
        if role not in tags.roles:
            known = ", ".join(tags.roles)
            raise row.error(f"{name}[{tags.role!r}] is {role!r}; write one of {known}")
        role = tags.roles[role]
    content = value.get(tags.content)
    if has_calls and content is None:
        content = ""
    text = row.checked_string(content, f"{name}[{tags.content!r}]")
    if role == _FUNCTION_CALL:
        return {"role": "assistant", "content": "", "tool_calls": _tool_calls(row, row.parsed(text, name), name)}
    message: Message = {"role": role, "content": text}
    message |= {kept: row.checked_string(value[kept], f"{name}[{kept!r}]") for kept in _KEPT if value.get(kept)}
    if has_calls:
        message["tool_calls"] = _tool_calls(row, value["tool_calls"], f"{name}['tool_calls']")
    return message


def _tool_calls(row: Row, value: Any, name: str) -> list[dict[str, Any]]:
    """Calls as templates take them: arguments as an object, also where the file has them as JSON text."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise row.error(f"{name} is no call; write {{'name': ..., 'arguments': {{...}}}}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = row.parsed(arguments, f"{name}: arguments")
        if not isinstance(arguments, dict):
            raise row.error(f"{name}: arguments is a {type(arguments).__name__}, not an object; write {{...}}")
        called = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append(({"id": call["id"]} if call.get("id") else {}) | called)
    return calls
