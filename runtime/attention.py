"""Which of torch's attention kernels blocks run: chosen by measurement, carried by the plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, get_args

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lazysched.schemas import AttentionBackend

_KERNELS: dict[AttentionBackend, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
assert {"default", *_KERNELS} == set(get_args(AttentionBackend))


ANY_ORDER: frozenset[AttentionBackend] = frozenset({"cudnn"})
"""Kernels whose backward adds in any order whatever it is told (bits seen to differ with torch 2.11 on an H200)."""
_WORKSPACES, _ORDERED_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


@contextmanager
def attention(backend: AttentionBackend, *, full_determinism: bool = False, only: bool = False) -> Iterator[None]:
    """Within this context attention takes ``backend`` where it can, and torch's own order behind it.

    Args:
        backend: ``default`` changes nothing, but for what ``full_determinism`` does.
        full_determinism: leaves out ``ANY_ORDER``.
        only: with it, attention that ``backend`` cannot compute raises RuntimeError.
    """
    if backend == "default" and not full_determinism:
        yield
        return
    _choose_once()
    allowed = {name: kernel for name, kernel in _KERNELS.items() if not (full_determinism and name in ANY_ORDER)}
    first = [kernel for name, kernel in allowed.items() if name == backend]
    rest = [kernel for name, kernel in allowed.items() if name != backend and not only]
    with sdpa_kernel([*first, *rest], set_priority=True):
        yield


@contextmanager
def in_one_order(wanted: bool) -> Iterator[None]:
    """Within this context a backward adds in one order, so that it has the same bits whenever it runs.

    Torch's flag for it holds for the whole process and refuses much that training needs nowhere, so it is set for
    the backwards of blocks alone. There attention is all that it changes.
    """
    if not wanted:
        yield
        return
    if os.environ.get(_WORKSPACES) not in _ORDERED_WORKSPACES:  # or products are refused
        os.environ[_WORKSPACES] = _ORDERED_WORKSPACES[0]
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # takes time, and nobody reads it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        settings.fill_uninitialized_memory = fills


@cache
def _choose_once() -> None:
    """Let torch put its kernels in the order that the GPU prefers.

    It does so when it first chooses among them, whatever order was asked for by then (seen with torch 2.11 on an H200):
    the first block that was traced for flash attention got cuDNN's, and kept other tensors than its profile.
    """
    if torch.cuda.is_available():
        query = torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16, device="cuda")
        torch.ops.aten._fused_sdp_choice(query, query, query)  # runs none, so that no library is loaded
