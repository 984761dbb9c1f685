"""What attention costs where several query heads share a head of keys and values, for torch's partitioner.

The partitioner weighs what it recomputes by torch's operation counter, which up to torch 2.11 asserts as many heads of
keys as of queries (mended in https://github.com/pytorch/pytorch/pull/177169): a block with grouped queries could not be
split wherever a fused kernel takes its keys as they are. These formulas stand in for torch's while a graph is split;
they give the same numbers where torch's give any.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import flop_counter

_ATEN = torch.ops.aten
FORWARD = (
    _ATEN._scaled_dot_product_efficient_attention, _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_cudnn_attention,
)  # fmt: skip
BACKWARD = (
    _ATEN._scaled_dot_product_efficient_attention_backward, _ATEN._scaled_dot_product_flash_attention_backward,
    _ATEN._scaled_dot_product_cudnn_attention_backward,
)  # fmt: skip


@contextmanager
def grouped_queries_counted() -> Iterator[None]:
    """Within this context torch's operation counter takes attention with grouped queries."""
    ours = dict.fromkeys(FORWARD, _forward_flop) | dict.fromkeys(BACKWARD, _backward_flop)
    with patch.dict(flop_counter.flop_registry, ours):
        yield


def _forward_flop(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Scores, then their sum of values; each [batch, heads, tokens, width], a multiply and an add apiece."""
    pairs = _pairs(query, key)
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _backward_flop(
    output_grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Scores again; gradients of scores and values from the output's, of queries and keys from those of scores."""
    return 2 * _pairs(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _pairs(query: torch.Tensor, key: torch.Tensor) -> int:
    """Of a query with a key, over all heads of queries."""
    rows, num_heads, num_queries, _ = query.shape
    return int(rows * num_heads * num_queries * key.shape[-2])
