"""Tensors of safetensors files into flat host buffers, slice by slice: loading needs no second copy of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from lazysched.errors import UsageError

SLICE_BYTES = 64_000_000
"""Bytes copied at a time, and bytes of files kept mapped: the resident set grows by no more while loading."""
_LOOKED_AT_ONCE = 2**18
"""Elements; larger temporaries leave the cache and cost pages."""
_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Stored types that are plain numbers; every other one needs scales that only a quantiser's own code knows."""
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8,
    "U8": torch.uint8,
}  # fmt: skip
"""Stored types that lazysched writes: weights and optimizer state in checkpoints, weights of converted models."""


class TensorReader:
    """Reads tensors of a checkpoint straight into buffers; a context manager that closes the files."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """Read from ``files``: tensor name -> the safetensors file that holds it."""
        self._files = files
        self._open: dict[Path, Any] = {}
        self._touched_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files; the next read opens them again."""
        self._open.clear()
        self._touched_bytes = 0

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor.

        Raises:
            UsageError: the checkpoint lacks it.
        """
        return tuple(self._slices(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Type of a stored tensor; fp32 stands for types that only :meth:`read_into` knows what to do with.

        Raises:
            UsageError: the checkpoint lacks it.
        """
        return torch.bfloat16 if self._slices(name).get_dtype() == "BF16" else torch.float32

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        """Copy tensor ``name`` into ``destination``, converting between float types on the way.

        Args:
            name: the tensor's name in the checkpoint.
            destination: same shape, any float dtype; usually a view in a host buffer.

        Raises:
            UsageError: the tensor is missing, quantised, of another shape, or not finite in the destination's dtype.
        """
        slices = self._slices(name)
        shape, stored = tuple(slices.get_shape()), slices.get_dtype()
        if shape != tuple(destination.shape):
            raise UsageError(
                f"{self._files[name]}: {name}: shape {shape} does not fit {tuple(destination.shape)}, which config.json"
                f" asks for; use the config.json of these weights"
            )
        if stored not in _STORED_BYTES:
            raise UsageError(
                f"{self._files[name]}: {name}: stored as {stored}, and quantised weights cannot be trained; "
                f"use the model's float16, bfloat16 or float32 checkpoint"
            )
        del slices  # it would keep the file mapped
        for part in self._copy(name, destination, _STORED_BYTES[stored]):
            self._refuse_not_finite(name, part)

    def read_exactly(self, name: str, destination: torch.Tensor) -> None:
        """Copy tensor ``name`` into ``destination`` to the bit.

        Args:
            name: the tensor's name in the checkpoint.
            destination: same shape, of the stored dtype, on any device.

        Raises:
            UsageError: the tensor is missing, or of another shape or dtype.
        """
        slices = self._slices(name)
        shape, dtype = stored_as(slices)
        del slices
        if (shape, dtype) != (tuple(destination.shape), destination.dtype):
            raise UsageError(
                f"{self._files[name]}: {name}: {dtype} of shape {shape}, the run needs {destination.dtype} of "
                f"shape {tuple(destination.shape)}; use the plan that the checkpoint was made with"
            )
        for _ in self._copy(name, destination, destination.dtype.itemsize):
            pass

    def _copy(self, name: str, destination: torch.Tensor, stored_bytes: int) -> Iterator[torch.Tensor]:
        """Copy slice by slice, giving what was filled; ``stored_bytes`` are those of an element in the file."""
        shape = tuple(destination.shape)
        if not shape:
            destination.copy_(self._slices(name)[...])
            yield destination
            return
        row_bytes = max(1, math.prod(shape[1:]) * stored_bytes)
        num_rows = max(1, SLICE_BYTES // row_bytes)
        for start in range(0, shape[0], num_rows):
            stop = min(start + num_rows, shape[0])
            self._make_room((stop - start) * row_bytes)
            yield destination[start:stop].copy_(self._slices(name)[start:stop])

    def _refuse_not_finite(self, name: str, part: torch.Tensor) -> None:
        if _looks_finite(part):
            return
        wrong = part[~torch.isfinite(part)]
        if wrong.numel():
            raise UsageError(
                f"{self._files[name]}: {name}: holds {wrong[0].item()} as {part.dtype}, with which nothing can be "
                f"trained; download the model again, or name another"
            )

    def _slices(self, name: str) -> Any:
        path = self._files.get(name)
        if path is None:
            raise UsageError(f"{name}: missing in the checkpoint; use the weights that belong to this config.json")
        if path not in self._open:
            self._open[path] = open_safetensors(path)
        return self._open[path].get_slice(name)

    def _make_room(self, num_bytes: int) -> None:
        """Pages of a mapped file stay in the resident set until it is unmapped, so unmap once in a while."""
        if self._touched_bytes + num_bytes > SLICE_BYTES:
            self.close()
        self._touched_bytes += num_bytes


def _looks_finite(values: torch.Tensor) -> bool:
    """False where one is not finite, perhaps where only their sum is not; several times faster than a sure look."""
    if values.dtype == torch.bfloat16:  # as integers, without their signs: those from infinity on are not finite
        pieces = values.reshape(-1).view(torch.int16).split(_LOOKED_AT_ONCE)
        return all(int((piece & 0x7FFF).amax()) < 0x7F80 for piece in pieces if piece.numel())
    return math.isfinite(values.sum().item())


def read_tensor_into(files: Mapping[str, Path], name: str, destination: torch.Tensor) -> None:
    """Copy one tensor; see ``TensorReader.read_into``, which keeps files open for several."""
    with TensorReader(files) as reader:
        reader.read_into(name, destination)


def stored_as(slices: Any) -> tuple[tuple[int, ...], torch.dtype | None]:
    """Shape and dtype of a tensor of an open file; None for dtypes that lazysched does not write."""
    return tuple(slices.get_shape()), _DTYPES.get(slices.get_dtype())


def open_safetensors(path: Path) -> Any:
    """Map a safetensors file; its header is checked against its length.

    Raises:
        UsageError: no such file, not readable, truncated or damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UsageError(f"{path}: safetensors file is truncated or damaged ({error}); download it again") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); check the path and its rights") from None
