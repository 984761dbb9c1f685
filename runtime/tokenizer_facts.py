"""What the tokenizer of a model folder does, for ``lazysched doctor``."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from lazysched.doctor.facts import TokenizerFacts
from lazysched.errors import UsageError
from lazysched.runtime.data.row import Conversation, Message, PlacedText, PlainText
from lazysched.runtime.data.template import render
from lazysched.runtime.data.tokenizer import load_tokenizer
from lazysched.runtime.data.tokens import Encoder
from lazysched.runtime.sources import ModelSource, resolve_model

_MESSAGES: tuple[Message, ...] = ({"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"})


def tokenizer_facts(folder: str) -> TokenizerFacts:
    """Tokenise one conversation as training does.

    Args:
        folder: of a model, with config.json.
    """
    try:
        source = resolve_model(folder)
        return _facts(load_tokenizer(source), source)
    except UsageError as error:
        return TokenizerFacts(problem=str(error))


def _facts(tokenizer: Any, source: ModelSource) -> TokenizerFacts:
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    has_template = bool(tokenizer.chat_template)
    where = str(source.config_dir)
    text = Conversation(_MESSAGES) if has_template else PlainText("2 + 3?", "5")
    (row,) = Encoder(tokenizer).encode([PlacedText(where, text)])
    rendered = render(tokenizer, _MESSAGES, (), where, generate=False) if has_template else ""
    alone = tokenizer("5", add_special_tokens=True)["input_ids"]
    return TokenizerFacts(
        problem=None, has_template=has_template, bos=bos,
        template_adds_bos=bool(bos) and rendered.startswith(bos),
        tokenizer_adds_bos=bos_id is not None and alone[:1] == [bos_id],
        num_leading_bos=sum(1 for _ in takewhile(lambda token: token == bos_id, row.input_ids.tolist())),
        max_token_id=max(tokenizer.get_vocab().values(), default=0), embedding_rows=_embedding_rows(source),
    )  # fmt: skip


def _embedding_rows(source: ModelSource) -> int | None:
    rows = getattr(source.config.get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) else None
