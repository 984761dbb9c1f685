"""The buffers of a program as tensors: host buffers in one exactly sized arena, GPU buffers each of its own.

Saved tensors come from the allocator while a step runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch

from lazysched.runtime.arena import HostArena
from lazysched.schemas import Buffer, Dtype, Program

_MADE_IN_STEP = {"outgoing"}
_FP32 = {"accumulator", "norms", "loss", "scale", "totals"}
_BYTES = {"saved", "fetched", "state", "arguments"}
_OF_ONE_STEP = {"batch", "scale", "totals"}
"""Small host tensors that each step makes anew, so that its numbers can be read while the next one runs."""


class Buffers:
    """Tensors by buffer id, all zero at first; optimizer state comes as bytes, aligned to 256.

    Args:
        program: of training, which holds every buffer that evaluation needs.
        compute_dtype: of weights and gradients.
        device: where tier ``gpu`` is; a CPU runs the same program in its own memory.
        host_limit_bytes: most bytes the arena may take.

    Raises:
        RunError: the host arena does not fit or cannot be page-locked.
    """

    def __init__(self, program: Program, compute_dtype: Dtype, device: torch.device, host_limit_bytes: int) -> None:
        self._dtype = getattr(torch, compute_dtype)
        self._device = device
        host = [b for b in program.buffers.values() if b.tier == "host" and b.kind not in _OF_ONE_STEP]
        pinned = [b.id for b in host if b.pinned]
        self.arena = HostArena({b.id: b.num_bytes for b in host}, pinned, device, limit_bytes=host_limit_bytes)
        self._tensors = {b.id: self.arena.tensor(b.id, self._dtype_of(b)) for b in host}
        with ExitStack() as undo:  # a GPU that is full must not leave host memory locked
            undo.callback(self.close)
            self._tensors |= {b.id: self._on_device(b) for b in self._static(program)}
            undo.pop_all()

    def __getitem__(self, buffer_id: str) -> torch.Tensor:
        return self._tensors[buffer_id]

    def _static(self, program: Program) -> Iterator[Buffer]:
        for buffer in program.buffers.values():
            if buffer.tier == "gpu" and buffer.kind not in _MADE_IN_STEP and buffer.alloc_at is None:
                yield buffer

    def _dtype_of(self, buffer: Buffer) -> torch.dtype:
        if buffer.kind in _BYTES:
            return torch.uint8
        return torch.float32 if buffer.kind in _FP32 else self._dtype

    def _on_device(self, buffer: Buffer) -> torch.Tensor:
        if buffer.kind == "batch":
            return torch.zeros(buffer.num_bytes // 8, dtype=torch.int64, device=self._device)
        dtype = self._dtype_of(buffer)
        return torch.zeros(buffer.num_bytes // dtype.itemsize, dtype=dtype, device=self._device)

    def close(self) -> None:
        """Give all memory back."""
        self._tensors.clear()
        self.arena.close()
