"""The compiled update of the 8-bit optimizer on CPUs: a C library, called through ctypes with the GIL released.

The library is built when the package is installed (``setup.py``) and lies beside this file. It holds the update for
several kinds of processor and a thread pool of its own, so that it shares nothing with torch or OpenMP.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from lazysched.errors import RunError
from lazysched.runtime.hybrid8 import NUM_COEFFICIENTS, BlockState, Fp32State

VARIANTS = ("portable", "avx2", "avx512", "neon")
"""In the order of the library's numbers; later ones are faster where they run."""
_INTERFACE = 1
CHUNK_BLOCKS = 1024
"""Blocks that a thread takes at a time: 256 Ki elements. With fewer, the streams of memory begin anew too often."""


class _Tensor(ctypes.Structure):
    """Mirror of ``struct Tensor`` in ``csrc/tensor.hpp``."""

    _fields_ = (
        ("weight", ctypes.c_void_p), ("grad", ctypes.c_void_p), ("correction", ctypes.c_void_p),
        ("first", ctypes.c_void_p), ("second", ctypes.c_void_p), ("first_scale", ctypes.c_void_p),
        ("second_scale", ctypes.c_void_p), ("numel", ctypes.c_int64), ("stream_low", ctypes.c_uint32),
        ("stream_high", ctypes.c_uint32), ("format", ctypes.c_int32), ("decays", ctypes.c_int32),
    )  # fmt: skip


def is_built() -> bool:
    """Whether the library was built when the package was installed."""
    return _library_path() is not None


@cache
def variants() -> tuple[str, ...]:
    """The variants that run on this processor, the fastest last; empty without the library."""
    if not is_built():
        return ()
    return tuple(name for number, name in enumerate(VARIANTS) if _library().lazysched_has_variant(number))


class CompiledUpdate:
    """The update of some tensors on the CPU, prepared once for memory that stays where it is.

    Args:
        states: the tensors; contiguous, of one dtype each, on the CPU.
        variant: one of :func:`variants`; None takes the fastest.
        threads: of the pool; None takes as many as the process may use cores.
        chunk_blocks: blocks that a thread takes at a time; changes no bit.

    Raises:
        RuntimeError: the library is not built, or the variant does not run here.
    """

    def __init__(
        self,
        states: Sequence[BlockState | Fp32State],
        *,
        variant: str | None = None,
        threads: int | None = None,
        chunk_blocks: int = CHUNK_BLOCKS,
    ) -> None:
        available = variants()
        if not available or variant not in (None, *available):
            raise RuntimeError(f"variant {variant!r} is not among those that run here: {available}")
        self._variant = VARIANTS.index(variant or available[-1])
        self._threads = threads or available_cores()
        self._chunk_blocks = chunk_blocks
        if self._threads < 1 or chunk_blocks < 1:
            raise ValueError(f"threads {self._threads}, chunk_blocks {chunk_blocks}: both must be at least 1")
        self._states = tuple(states)  # keeps the memory alive
        self._tensors = (_Tensor * len(states))(*(_describe(state) for state in states))

    def start(self, coefficients: torch.Tensor) -> RunningUpdate:
        """Begin one step; its chunks can be waited for one by one.

        Args:
            coefficients: fp32 [14] on the CPU; read before this returns.
        """
        values = coefficients.contiguous()
        if values.dtype != torch.float32 or values.numel() != NUM_COEFFICIENTS or values.device.type != "cpu":
            raise ValueError(
                f"coefficients: {values.dtype} {tuple(values.shape)} on {values.device}, not fp32 on the CPU"
            )
        handle = _library().lazysched_start(
            _pool(self._threads),
            self._tensors,
            len(self._tensors),
            values.data_ptr(),
            self._variant,
            self._chunk_blocks,
        )
        if not handle:
            raise MemoryError("the update could not be started")
        return RunningUpdate(handle, self)

    def update(self, coefficients: torch.Tensor) -> None:
        """Apply one step; it has finished when this returns."""
        self.start(coefficients).finish()


class RunningUpdate:
    """A step under way; finish it, or the arrays may vanish under it."""

    def __init__(self, handle: int, update: CompiledUpdate) -> None:
        self._handle: int | None = handle
        self._update = update
        self.num_chunks: int = _library().lazysched_num_chunks(handle)

    def wait(self, num_chunks: int) -> None:
        """Wait until the first ``num_chunks`` chunks are done; the rest goes on."""
        if self._handle is not None:
            _library().lazysched_wait(self._handle, num_chunks)

    def finish(self) -> None:
        """Wait until everything is done."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _library().lazysched_finish(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.finish()


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _describe(state: BlockState | Fp32State) -> _Tensor:
    narrow = state.weight.dtype == torch.bfloat16
    blocks = isinstance(state, BlockState)
    beside = state.correction if isinstance(state, BlockState) else state.master
    stream = state.stream if isinstance(state, BlockState) else 0
    arrays = [state.weight, state.grad, beside, state.first, state.second]
    arrays += [state.first_scale, state.second_scale] if isinstance(state, BlockState) else [None, None]
    if state.grad.dtype != state.weight.dtype or state.grad.numel() != state.weight.numel():
        raise ValueError(f"gradient: {state.grad.dtype} {tuple(state.grad.shape)}, not as its weight")
    for array in arrays:
        if array is not None and not (array.is_contiguous() and array.device.type == "cpu"):
            raise ValueError(f"{tuple(array.shape)} on {array.device}: not contiguous on the CPU")
    return _Tensor(
        *(None if array is None else array.data_ptr() for array in arrays), numel=state.weight.numel(),
        stream_low=stream & 0xFFFFFFFF, stream_high=stream >> 32, format=(not narrow) + 2 * (not blocks),
        decays=state.decays,
    )  # fmt: skip


_pools: dict[int, int] = {}


def _pool(threads: int) -> int:
    """The pool of so many threads; made on first use, kept to the end."""
    if threads not in _pools:
        pool = _library().lazysched_pool_new(threads)
        if not pool:
            raise RunError(f"a pool of {threads} threads could not be started; allow more threads or fewer cores")
        _pools[threads] = pool
    return _pools[threads]


# Threads do not survive a fork: a child makes pools of its own.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)


def _library_path() -> Path | None:
    return next(iter(sorted(Path(__file__).resolve().parent.glob("_kernels*.so"))), None)


@cache
def _library() -> ctypes.CDLL:
    path = _library_path()
    if path is None:
        raise RunError("the compiled update is missing; install lazysched again with a C++ compiler")
    try:
        library = ctypes.CDLL(str(path))
        found = library.lazysched_interface()
    except (OSError, AttributeError) as error:
        raise RunError(f"{path}: cannot be loaded ({error}); install lazysched again") from None
    if found != _INTERFACE:
        raise RunError(f"{path}: has interface {found}, this version needs {_INTERFACE}; install lazysched again")
    library.lazysched_pool_new.restype = ctypes.c_void_p
    library.lazysched_start.restype = ctypes.c_void_p
    library.lazysched_start.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    )  # fmt: skip
    library.lazysched_num_chunks.argtypes = (ctypes.c_void_p,)
    library.lazysched_num_chunks.restype = ctypes.c_int64
    library.lazysched_wait.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.lazysched_finish.argtypes = (ctypes.c_void_p,)
    return library
