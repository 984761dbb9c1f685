"""Blocks with grouped queries can be split whatever torch's own operation counter thinks of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from lazysched.runtime.attention_cost import BACKWARD, FORWARD, grouped_queries_counted
from lazysched.runtime.graphs import JointGraph

CPU = torch.device("cpu")
HEADS, WIDTH, TOKENS, ROWS = 4, 16, 32, 2
FLASH = torch.ops.aten._scaled_dot_product_flash_attention
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward


class GroupedAttention(nn.Module):
    """Queries of four heads, keys and values of ``num_groups``."""

    def __init__(self, num_groups: int) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.into = nn.Linear(HEADS * WIDTH, (HEADS + 2 * num_groups) * WIDTH, bias=False, device="meta")
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False, device="meta")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.into(hidden).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        query, key, value = parts.split([HEADS, self.num_groups, self.num_groups], dim=1)
        output = FLASH(query, key, value, 0.0, True)[0]
        return self.out(output.transpose(1, 2).flatten(-2))


def counted(num_groups: int) -> dict[str, int]:
    """Operations of the fused kernel and its gradient, by operator."""
    tensors = [torch.empty(ROWS, n, TOKENS, WIDTH, device="meta") for n in (HEADS, num_groups, num_groups)]
    with FlopCounterMode(display=False) as counter:
        output, sums, *rest = FLASH(*tensors, 0.0, True)
        cumulated, longest, random = rest[:2], rest[2:4], rest[4:6]
        FLASH_BACKWARD(output, *tensors, output, sums, *cumulated, *longest, 0.0, True, *random)
    return {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}


def refuse(*shapes: Any, **_: Any) -> int:
    raise AssertionError(f"sdpa_flop_count: query/key/value shapes are incompatible: {shapes}")


def test_equal_heads_cost_what_torch_says() -> None:
    torchs = counted(HEADS)
    assert len(torchs) == 2
    with grouped_queries_counted():
        assert counted(HEADS) == torchs


def test_shared_keys_cost_as_much_as_keys_of_their_own() -> None:
    with grouped_queries_counted():
        assert counted(1) == counted(HEADS)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_block_is_split_where_torch_cannot_count(monkeypatch: pytest.MonkeyPatch, num_groups: int) -> None:
    for operator in (*FORWARD, *BACKWARD):
        monkeypatch.setitem(flop_counter.flop_registry, operator, refuse)  # as torch 2.11 does
    module = GroupedAttention(num_groups)
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    joint = JointGraph(module, shapes, (ROWS, TOKENS, HEADS * WIDTH), {}, torch.bfloat16, CPU)
    kept = [sum(tensor.nbytes for tensor in joint.kept(budget)) for budget in (1.0, 0.5, 0.0)]
    assert kept[0] > kept[1] > kept[2] == 0
    assert flop_counter.flop_registry[FLASH] is refuse  # torch's own again
