"""Which implementation of :mod:`lazysched.runtime.hybrid8` runs where; all give the same bits."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Protocol

import torch

from lazysched.runtime import hybrid8_torch, kernels
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


def prepare(states: States, *, threads: int | None = None) -> PreparedUpdate:
    """The fastest backend for the device that holds ``states``.

    Args:
        states: tensors on one device, contiguous.
        threads: that update on a CPU; None takes as many as the process may use cores.
    """
    if not states:
        return TorchUpdate(states)
    if states[0].weight.is_cuda:
        return _on_gpu(states)
    if kernels.is_built():
        return kernels.CompiledUpdate(states, threads=threads)
    _warn(
        "lazysched: the compiled optimizer is missing, because there was no C++ compiler when the package was "
        "installed; the same results come from torch, many times slower. Install a compiler, then lazysched again."
    )
    return TorchUpdate(states)


def _on_gpu(states: States) -> PreparedUpdate:
    if importlib.util.find_spec("triton") is not None:
        from lazysched.runtime.hybrid8_triton import TritonUpdate

        return TritonUpdate(states)
    _warn(
        "lazysched: Triton is missing, so the optimizer runs as torch operations on the GPU: the same results, many "
        "times slower. Install triton."
    )
    return TorchUpdate(states)


def _warn(message: str) -> None:
    """Warn where the user called; Python shows one warning a place."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)
