"""Bytes of memory that is alive: on a GPU as the allocator counts them, on a CPU by watching every operation."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class MemoryMeter(Protocol):
    """Knows how many bytes are alive now and how many were at most."""

    def live_bytes(self) -> int:
        """Bytes alive now."""
        ...

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        ...

    def peak_bytes(self) -> int:
        """Most bytes alive at once since the last reset."""
        ...


class AllocatedBytes:
    """Bytes that torch's GPU allocator has given out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> AllocatedBytes:
        """The allocator always counts."""
        return self

    def __exit__(self, *error: object) -> None:
        """The allocator always counts."""

    def live_bytes(self) -> int:
        """Bytes alive now."""
        return torch.cuda.memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Most bytes alive at once since the last reset."""
        return torch.cuda.max_memory_allocated(self._device)


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made since this mode was entered, each counted once while it lives.

    Storages that were there before do not count, nor what a kernel allocates and frees within itself. Autograd's
    backward on a CPU runs on the calling thread, so its operations are seen too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live_bytes = self._peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation; what it returns and none of its arguments held is new."""
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self._know(storage, 0)
        result = func(*args, **kwargs)
        for storage in _storages(result):
            self._know(storage, storage.nbytes())
        return result

    def live_bytes(self) -> int:
        """Bytes alive now."""
        return self._live_bytes

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self._peak_bytes = self._live_bytes

    def peak_bytes(self) -> int:
        """Most bytes alive at once since the last reset."""
        return self._peak_bytes

    def _know(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Count ``num_bytes`` for a storage not seen yet, until it is freed."""
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self._live_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._forget, key, num_bytes).atexit = False

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._live_bytes -= num_bytes


def memory_meter(device: torch.device) -> AbstractContextManager[MemoryMeter]:
    """What counts the memory of ``device``."""
    return AllocatedBytes(device) if device.type == "cuda" else LiveBytes()


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Storages of all tensors in a nest of containers."""
    return (value.untyped_storage() for value in tree_iter(values) if isinstance(value, torch.Tensor))
