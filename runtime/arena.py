"""The host's one flat buffer: an anonymous mapping of exactly the bytes asked for, carved into pieces."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch

from lazysched.errors import PinError, RunError
from lazysched.units import format_bytes


class HostArena:
    """Named pieces of one mapping, each starting on a page, some of them page-locked for a GPU.

    torch's own pinned allocator rounds up to powers of two; here a piece costs its bytes rounded up to pages.
    The mapping is given back when the arena and every tensor from it are gone.

    Attributes:
        total_bytes: size of the mapping.
    """

    def __init__(
        self, sizes: Mapping[str, int], pinned: Collection[str], device: torch.device, limit_bytes: int
    ) -> None:
        """Map the memory; its pages read as zeros and are taken from the system when first touched.

        Args:
            sizes: piece name -> bytes.
            pinned: the pieces to page-lock when ``device`` is a CUDA device; one copy must stay within a piece.
            device: the device that copies from and to the pinned pieces.
            limit_bytes: host memory that may be used.

        Raises:
            RunError: the pieces need more than ``limit_bytes``, or the system refuses to map them.
            PinError: it refuses to lock them.
        """
        unknown = set(pinned) - set(sizes)
        assert not unknown, f"pinned pieces without a size: {sorted(unknown)}"
        self._sizes = dict(sizes)
        self._offsets: dict[str, int] = {}
        self.total_bytes = 0
        for name, num_bytes in sizes.items():
            self._offsets[name] = self.total_bytes
            self.total_bytes += whole_pages(num_bytes)
        if self.total_bytes > limit_bytes:
            raise RunError(
                f"host memory: {format_bytes(self.total_bytes)} are needed and {format_bytes(limit_bytes)} are "
                f"available; solve again with a smaller --host-memory or free memory"
            )
        self._memory = _map(self.total_bytes)
        self._locked: list[int] = []
        if device.type == "cuda":
            self._lock([name for name in sizes if name in pinned and sizes[name]])

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Piece ``name`` as a 1-D tensor of ``dtype`` that shares its memory."""
        num_elements, rest = divmod(self._sizes[name], dtype.itemsize)
        assert rest == 0, f"{name}: {self._sizes[name]} bytes are not a whole number of {dtype}"
        if num_elements == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=num_elements, offset=self._offsets[name])

    def close(self) -> None:
        """Unlock the pinned pieces; no copy may be under way. Calling it again does nothing."""
        while self._locked:
            _cudart().cudaHostUnregister(self._locked.pop())

    def _lock(self, names: list[str]) -> None:
        """Page-lock pieces one by one: CUDA refuses a copy that spans two registrations."""
        cudart = _cudart()
        locked_bytes = 0
        with ExitStack() as undo:
            undo.callback(self.close)
            for name in names:
                num_bytes = whole_pages(self._sizes[name])
                address = self.tensor(name, torch.uint8).data_ptr()
                status = cudart.cudaHostRegister(address, num_bytes, 0)
                if status != cudart.cudaError.success:
                    _forget_error()
                    raise PinError(
                        f"host memory: {format_bytes(num_bytes)} of {name} cannot be page-locked "
                        f"({cudart.cudaGetErrorString(status)}), {format_bytes(locked_bytes)} were; "
                        f"profile again with --pin-limit {_as_flag(locked_bytes)}, then solve again",
                        locked_bytes,
                    )
                self._locked.append(address)
                locked_bytes += num_bytes
            undo.pop_all()


def _as_flag(num_bytes: int) -> str:
    """A size that the command line reads, no larger than ``num_bytes``."""
    return f"{num_bytes // 10**6}MB"


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    """Launch a kernel, from which torch raises the error of the refused call that CUDA keeps; a later one is spared."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")


def whole_pages(num_bytes: int) -> int:
    """``num_bytes`` rounded up to pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _map(num_bytes: int) -> mmap.mmap:
    """Map private anonymous memory: shared memory would count as files and get no huge pages."""
    try:
        memory = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RunError(
            f"host memory: {format_bytes(num_bytes)} cannot be mapped ({error.strerror}); "
            f"solve again with a smaller --host-memory"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages: the same memory, only slower to walk
            return memory
    return memory
