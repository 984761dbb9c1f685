"""Which of torch's attention kernels blocks run: chosen by measurement, carried by the plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import get_args

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lazysched.schemas import AttentionBackend

_KERNELS: dict[AttentionBackend, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
assert {"default", *_KERNELS} == set(get_args(AttentionBackend))


@contextmanager
def attention(backend: AttentionBackend, *, only: bool = False) -> Iterator[None]:
    """Within this context attention takes ``backend`` where it can, and torch's own order behind it.

    Args:
        backend: ``default`` changes nothing.
        only: with it, attention that ``backend`` cannot compute raises RuntimeError.
    """
    if backend == "default":
        yield
        return
    _choose_once()
    first = _KERNELS[backend]
    rest = [] if only else [kernel for kernel in _KERNELS.values() if kernel is not first]
    with sdpa_kernel([first, *rest], set_priority=True):
        yield


@cache
def _choose_once() -> None:
    """Let torch put its kernels in the order that the GPU prefers.

    It does so when it first chooses among them, whatever order was asked for by then (seen with torch 2.11 on an H200):
    the first block that was traced for flash attention got cuDNN's, and kept other tensors than its profile.
    """
    if torch.cuda.is_available():
        query = torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16, device="cuda")
        torch.ops.aten._fused_sdp_choice(query, query, query)  # runs none, so that no library is loaded
