"""What one step trains on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """Rows of one step.

    Attributes:
        input_ids: [rows, tokens] int64, padded on the right.
        targets: [rows, tokens] int64: the next token, -100 where nothing is learned.
        num_trained_tokens: targets that are learned, which the loss is divided by.
        positions: [rows, tokens] int64 for a plan that packs: of each token in its sample, from 0. Samples fill their
            row, so padding at its end is one of its own.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    num_trained_tokens: int
    positions: torch.Tensor | None = None
