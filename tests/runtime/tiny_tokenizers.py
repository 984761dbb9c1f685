"""Tokenizers of a few words, with the traps that published ones have."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<|start|>", "<|end|>")
CHAT = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
WITH_OWN_SYSTEM_TURN = "{% if messages[0]['role'] != 'system' %}<|start|>system\nbe kind<|end|>\n{% endif %}" + CHAT
WITH_BOS = "<s>" + CHAT
CLOSING_CONVERSATIONS = CHAT.replace("{% endif %}", "{% else %}</s>{% endif %}")
"""Like Phi-3's: one more token at the end of the conversation, whichever turn that is."""
WITHOUT_MARKS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
DROPPING_OLD_THOUGHTS = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}hm {% endif %}{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
COUNTING_MESSAGES = "{{ messages | length }} " + CHAT
WITH_TOOLS = (
    "{% if tools %}<|start|>system\ntools {{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
REFUSING_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no\nsystem') }}{% endif %}" + CHAT


def make_tokenizer(
    chat_template: str | None = None,
    *,
    eos: str | None = "</s>",
    pad: str | None = "<pad>",
    adds_bos: bool = False,
    adds_eos: bool = False,
    merges: tuple[tuple[str, str], ...] = (),
) -> PreTrainedTokenizerFast:
    """Characters as tokens, so that decoding gives back the text, and ``merges`` of two of them."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *characters, *(a + b for a, b in merges)))}
    backend = Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]+"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    template = ["<s>"] * adds_bos + ["$A"] + ["</s>"] * adds_eos
    if len(template) > 1:
        ids = [(token, vocabulary[token]) for token in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single=" ".join(template), special_tokens=ids)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos, pad_token=pad)
    tokenizer.chat_template = chat_template
    return tokenizer
