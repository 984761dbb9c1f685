"""What the tokenizer of a model folder does, for ``lazysched doctor``."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from transformers import AutoTokenizer

from lazysched.doctor.facts import TokenizerFacts
from lazysched.errors import UsageError
from lazysched.runtime.data_formats import Conversation, Message, PlainText
from lazysched.runtime.data_tokens import Encoder
from lazysched.runtime.sources import ModelSource, resolve_model

_MESSAGES: tuple[Message, ...] = ({"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"})


def tokenizer_facts(folder: str) -> TokenizerFacts:
    """Tokenise one conversation as training does.

    Args:
        folder: of a model, with config.json.
    """
    try:
        source = resolve_model(folder)
        if not source.has_tokenizer:
            raise UsageError(f"{folder}: it holds no tokenizer; add the tokenizer's files")
        return _facts(AutoTokenizer.from_pretrained(folder), source)
    except UsageError as error:
        return TokenizerFacts(problem=str(error))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return TokenizerFacts(problem=f"{folder}: its tokenizer cannot be read ({error}); download its files again")


def _facts(tokenizer: Any, source: ModelSource) -> TokenizerFacts:
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    has_template = bool(tokenizer.chat_template)
    text = Conversation(_MESSAGES) if has_template else PlainText("2 + 3?", "5")
    (row,) = Encoder(tokenizer, str(source.config_dir)).encode([text])
    rendered = str(tokenizer.apply_chat_template(list(_MESSAGES), tokenize=False)) if has_template else ""
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
