"""Tiny models, their save variants, and uneven batches."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig

from lazysched.runtime.batch import Batch
from lazysched.runtime.blocks import EagerForm
from lazysched.runtime.flat import aligned
from lazysched.runtime.model import Model
from lazysched.schemas import Plan, SaveVariant
from tests.lowering.plans import end_variants, variants_for

CPU = torch.device("cpu")
SEQ_LEN = 16


def llama(tied: bool, **changes: Any) -> PretrainedConfig:
    settings: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 3, "vocab_size": 97, "max_position_embeddings": 64, "tie_word_embeddings": tied,
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
    }  # fmt: skip
    return LlamaConfig(**(settings | changes))


def variants_of(model: Model, micro_batch: int, seq_len: int) -> dict[str, SaveVariant]:
    """Save variants with the bytes that the templates really keep."""
    variants: dict[str, SaveVariant] = end_variants("embed") | end_variants("head")
    hidden_size = model.stages[0].params[next(iter(model.stages[0].params))][1]
    for stage in model.stages:
        if not stage.is_block or f"{stage.structure}:input" in variants:
            continue
        weights = torch.randn(stage.weight_bytes // model.dtype.itemsize, dtype=model.dtype, device=model.device)
        hidden = torch.randn(micro_batch, seq_len, hidden_size, dtype=model.dtype, device=model.device)
        template = model.templates[stage.structure]
        template.bind(weights, stage)
        saved = EagerForm(template, keep=True).forward(hidden, model.arguments(stage), torch.empty_like(hidden))
        input_bytes = aligned(hidden.numel() * hidden.element_size())
        of_block = variants_for(stage.structure, input_bytes, saved.kept.intermediate_bytes)
        if not model.has_backward(stage):
            del of_block[f"{stage.structure}:all"]
        variants |= of_block
    return variants


def packed_batch(rows: int, seq_len: int, vocabulary: int, seed: int) -> Batch:
    """Rows of at least two samples of at least 2 tokens, some padded; all but first tokens are learned."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(rows, seq_len, dtype=torch.int64)
    targets, positions = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row in range(rows):
        start = 0
        while seq_len - start >= 2:
            length = int(torch.randint(2, max(3, min(seq_len - start, seq_len - 3) + 1), (1,), generator=generator))
            end = start + length
            ids[row, start:end] = torch.randint(3, vocabulary, (length,), generator=generator)
            targets[row, start : end - 1] = ids[row, start + 1 : end]
            positions[row, start:] = torch.arange(seq_len - start)
            start = end
        positions[row, start:] = torch.arange(seq_len - start)
    return Batch(ids, targets, int((targets != -100).sum()), positions)


def packing(plan: Plan, model: Model) -> Plan:
    """The same plan for rows of several samples."""
    return plan.model_copy(update={"packing": True, "argument_bytes": model.argument_bytes})


def uneven_batch(rows: int, seq_len: int, vocabulary: int, seed: int, masked_rows: int = 0) -> Batch:
    """Rows of different lengths, padded; the first ``masked_rows`` learn nothing."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(rows, seq_len, dtype=torch.int64)
    targets = torch.full_like(ids, -100)
    for row in range(rows):
        length = int(torch.randint(3, seq_len + 1, (1,), generator=generator))
        ids[row, :length] = torch.randint(3, vocabulary, (length,), generator=generator)
        if row >= masked_rows:
            targets[row, 1 : length - 1] = ids[row, 2:length]
    return Batch(ids, targets, int((targets != -100).sum()))
