"""Formats of rows: which columns they have, and the conversations, texts or tokens that those become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lazysched.errors import UsageError
from lazysched.runtime.data.files import PlacedRow
from lazysched.runtime.data.messages import OPENAI, SHAREGPT, Tags, read_left_out, read_messages
from lazysched.runtime.data.row import Conversation, Message, PlacedText, PlainText, Row, TokenIds, TrainingText

IGNORED = -100
"""Label of a token that is not trained."""


@dataclass(frozen=True)
class RowFormat:
    """One way to write rows.

    Attributes:
        name: what ``--data-format`` takes.
        keys: columns that a row must have.
        parse: what a row becomes.
    """

    name: str
    keys: tuple[str, ...]
    parse: Callable[[Row], TrainingText]


def asked(row: Row, question: str, answer: str, *, system: str = "", history: Iterable[Message] = ()) -> Conversation:
    """A question and its answer after what was said before."""
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    last: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Conversation((*first, *history, *last), tools=row.tools("tools"))


def read_history(row: Row, key: str | None) -> list[Message]:
    """Messages of earlier pairs of question and answer.

    Raises:
        UsageError: not a list of pairs.
    """
    pairs = (None if key is None else row.value(key)) or []
    messages: list[Message] = []
    for index, pair in enumerate(pairs if isinstance(pairs, list) else [pairs]):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise row.error(f"{key}[{index}] is no pair; write ['question', 'answer']")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": row.checked_string(text, f"{key}[{index}]")})
    return messages


def _from_alpaca(row: Row) -> TrainingText:
    given, instruction = row.optional_string("input"), row.string("instruction")
    question = f"{instruction}\n\n{given}" if given else instruction
    history = read_history(row, "history")
    return asked(row, question, row.string("output"), system=row.optional_string("system"), history=history)


def _from_messages(row: Row) -> TrainingText:
    return conversation_of(row, "messages", OPENAI)


def _from_conversations(row: Row) -> TrainingText:
    first = row.objects("conversations")[0]
    tags = OPENAI if isinstance(first, dict) and {"role", "content"} <= first.keys() else SHAREGPT
    return conversation_of(row, "conversations", tags, system="system")


def conversation_of(
    row: Row, key: str, tags: Tags, *, system: str | None = None, tools: str | None = "tools"
) -> Conversation:
    """The messages under ``key``, spelled as ``tags`` say.

    Args:
        row: has the column ``key``.
        key: of the messages.
        tags: keys and roles.
        system: column of a system turn, put first where the messages do not begin with one of their own.
        tools: column of the functions that may be called.

    Raises:
        UsageError: something in the row is not as it should be.
    """
    messages, left_out = read_messages(row, key, tags), read_left_out(row, key)
    text = row.optional_string(system)
    if text and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": text}, *messages)
        left_out = tuple(index + 1 for index in left_out)
    return Conversation(messages, tools=row.tools(tools), left_out=left_out)


def _from_prompt(row: Row) -> TrainingText:
    if isinstance(row.value("label"), bool):
        raise row.error("'label' marks a preference, which is not trained here; keep good completions, drop the column")
    if row.is_list("prompt") != row.is_list("completion"):
        raise row.error("'prompt' and 'completion' are of two kinds; write two strings or two lists of messages")
    if not row.is_list("prompt"):
        return PlainText(row.string("prompt"), row.string("completion"))
    prompt = read_messages(row, "prompt", OPENAI)
    answer = conversation_of(row, "completion", OPENAI)
    left_out = tuple(len(prompt) + index for index in answer.left_out)
    return Conversation(prompt + answer.messages, len(prompt), answer.tools, left_out)


def _from_tokens(row: Row) -> TrainingText:
    ids = row.integers("input_ids")
    labels = ids if row.value("labels") is None else row.integers("labels")
    if len(labels) != len(ids):
        raise row.error(f"'labels' has {len(labels)} elements, 'input_ids' {len(ids)}; give one label a token")
    for index, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, IGNORED):
            raise row.error(
                f"labels[{index}] is {label}, input_ids[{index}] {token}; write the token itself, not the next one, "
                f"or {IGNORED} where nothing is trained"
            )
    return TokenIds(ids, labels)


FORMATS = (
    RowFormat("messages", ("messages",), _from_messages),
    RowFormat("sharegpt", ("conversations",), _from_conversations),
    RowFormat("question/answer", ("question", "answer"), lambda r: asked(r, r.string("question"), r.string("answer"))),
    RowFormat("query/response", ("query", "response"), lambda r: asked(r, r.string("query"), r.string("response"))),
    RowFormat("alpaca", ("instruction", "output"), _from_alpaca),
    RowFormat("prompt/completion", ("prompt", "completion"), _from_prompt),
    RowFormat("tokens", ("input_ids",), _from_tokens),
    RowFormat("text", ("text",), lambda row: PlainText("", row.string("text"))),
)
_MAX_KEYS_SHOWN = 10


def format_named(name: str) -> RowFormat:
    """The format that ``--data-format`` names.

    Raises:
        UsageError: there is none.
    """
    for candidate in FORMATS:
        if candidate.name == name:
            return candidate
    raise UsageError(f"data_format: {name!r} is not known; use one of {', '.join(item.name for item in FORMATS)}")


def parse_rows(rows: Iterable[PlacedRow], row_format: RowFormat | None = None) -> Iterator[PlacedText]:
    """Conversations, texts and tokens of ``rows``, one each.

    Args:
        rows: in order.
        row_format: of all rows; None takes the one whose columns the first row has. Other columns are ignored.

    Raises:
        UsageError: the format is unknown or ambiguous, or a row does not follow it.
    """
    for placed in rows:
        row_format = row_format or _detected(placed)
        row = Row(placed.values, placed.place)
        row.require(row_format.keys, row_format.name)
        yield PlacedText(placed.place, row_format.parse(row))


def _detected(first: PlacedRow) -> RowFormat:
    matching = [candidate for candidate in FORMATS if first.values.keys() >= set(candidate.keys)]
    if not matching:
        known = "; ".join(f"{item.name} ({', '.join(item.keys)})" for item in FORMATS)
        raise UsageError(f"{first.place} has the keys {_shown(first.values)}, no known format; rename them to {known}")
    # Published files carry a rendered `text` beside the real columns.
    candidates = [item for item in matching if item.name != "text"] or matching
    if len(candidates) > 1:
        names = " and ".join(item.name for item in candidates)
        raise UsageError(f"{first.place} fits more than one format, {names}; choose one with --data-format")
    return candidates[0]


def _shown(values: Mapping[str, Any]) -> str:
    found = ", ".join(repr(key) for key in list(values)[:_MAX_KEYS_SHOWN]) or "none"
    return found + (", ..." if len(values) > _MAX_KEYS_SHOWN else "")
