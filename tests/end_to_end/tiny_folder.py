"""A tiny model in a folder as people have them: config, safetensors, tokenizer with a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.runtime.tiny import llama

WORDS = "what is plus one two three four five six seven eight nine ten the answer user assistant".split()  # noqa: SIM905
TEMPLATE = (
    "{% for message in messages %}<s> {{ message['role'] }} {{ message['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


def make_model(folder: Path, *, tied: bool = True, max_shard_size: str = "5GB", **changes: object) -> Path:
    """Write a model with random weights and its tokenizer to ``folder``."""
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(llama(tied, **changes)).save_pretrained(folder, max_shard_size=max_shard_size)
    fast.save_pretrained(folder)
    return folder


def make_data(path: Path, num_rows: int = 24) -> Path:
    """Questions and answers in the tokenizer's words, JSONL."""
    rows: Sequence[dict[str, str]] = [
        {
            "question": f"what is {WORDS[3 + i % 5]} plus {WORDS[3 + i % 3]}",
            "answer": f"the answer is {WORDS[4 + (i % 5) + (i % 3)]}",
        }
        for i in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
