from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lazysched.errors import UsageError
from lazysched.runtime.data.formats import IGNORED
from lazysched.runtime.data.row import Conversation, PlacedText, PlainText, TokenIds, TrainingText
from lazysched.runtime.data.tokens import Encoder, TokenRow
from tests.runtime import tiny_tokenizers as tiny
from tests.runtime.tiny_tokenizers import make_tokenizer


def conversation(*contents: str, first_trained: int = 0, system: str | None = None) -> Conversation:
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(tuple(messages), first_trained)


def encode_all(tokenizer: Any, texts: list[TrainingText]) -> list[TokenRow]:
    placed = (PlacedText(f"rows.json: row {number}", text) for number, text in enumerate(texts, 1))
    return list(Encoder(tokenizer).encode(placed))


def encode(tokenizer: Any, text: TrainingText) -> TokenRow:
    (row,) = encode_all(tokenizer, [text])
    assert row.input_ids.dtype == row.labels.dtype == np.int32
    trained = row.labels != IGNORED
    np.testing.assert_array_equal(row.labels[trained], row.input_ids[trained])
    return row


def spans(tokenizer: Any, row: TokenRow) -> list[str]:
    """Text of each run of trained tokens."""
    runs = itertools.groupby(range(len(row.labels)), key=lambda i: row.labels[i] != IGNORED)
    return [tokenizer.decode(row.input_ids[list(places)]) for is_trained, places in runs if is_trained]


def trained(tokenizer: PreTrainedTokenizerFast, text: TrainingText) -> list[str]:
    return spans(tokenizer, encode(tokenizer, text))


class TestTemplate:
    @pytest.mark.parametrize("template", [tiny.CHAT, tiny.WITH_OWN_SYSTEM_TURN, tiny.WITH_BOS])
    def test_every_answer_with_the_token_that_ends_it(self, template: str) -> None:
        tokenizer = make_tokenizer(template)
        assert trained(tokenizer, conversation("hi", "yes", "why?", "because")) == ["yes<|end|>", "because<|end|>"]

    def test_a_given_system_turn_is_no_answer(self) -> None:
        tokenizer = make_tokenizer(tiny.WITH_OWN_SYSTEM_TURN)
        row = encode(tokenizer, conversation("hi", "yes", system="be brief"))
        assert str(tokenizer.decode(row.input_ids)).startswith("<|start|>system\nbe brief<|end|>\n<|start|>user")
        assert spans(tokenizer, row) == ["yes<|end|>"]

    def test_turns_in_the_prompt_are_not_trained(self) -> None:
        text = conversation("hi", "yes", "why?", "because", first_trained=3)
        assert trained(make_tokenizer(tiny.CHAT), text) == ["because<|end|>"]

    def test_turns_that_are_left_out_are_not_trained(self) -> None:
        text = replace(conversation("hi", "yes", "why?", "because"), left_out=(1,))
        assert trained(make_tokenizer(tiny.CHAT), text) == ["because<|end|>"]
        text = replace(conversation("hi", "yes", "why?", "because"), left_out=(3,))
        assert trained(make_tokenizer(tiny.CHAT), text) == ["yes<|end|>"]

    def test_pad_that_is_also_the_end_of_a_turn_is_trained(self) -> None:
        tokenizer = make_tokenizer(tiny.CHAT, eos="<|end|>", pad="<|end|>")
        row = encode(tokenizer, conversation("hi", "yes"))
        assert spans(tokenizer, row) == ["yes<|end|>"]
        assert np.count_nonzero(row.input_ids == tokenizer.pad_token_id) == 2, "the user's turn ends too, untrained"

    def test_the_tokenizers_bos_does_not_come_on_top(self) -> None:
        with_bos = encode(make_tokenizer(tiny.WITH_BOS, adds_bos=True, adds_eos=True), conversation("hi", "yes"))
        assert list(with_bos.input_ids).count(tiny.SPECIAL.index("<s>")) == 1
        assert tiny.SPECIAL.index("</s>") not in with_bos.input_ids

    def test_token_that_closes_the_conversation(self) -> None:
        answers = trained(make_tokenizer(tiny.CLOSING_CONVERSATIONS), conversation("hi", "yes", "why?", "because"))
        assert answers == ["yes<|end|>", "because<|end|>\n</s>"]

    def test_template_without_an_end_gets_one(self) -> None:
        tokenizer = make_tokenizer(tiny.WITHOUT_MARKS)
        assert trained(tokenizer, conversation("hi", "yes")) == ["assistant: yes\n</s>"]

    @pytest.mark.parametrize("template", [tiny.CHAT, tiny.WITHOUT_MARKS])
    def test_conversation_that_ends_with_the_user_gets_no_end(self, template: str) -> None:
        row = encode(make_tokenizer(template), conversation("hi", "yes", "bye"))
        assert tiny.SPECIAL.index("</s>") not in row.input_ids

    def test_without_an_assistant_nothing_is_trained(self) -> None:
        assert trained(make_tokenizer(tiny.CHAT), conversation("hi")) == []

    def test_white_space_of_an_answer_stays(self) -> None:
        assert trained(make_tokenizer(tiny.CHAT), conversation("hi", "  yes\n\n")) == ["  yes\n\n<|end|>"]

    def test_a_token_across_the_boundary_is_trained_and_counted(self) -> None:
        tokenizer = make_tokenizer(tiny.CHAT, merges=(("\n", "\n"),))
        row = encode(tokenizer, conversation("hi", "\nyes"))
        assert spans(tokenizer, row) == ["\n\nyes<|end|>"]
        assert row.has_split_boundary
        assert not encode(tokenizer, conversation("hi", "yes")).has_split_boundary

    @pytest.mark.parametrize("template", [tiny.DROPPING_OLD_THOUGHTS, tiny.COUNTING_MESSAGES])
    def test_refuses_a_template_that_changes_earlier_turns(self, template: str) -> None:
        text = conversation("hi", "yes", "why?", "because")
        with pytest.raises(UsageError, match=r"rows.json: row 1, message 2: the chat template renders .* differently"):
            encode(make_tokenizer(template), text)

    def test_refuses_a_template_that_leaves_answers_out(self) -> None:
        template = "{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] }}{% endfor %}"
        with pytest.raises(UsageError, match="cannot be told apart"):
            encode(make_tokenizer(template), conversation("hi", "yes"))

    def test_what_the_template_refuses_is_one_line(self) -> None:
        with pytest.raises(UsageError, match=r"row 1: the chat template refuses it \(no system\)") as caught:
            encode(make_tokenizer(tiny.REFUSING_SYSTEM), conversation("hi", "yes", system="be brief"))
        assert "\n" not in str(caught.value)

    def test_refuses_an_answer_to_nothing(self) -> None:
        with pytest.raises(UsageError, match="first message is the assistant's"):
            encode(make_tokenizer(tiny.CHAT), Conversation(({"role": "assistant", "content": "yes"},)))

    @settings(deadline=None)
    @given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1), min_size=2, max_size=6))
    def test_any_conversation(self, contents: list[str]) -> None:
        contents = [content.replace("<", "(") for content in contents[: len(contents) // 2 * 2]]
        tokenizer = make_tokenizer(tiny.WITH_OWN_SYSTEM_TURN, merges=((" ", " "), ("a", "b")))
        row = encode(tokenizer, conversation(*contents))
        assert spans(tokenizer, row) == [f"{answer}<|end|>" for answer in contents[1::2]]
        # What a model is prompted with at inference is what it saw in training.
        prompt = tokenizer.apply_chat_template(
            list(conversation(*contents).messages[:-1]), add_generation_prompt=True, return_dict=False
        )
        assert list(row.input_ids[: len(prompt)]) == prompt


TOOLS = ({"type": "function", "function": {"name": "add"}},)
CALL = {"name": "add", "arguments": {"a": 2}}
WITH_CALL = Conversation(
    (
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4"},
    ),
    tools=TOOLS,
)


class TestTools:
    def test_calls_and_answers_are_trained_and_results_are_not(self) -> None:
        tokenizer = make_tokenizer(tiny.WITH_TOOLS)
        row = encode(tokenizer, WITH_CALL)
        assert spans(tokenizer, row) == ['{"name": "add", "arguments": {"a": 2}}<|end|>', "It is 4<|end|>"]
        assert '"function": {"name": "add"}' in str(tokenizer.decode(row.input_ids)).split("<|start|>user")[0]

    def test_refuses_a_template_that_leaves_tools_out(self) -> None:
        with pytest.raises(UsageError, match="row 1: tools: the chat template leaves them out"):
            encode(make_tokenizer(tiny.CHAT), WITH_CALL)
        with pytest.raises(UsageError, match="row 1, message 2: the chat template leaves out its call of 'add'"):
            encode(make_tokenizer(tiny.CHAT), Conversation(WITH_CALL.messages))
        with pytest.raises(UsageError, match="no chat template, which tools need"):
            encode(make_tokenizer(), WITH_CALL)


def test_tokens_made_before_stay_as_they_are() -> None:
    row = encode(make_tokenizer(tiny.CHAT, adds_bos=True, adds_eos=True), TokenIds((9, 2, 9), (9, -100, 9)))
    assert row.input_ids.tolist() == [9, 2, 9]
    assert row.labels.tolist() == [-100, -100, 9]


class TestWithoutTemplate:
    def test_an_answer_that_is_left_out_is_not_trained(self) -> None:
        tokenizer = make_tokenizer()
        assert trained(tokenizer, replace(conversation("a", "b"), left_out=(0,))) == trained(
            tokenizer, conversation("a", "b")
        )
        assert trained(tokenizer, replace(conversation("a", "b"), left_out=(1,))) == []

    def test_question_and_answer_are_two_lines(self) -> None:
        tokenizer = make_tokenizer()
        row = encode(tokenizer, conversation("2+2?", "4"))
        assert tokenizer.decode(row.input_ids) == "2+2?\n4</s>"
        assert spans(tokenizer, row) == ["4</s>"]

    def test_prompt_and_completion_never_go_through_the_template(self) -> None:
        tokenizer = make_tokenizer(tiny.CHAT, adds_bos=True)
        row = encode(tokenizer, PlainText("2+2=", "4"))
        assert tokenizer.decode(row.input_ids) == "<s>2+2=4</s>"
        assert spans(tokenizer, row) == ["4</s>"]

    @pytest.mark.parametrize("text", ["a b", "<s>a b", "a b</s>", "<s>a b</s>"])
    @pytest.mark.parametrize("adds_eos", [False, True])
    def test_one_beginning_and_one_end(self, text: str, adds_eos: bool) -> None:
        tokenizer = make_tokenizer(adds_bos=True, adds_eos=adds_eos and not text.endswith("</s>"))
        row = encode(tokenizer, PlainText("", text))
        assert tokenizer.decode(row.input_ids) == "<s>a b</s>"
        assert spans(tokenizer, row) == ["a b</s>"]
        assert not row.has_split_boundary

    def test_the_first_token_is_never_a_target(self) -> None:
        assert trained(make_tokenizer(), PlainText("", "abc")) == ["bc</s>"]

    def test_end_that_the_tokenizer_adds_is_no_split_boundary(self) -> None:
        row = encode(make_tokenizer(adds_eos=True), PlainText("2+2=", "4"))
        assert not row.has_split_boundary

    def test_refuses_what_needs_a_template(self) -> None:
        for text in (conversation("hi", "yes", "why?", "because"), conversation("hi")):
            with pytest.raises(UsageError, match=r"row 1: the tokenizer has no chat template"):
                encode(make_tokenizer(), text)

    def test_refuses_a_tokenizer_without_an_end(self) -> None:
        with pytest.raises(UsageError, match="no eos_token"):
            Encoder(make_tokenizer(eos=None))


def test_rows_keep_their_order_and_number_across_chunks() -> None:
    tokenizer = make_tokenizer(tiny.CHAT)
    texts: list[TrainingText] = [PlainText(f"{i}", "a") if i % 3 else conversation(f"{i}", "a") for i in range(1100)]
    decoded = [str(tokenizer.decode(row.input_ids)) for row in encode_all(tokenizer, texts)]
    numbers = [re.findall(r"\d+", text)[0] for text in decoded]
    assert numbers == [str(i) for i in range(1100)]
    texts[1050] = Conversation(({"role": "assistant", "content": "a"},))
    with pytest.raises(UsageError, match="row 1051:"):
        encode_all(tokenizer, texts)


def test_importing_the_data_modules_loads_no_transformers(tmp_path: Path) -> None:
    code = "import sys, lazysched.runtime.data; assert 'transformers' not in sys.modules"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={"PYTHONPATH": str(root), "PATH": ""})
