"""Tokens and labels of conversations and texts: which tokens a model learns to write.

With a chat template, the span of an assistant turn is what rendering the conversation through that turn adds to
rendering it up to there with a generation prompt. Most published templates carry no marks of their own for this.
Spans are positions, never token values: the padding token is often also the one that ends a turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lazysched.errors import UsageError
from lazysched.runtime.data.formats import IGNORED
from lazysched.runtime.data.row import Conversation, Message, PlacedText, PlainText, TokenIds
from lazysched.runtime.data.template import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenArray = npt.NDArray[np.int32]
_ROWS_AT_ONCE = 512
"""Rows whose Python lists of tokens exist at once."""


@dataclass(frozen=True, eq=False)
class TokenRow:
    """One row at its full length.

    Attributes:
        input_ids: [tokens] int32.
        labels: [tokens] int32, the token itself where it is trained, else -100; not shifted. The first is always
            -100, for nothing predicts it.
        has_split_boundary: the last tokens of a prompt are not those that it has alone, since the tokenizer merged
            them with the answer's first; the merged token is trained.
    """

    input_ids: TokenArray
    labels: TokenArray
    has_split_boundary: bool


@dataclass(frozen=True)
class _Turn:
    """A trained turn: the text that ``through`` has beyond ``prompt``."""

    prompt: str
    through: str


@dataclass(frozen=True)
class _Rendered:
    text: str
    turns: tuple[_Turn, ...]
    is_templated: bool


class Encoder:
    """Turns texts into tokens and labels.

    Args:
        tokenizer: its chat template, if it has one, is used for conversations.

    Raises:
        UsageError: the tokenizer has no token that ends a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # The signatures of tokenizers change between releases of transformers, their behaviour here does not.
        self._tokenizer: Any = tokenizer
        self._tools_are_shown = False
        if tokenizer.eos_token_id is None:
            raise UsageError("tokenizer: it has no eos_token, so no answer could end; set eos_token in its files")
        self._eos_id = int(self._tokenizer.eos_token_id)
        self._eos_text = str(self._tokenizer.eos_token)
        added = self._tokenizer.added_tokens_decoder.items()
        self._special_ids = {index for index, token in added if token.special} | set(self._tokenizer.all_special_ids)

    def encode(self, texts: Iterable[PlacedText]) -> Iterator[TokenRow]:
        """One row of tokens per text, in order; texts are asked for a few hundred at a time.

        Raises:
            UsageError: the template refuses a row, or its turns cannot be told apart; the row is named.
        """
        remaining = iter(texts)
        while rows := list(itertools.islice(remaining, _ROWS_AT_ONCE)):
            rendered = [self._render(row) for row in rows]
            ids = {templated: self._token_ids(rendered, templated) for templated in (False, True)}
            for row in rendered:
                yield row if isinstance(row, TokenRow) else self._label(row, ids[row.is_templated])

    def _render(self, row: PlacedText) -> _Rendered | TokenRow:
        text = row.text
        if isinstance(text, TokenIds):
            ids, labels = (np.array(values, dtype=np.int32) for values in (text.input_ids, text.labels))
            labels[:1] = IGNORED
            return TokenRow(ids, labels, has_split_boundary=False)
        if isinstance(text, Conversation) and self._tokenizer.chat_template:
            return self._render_template(text, row.place)
        plain = without_template(text, row.place) if isinstance(text, Conversation) else text
        whole = plain.prompt + plain.completion
        is_left_out = isinstance(text, Conversation) and len(text.messages) - 1 in text.left_out
        return _Rendered(whole, () if is_left_out else (_Turn(plain.prompt, whole),), is_templated=False)

    def _render_template(self, conversation: Conversation, where: str) -> _Rendered:
        messages = conversation.messages

        def through(count: int, *, prompt: bool) -> str:
            return render(self._tokenizer, messages[:count], conversation.tools, where, generate=prompt)

        whole = through(len(messages), prompt=False)
        self._check_tools(conversation, whole, where)
        turns = []
        for index in range(conversation.first_trained, len(messages)):
            if messages[index]["role"] != "assistant" or index in conversation.left_out:
                continue
            if index == 0:
                raise UsageError(f"{where}: the first message is the assistant's; put the user's message before it")
            end = whole if index + 1 == len(messages) else through(index + 1, prompt=False)
            turn = self._checked_turn(through(index, prompt=True), end, whole, f"{where}, message {index + 1}")
            _check_calls(messages[index], turn, f"{where}, message {index + 1}")
            turns.append(turn)
        return _Rendered(whole, tuple(turns), is_templated=True)

    def _check_tools(self, conversation: Conversation, whole: str, where: str) -> None:
        """Refuse a template that says nothing of tools: the model would learn to call what it was never told of."""
        if not conversation.tools or self._tools_are_shown:
            return
        if render(self._tokenizer, conversation.messages, (), where, generate=False) == whole:
            raise UsageError(
                f"{where}: tools: the chat template leaves them out; use a chat_template that knows tools, or drop "
                f"the column"
            )
        self._tools_are_shown = True

    def _checked_turn(self, prompt: str, through: str, whole: str, where: str) -> _Turn:
        if not whole.startswith(through):
            # Some templates close each conversation, not each turn, with this token.
            through = through.removesuffix(self._eos_text)
        if not (whole.startswith(prompt) and whole.startswith(through) and len(prompt) < len(through)):
            raise UsageError(
                f"{where}: the chat template renders a conversation's beginning differently once more follows, so the "
                f"assistant's turns cannot be told apart; use another chat_template, or prompt/completion rows"
            )
        return _Turn(prompt, through)

    def _token_ids(self, rows: Sequence[_Rendered | TokenRow], templated: bool) -> dict[str, TokenArray]:
        """Tokens of every text that the rows of one kind need."""
        wanted = [row for row in rows if isinstance(row, _Rendered) and row.is_templated == templated]
        parts = ((row.text, *(part for turn in row.turns for part in (turn.prompt, turn.through))) for row in wanted)
        texts = list(dict.fromkeys(part for row_parts in parts for part in row_parts))
        if not texts:
            return {}
        # A template writes its own special tokens; the tokenizer's would come on top of them.
        encoded = self._tokenizer(texts, add_special_tokens=not templated, return_attention_mask=False, verbose=False)
        arrays = (np.array(ids, dtype=np.int32) for ids in encoded["input_ids"])
        return dict(zip(texts, arrays if templated else map(self._with_one_bos, arrays), strict=True))

    def _with_one_bos(self, ids: TokenArray) -> TokenArray:
        """``ids`` without the tokenizer's BOS where the text already begins with one."""
        bos_id = self._tokenizer.bos_token_id
        return ids[1:] if bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == bos_id else ids

    def _label(self, row: _Rendered, ids_of: Mapping[str, TokenArray]) -> TokenRow:
        ids = ids_of[row.text]
        labels = np.full_like(ids, IGNORED)
        has_split_boundary, end = False, 0
        for turn in row.turns:
            prompt = ids_of[turn.prompt]
            start = _common_prefix(prompt, ids)
            end = _common_prefix(ids_of[turn.through], ids)
            if row.is_templated:
                end = self._end_of_turn(ids, start, end)
            labels[start:end] = ids[start:end]
            has_split_boundary |= start < len(prompt) - self._num_closing(prompt)
        if row.turns and row.turns[-1].through == row.text and not self._is_closed(ids[:end], row.is_templated):
            ids, labels = (np.append(array, np.int32(self._eos_id)) for array in (ids, labels))
        labels[:1] = IGNORED
        return TokenRow(ids, labels, has_split_boundary)

    def _num_closing(self, ids: TokenArray) -> int:
        """1 where the tokenizer itself ends every text."""
        return int(len(ids) > 0 and ids[-1] == self._eos_id)

    def _is_closed(self, ids: TokenArray, templated: bool) -> bool:
        """Whether a token at the end tells the model to stop."""
        return len(ids) > 0 and int(ids[-1]) in (self._special_ids if templated else {self._eos_id})

    def _end_of_turn(self, ids: TokenArray, start: int, end: int) -> int:
        """``end`` without the white space between a turn's closing token and the next turn: nobody samples it."""
        last = end
        while last > start and int(ids[last - 1]) not in self._special_ids:
            if self._tokenizer.decode([int(ids[last - 1])]).strip():
                return end
            last -= 1
        return last if last > start else end


def _check_calls(message: Message, turn: _Turn, where: str) -> None:
    for call in message.get("tool_calls", ()):
        name = call["function"]["name"]
        if name not in turn.through[len(turn.prompt) :]:
            raise UsageError(
                f"{where}: the chat template leaves out its call of {name!r}; use a chat_template that knows tools"
            )


def without_template(conversation: Conversation, where: str) -> PlainText:
    """A conversation of prompts and one answer as plain text, for a tokenizer without a chat template.

    Raises:
        UsageError: it is more than that, or has tools; ``where`` is named.
    """
    *prompt, answer = conversation.messages
    has_calls = any("tool_calls" in message for message in conversation.messages)
    if has_calls or conversation.tools:
        raise UsageError(f"{where}: the tokenizer has no chat template, which tools need; add one to the tokenizer")
    if answer["role"] != "assistant" or any(message["role"] == "assistant" for message in prompt) or not prompt:
        raise UsageError(
            f"{where}: the tokenizer has no chat template, which conversations need that are more than prompts and "
            f"one answer; add a chat_template to the tokenizer"
        )
    return PlainText("".join(message["content"] + "\n" for message in prompt), answer["content"])


def _common_prefix(left: TokenArray, right: TokenArray) -> int:
    """Number of leading tokens that both have in common."""
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length
