"""What the save variants of a gated decoder block keep, compute again and need to work, in sizes of the block.

Read off profiles of one H200 (torch 2.11, transformers 5.17; Qwen2 shapes of 7B and 14B compiled, of 3B uncompiled),
whose bytes these counts give exactly: tensors are as wide as the feed-forward part, the hidden state, all query heads
or all key heads. What other architectures keep beyond that was read off their graphs. At which budget a graph keeps
what differs between shapes; the budgets are those of the 7B shape.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from lazysched.profiles.shapes import BlockShape

NAMED_SHARE = 0.02
"""As in ``variants``: tensors below this share of what is kept are not named."""
STATISTIC_BYTES = 4
"""Of a norm's or a softmax's statistic, which are fp32."""


@dataclass(frozen=True)
class Counts:
    """How many tensors of each width, per token; ``statistics`` are two norms' and one of each head."""

    ffn: int = 0
    hidden: int = 0
    attention: int = 0
    key_value: int = 0
    statistics: int = 0

    def widths(self, block: BlockShape) -> Counter[int]:
        """Width in values per token -> number of tensors, statistics left out."""
        found: Counter[int] = Counter()
        for name in ("ffn", "hidden", "attention", "key_value"):
            found[getattr(block, name)] += getattr(self, name)
        return +found

    def bytes_per_token(self, block: BlockShape, element_bytes: int) -> int:
        """Bytes of all, statistics included."""
        values = sum(width * count for width, count in self.widths(block).items())
        return values * element_bytes + self.statistics * (2 + block.num_heads) * STATISTIC_BYTES


@dataclass(frozen=True)
class Redone:
    """What a backward computes again: matrix products by name, attention, and a share of all else of the forward."""

    attention_inputs: bool = False
    attention: bool = False
    attention_output: bool = False
    ffn_inputs: int = 0
    rest: float = 0.0


@dataclass(frozen=True)
class VariantCosts:
    """One variant.

    Attributes:
        budget: at which the graph is split; None where the block runs uncompiled.
        kept: beside the input.
        redone: in the backward.
        forward, backward: working sets.
        keeps_all: whether what further norms and fused projections need is kept too.
    """

    budget: float | None
    kept: Counts
    redone: Redone
    forward: Counts
    backward: Counts
    keeps_all: bool = False

    def all_kept(self, block: BlockShape) -> Counts:
        """What is kept in ``block``, which may have more norms than the blocks that were measured."""
        if not self.keeps_all:
            return self.kept
        return replace(
            self.kept, hidden=self.kept.hidden + max(0, block.num_norms - 2) // 2,
            attention=self.kept.attention + block.keeps_queries_twice,
            key_value=self.kept.key_value + block.keeps_queries_twice,
        )  # fmt: skip


_EVERYTHING = Redone(attention_inputs=True, attention=True, attention_output=True, ffn_inputs=2, rest=1.0)
COMPILED = (
    VariantCosts(1.0, Counts(3, 3, 2, 2, 1), Redone(), Counts(hidden=1), Counts(ffn=2), keeps_all=True),
    VariantCosts(0.9, Counts(2, 1, 2, 2, 1), Redone(rest=0.5), Counts(1, 1), Counts(ffn=4)),
    VariantCosts(0.5, Counts(ffn=2), Redone(True, True, True, 0, 0.75), Counts(1, 2), Counts(ffn=4)),
    VariantCosts(0.4, Counts(ffn=1, attention=2, key_value=2), Redone(attention_output=True, ffn_inputs=1, rest=0.75),
                 Counts(1, 1), Counts(5, 1)),
    VariantCosts(0.2, Counts(attention=2, key_value=2), Redone(attention_output=True, ffn_inputs=2, rest=0.75),
                 Counts(2, 1), Counts(6, 1)),
    VariantCosts(0.0, Counts(), _EVERYTHING, Counts(2, 2), Counts(6, 3, 2, 2, 1)),
)  # fmt: skip
UNCOMPILED = (
    VariantCosts(None, Counts(5, 3, 2), Redone(), Counts(hidden=2), Counts(3, 1), keeps_all=True),
    VariantCosts(None, Counts(), _EVERYTHING, Counts(3, 1), Counts(8, 2)),
)


def variant_name(costs: VariantCosts, block: BlockShape, *, is_first: bool) -> str:
    """The name that a profile gives it: ``all``, ``input``, or widths per token as ``18944x2+3584``."""
    widths = costs.all_kept(block).widths(block)
    if is_first or not widths:
        return "all" if is_first else "input"
    total = sum(width * count for width, count in widths.items())
    named = {width: count for width, count in widths.items() if width >= NAMED_SHARE * total}
    return "+".join(f"{width}x{count}" if count > 1 else f"{width}" for width, count in sorted(named.items())[::-1])
