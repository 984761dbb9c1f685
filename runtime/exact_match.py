"""Exact match by generation: greedy answers to the questions of held-out rows, judged by the last number in them.

The rule is that of GSM8K (Cobbe et al. 2021): an answer is right if its last number is the reference's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from lazysched.errors import RunError, UsageError
from lazysched.runtime.arguments import choose_device
from lazysched.runtime.data.formats import parse_rows
from lazysched.runtime.data.row import Conversation, PlacedText, PlainText
from lazysched.runtime.data.sources import resolve_data
from lazysched.runtime.data.template import render
from lazysched.runtime.data.tokenizer import load_tokenizer
from lazysched.runtime.data.tokens import without_template
from lazysched.runtime.quiet_transformers import quiet_transformers
from lazysched.runtime.sources import ModelSource, resolve_model

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Answer:
    """One row: what was asked, the reference's last number, the model's answer and its last number."""

    place: str
    prompt: str
    expected: str
    answer: str
    given: str | None
    is_right: bool
    is_cut: bool
    """Whether it had not come to its end at ``max_new_tokens``."""


@dataclass(frozen=True)
class ExactMatch:
    """Answers to all rows, in their order."""

    answers: list[Answer]

    @property
    def num_right(self) -> int:
        """Answers whose last number is the reference's."""
        return sum(answer.is_right for answer in self.answers)

    @property
    def num_cut(self) -> int:
        """Answers that were longer than ``max_new_tokens``."""
        return sum(answer.is_cut for answer in self.answers)

    def save(self, path: Path) -> None:
        """Write one JSON object a row."""
        try:
            path.write_text("".join(json.dumps(asdict(a)) + "\n" for a in self.answers), encoding="utf-8")
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror}); name a file you may write") from None


def last_number(text: str) -> str | None:
    """The last number of ``text``, without separators of thousands; None where there is none."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def exact_match(
    model: str,
    data: str,
    *,
    data_format: str | None = None,
    max_rows: int | None = None,
    max_new_tokens: int = 512,
    batch_size: int = 8,
    device: str | None = None,
    report: Callable[[int, int], None] = lambda done, right: None,
) -> ExactMatch:
    """Let a model answer the questions of ``data``, greedily.

    Args:
        model: folder or hub name with weights and a tokenizer.
        data: as for training; the last assistant turn, or the completion, is the reference.
        data_format: of the rows, where their columns fit more than one.
        max_rows: the first so many; None takes all.
        max_new_tokens: of an answer at most.
        batch_size: rows that are answered at once.
        device: ``cuda`` or ``cpu``; None takes the GPU where there is one.
        report: called after each batch with the rows answered and those that are right so far.

    Raises:
        UsageError: model or data cannot be read, a row has no answer, or its answer no number.
    """
    source, target = resolve_model(model), choose_device(device)
    if not source.has_weights:
        raise UsageError(f"model: {model} has no weights; name a folder with safetensors files")
    tokenizer = load_tokenizer(source)
    rows = list(islice(_questions(data, data_format, tokenizer), max_rows))
    network = _load(source).to(target).eval()
    order = sorted(range(len(rows)), key=lambda k: len(rows[k].prompt))  # little padding
    answers: dict[int, Answer] = {}
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        found = _generate(network, tokenizer, [rows[k] for k in batch], max_new_tokens, target)
        answers |= {k: rows[k].judged(*answered) for k, answered in zip(batch, found, strict=True)}
        report(len(answers), sum(answer.is_right for answer in answers.values()))
    return ExactMatch([answers[k] for k in range(len(rows))])


def _load(source: ModelSource) -> Any:
    """The model in transformers' own form, all of its weights from the folder."""
    # Imported here, since it loads the model classes of transformers.
    from transformers import AutoModelForCausalLM

    folder = source.config_dir
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", use_safetensors=True, trust_remote_code=False, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{folder}: transformers cannot load it ({reason}); download it again") from None
    network, found = loaded
    # transformers would draw at random what is not there.
    for name, *shapes in sorted(found["mismatched_keys"]):
        stored, wanted = (tuple(shape) for shape in shapes)
        raise UsageError(
            f"{folder}: {name}: shape {stored} does not fit {wanted}, which config.json asks for; use the config.json "
            f"of these weights"
        )
    for name in sorted(found["missing_keys"]):
        raise UsageError(f"{folder}: {name}: missing; use the weights that belong to this config.json")
    return network


@dataclass(frozen=True)
class _Question:
    place: str
    prompt: str
    is_templated: bool
    expected: str

    def judged(self, answer: str, is_cut: bool) -> Answer:
        given = last_number(answer)
        is_right = given is not None and Decimal(given) == Decimal(self.expected)
        return Answer(self.place, self.prompt, self.expected, answer, given, is_right, is_cut)


def _questions(data: str, data_format: str | None, tokenizer: Any) -> Iterator[_Question]:
    for source in resolve_data(data, data_format):
        yield from (_question(row, tokenizer) for row in parse_rows(source.rows(), source.row_format))


def _question(row: PlacedText, tokenizer: Any) -> _Question:
    """Prompt as in training, up to where the answer begins."""
    text, is_templated = row.text, isinstance(row.text, Conversation) and bool(tokenizer.chat_template)
    if isinstance(text, Conversation) and text.messages[-1]["role"] != "assistant":
        raise _nothing_asked(row)
    if isinstance(text, Conversation) and is_templated:
        reference = str(text.messages[-1]["content"])
        prompt = render(tokenizer, text.messages[:-1], text.tools, row.place, generate=True)
    else:
        plain = without_template(text, row.place) if isinstance(text, Conversation) else text
        if not isinstance(plain, PlainText) or not plain.prompt:
            raise _nothing_asked(row)
        prompt, reference = plain.prompt, plain.completion
    expected = last_number(reference)
    if expected is None:
        raise UsageError(f"{row.place}: its answer {reference[:40]!r} holds no number to match; leave such rows out")
    return _Question(row.place, str(prompt), is_templated, expected)


def _nothing_asked(row: PlacedText) -> UsageError:
    return UsageError(f"{row.place}: no question with an answer; give rows as question/answer or messages")


def _generate(
    network: Any, tokenizer: Any, rows: Iterable[_Question], max_new_tokens: int, device: torch.device
) -> list[tuple[str, bool]]:
    """(answer, whether it was cut) to ``rows``, padded on the left so that every answer begins at the same place."""
    listed = list(rows)
    # Where a template wrote the text, its start token is in it.
    ids = [tokenizer(row.prompt, add_special_tokens=not row.is_templated)["input_ids"] for row in listed]
    length = max(map(len, ids))
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = torch.tensor([[pad_id] * (length - len(row)) + row for row in ids], device=device)
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in ids], device=device)
    with torch.inference_mode():
        made = network.generate(
            input_ids=tokens, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=pad_id
        )
    answers = made[:, length:]
    ends = torch.tensor(_end_ids(network, tokenizer), device=device)
    is_cut = ~torch.isin(answers, ends).any(dim=1) & (answers.shape[1] == max_new_tokens)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return [(str(text), cut) for text, cut in zip(texts, is_cut.tolist(), strict=True)]


def _end_ids(network: Any, tokenizer: Any) -> list[int]:
    """Tokens at which generating ends."""
    own = network.generation_config.eos_token_id
    found = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
    return [token for token in found if token is not None]
