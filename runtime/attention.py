"""Which of torch's attention kernels blocks run: chosen by measurement, carried by the plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

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
    first = _KERNELS[backend]
    rest = [] if only else [kernel for kernel in _KERNELS.values() if kernel is not first]
    with sdpa_kernel([first, *rest], set_priority=True):
        yield
