"""What blocks are called with when rows hold several samples: positions that restart, masks that keep samples apart.

The model's own forward runs twice when it is loaded, on plain rows and on packed ones. How each argument follows from
the plain one is read off the two and checked to the bit; a step then only applies these rules, in operations of fixed
shapes. Running the model's forward in a step would wait for the GPU: transformers asks whether rows are packed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lazysched.errors import UsageError
from lazysched.runtime.flat import aligned

LONGEST_FIRST_SAMPLE = 8
"""Of the rows that the rules are read off: the rest of such a row is one sample, nearly as long as the row."""
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Fills its first argument for positions and sample numbers, both [rows, tokens] int64."""


def example_positions(rows: int, seq_len: int, device: torch.device) -> torch.Tensor:
    """Positions [rows, tokens] int64 of rows with two samples each, the first of 1 to 8 tokens.

    Raises:
        UsageError: a row has no room for two samples.
    """
    if seq_len < 2:
        raise UsageError(f"packing: a row of {seq_len} token holds one sample at most; use a larger --seq-len")
    positions = torch.arange(seq_len, device=device).expand(rows, -1)
    starts = 1 + torch.arange(rows, device=device)[:, None] % min(LONGEST_FIRST_SAMPLE, seq_len - 1)
    return torch.where(positions < starts, positions, positions - starts)


class PackedArguments:
    """The arguments of all blocks for one micro-batch, in one buffer that its positions fill.

    Args:
        plain: arguments of each block for rows of one sample.
        packed: the same for rows at ``positions``.
        positions: [rows, tokens] int64, 0 where a sample begins.

    Attributes:
        num_bytes: of the buffer.

    Raises:
        UsageError: what the model makes of packed rows cannot be told from what it makes of plain ones.
    """

    def __init__(
        self, plain: Sequence[dict[str, Any]], packed: Sequence[dict[str, Any]], positions: torch.Tensor
    ) -> None:
        self.num_bytes = 0
        self._rules: list[tuple[Rule, int, torch.Tensor]] = []
        self._blocks: list[tuple[list[Any], TreeSpec]] = []
        places: dict[tuple[int, int], int] = {}
        samples = _samples(positions)
        for before, after in zip(plain, packed, strict=True):
            (leaves, spec), (plain_leaves, plain_spec) = tree_flatten(after), tree_flatten(before)
            if spec != plain_spec:
                raise _not_supported("it passes other arguments to its blocks")
            filled = [
                _Place(self._place(old, new, positions, samples, places)) if _differ(old, new) else old
                for old, new in zip(plain_leaves, leaves, strict=True)
            ]
            self._blocks.append((filled, spec))
        if not self._rules:
            raise _not_supported("it makes nothing of position_ids")

    def views(self, buffer: torch.Tensor) -> list[dict[str, Any]]:
        """Arguments of each block, those that depend on positions as views of ``buffer`` [num_bytes] uint8."""
        tensors = self._tensors(buffer)
        return [
            tree_unflatten([tensors[leaf.index] if isinstance(leaf, _Place) else leaf for leaf in leaves], spec)
            for leaves, spec in self._blocks
        ]

    def fill(self, buffer: torch.Tensor, positions: torch.Tensor) -> None:
        """Make what ``views`` of ``buffer`` show for ``positions`` [rows, tokens] int64, 0 where a sample begins."""
        samples = _samples(positions)
        for (rule, _, _), target in zip(self._rules, self._tensors(buffer), strict=True):
            rule(target, positions, samples)

    def _tensors(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [
            buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape) for _, offset, like in self._rules
        ]

    def _place(
        self, plain: Any, packed: Any, positions: torch.Tensor, samples: torch.Tensor,
        places: dict[tuple[int, int], int],
    ) -> int:  # fmt: skip
        """Index of the tensor ``packed``, which many blocks share, among those that are filled."""
        key = (id(plain), id(packed))
        if key not in places:
            if not isinstance(packed, torch.Tensor):
                raise _not_supported("an argument of its blocks that is no tensor depends on position_ids")
            places[key] = len(self._rules)
            self._rules.append((_rule(plain, packed, positions, samples), self.num_bytes, _without_storage(packed)))
            self.num_bytes += aligned(packed.nbytes)
        return places[key]


class _Place:
    """Stands for a tensor in the buffer."""

    def __init__(self, index: int) -> None:
        self.index = index


def _samples(positions: torch.Tensor) -> torch.Tensor:
    """Number of the sample that each token belongs to."""
    return (positions == 0).cumsum(-1)


def _differ(plain: Any, packed: Any) -> bool:
    if isinstance(plain, torch.Tensor) and isinstance(packed, torch.Tensor):
        return plain.shape != packed.shape or not torch.equal(plain, packed)
    return isinstance(packed, torch.Tensor) or (plain is not packed and plain != packed)


def _without_storage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _rule(plain: Any, packed: torch.Tensor, positions: torch.Tensor, samples: torch.Tensor) -> Rule:
    """How ``packed`` follows from ``plain``, tried out on the example."""
    rows, seq_len = positions.shape
    rule: Rule
    if packed.shape == (rows, 1, seq_len, seq_len):
        rule = partial(_fill_mask, None if plain is None else plain[0, 0])
    elif isinstance(plain, torch.Tensor) and packed.shape == (rows, *plain.shape[1:]) and plain.shape[1] == seq_len:
        rule = partial(_fill_table, plain[0])
    else:
        raise _not_supported(f"an argument of shape {list(packed.shape)} is neither a mask nor a table of positions")
    found = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    rule(found, positions, samples)
    if not torch.equal(found, packed):
        raise _not_supported(f"an argument of shape {list(packed.shape)} is not what packed samples need")
    return rule


def _fill_table(table: torch.Tensor, target: torch.Tensor, positions: torch.Tensor, _: torch.Tensor) -> None:
    """``target`` [rows, tokens, ...] from ``table`` [tokens, ...] at ``positions``."""
    torch.index_select(table, 0, positions.flatten(), out=target.flatten(0, 1))


def _fill_mask(
    plain: torch.Tensor | None, target: torch.Tensor, positions: torch.Tensor, samples: torch.Tensor
) -> None:
    """``target`` [rows, 1, tokens, tokens]: as ``plain`` [tokens, tokens] says within a sample, masked across samples.

    None is causal attention; booleans say where to look, numbers are added to scores.
    """
    queries, keys = positions[:, None, :, None], positions[:, None, None, :]
    inside = samples[:, None, :, None] == samples[:, None, None, :]
    if plain is None:
        torch.le(keys, queries, out=target)
        target &= inside
    elif plain.dtype == torch.bool:
        torch.logical_and(plain[queries, keys], inside, out=target)
    else:
        target.copy_(plain[queries, keys]).masked_fill_(~inside, torch.finfo(plain.dtype).min)


def _not_supported(reason: str) -> UsageError:
    return UsageError(f"packing: this model cannot be packed ({reason}); profile without --packing")
