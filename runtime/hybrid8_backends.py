"""Which implementation of :mod:`lazysched.runtime.hybrid8` runs where; all give the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lazysched.runtime import hybrid8_torch
from lazysched.runtime.hybrid8 import BlockState, Fp32State

States = Sequence[BlockState | Fp32State]


class PreparedUpdate(Protocol):
    """The update of some tensors on one device, ready to run again and again on the same memory."""

    def update(self, coefficients: torch.Tensor) -> None:
        """Apply one step, in place.

        On a CPU it has finished when this returns; other Python threads run meanwhile. On a GPU it is queued on the
        current stream.

        Args:
            coefficients: fp32 [14], on the device of the tensors.
        """


class TorchUpdate:
    """The reference as a backend: any device, slow."""

    def __init__(self, states: States) -> None:
        self._states = states

    def update(self, coefficients: torch.Tensor) -> None:
        """Apply one step, in place."""
        for state in self._states:
            if isinstance(state, BlockState):
                hybrid8_torch.update_blocks(state, coefficients)
            else:
                hybrid8_torch.update_fp32(state, coefficients)


def prepare(states: States) -> PreparedUpdate:
    """The fastest backend for the device that holds ``states``."""
    return TorchUpdate(states)
