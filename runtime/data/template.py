"""A tokenizer's chat template: a program that came with a model, in transformers' sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lazysched.errors import UsageError
from lazysched.runtime.data.row import Message


def render(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[dict[str, Any]], where: str, *, generate: bool
) -> str:
    """``messages`` as the chat template writes them.

    Args:
        tokenizer: has a chat template.
        messages: in order.
        tools: functions that may be called, as JSON schemas.
        where: names the row in an error.
        generate: whether the text ends where an answer would begin.

    Raises:
        UsageError: the template is damaged, or refuses the row.
    """
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generate
            )
        )
    except Exception as error:  # a program can fail in any way, jinja2 has words for a few of them only
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(
            f"{where}: the chat template refuses it ({reason}); change the row, or the template if it is damaged"
        ) from None
