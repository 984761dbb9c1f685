"""Tensors between safetensors files and flat host buffers, without a second copy of the model.

Reading goes slice by slice from the mapped file into the buffer; writing goes shard by shard into a folder that
``from_pretrained`` loads.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lazysched.errors import RunError, UsageError
from lazysched.runtime.folders import foreign_entry, new_folder
from lazysched.units import format_bytes

SLICE_BYTES = 64_000_000
"""Bytes copied at a time, and bytes of files kept mapped: the resident set grows by no more while loading."""
_LOOKED_AT_ONCE = 2**18
"""Elements; larger temporaries leave the cache and cost pages."""
MAX_SHARD_BYTES = 1_000_000_000
_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Stored types that are plain numbers; every other one needs scales that only a quantiser's own code knows."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8, "U8": torch.uint8}
"""Stored types of weights and optimizer state in checkpoints."""
_COPIED_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""What goes with a model unchanged: its tokenizer, its chat template and how it generates."""


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
        found = _DTYPES.get(slices.get_dtype()), tuple(slices.get_shape())
        del slices
        if found != (destination.dtype, tuple(destination.shape)):
            raise UsageError(
                f"{self._files[name]}: {name}: {found[0]} of shape {found[1]}, the run needs {destination.dtype} of "
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


def check_output_dir(output_dir: Path, num_bytes: int = 0) -> None:
    """Refuse, before any work is done, a folder that ``write_folder`` could not write.

    Args:
        output_dir: the folder to be written.
        num_bytes: bytes that will be written; the old contents are kept until the new ones are complete.

    Raises:
        UsageError: the parent does not exist or is not writable, the folder holds files of others, is a file or a
            mount point, or the disk is too full.
    """
    target = output_dir.resolve()
    if not target.parent.is_dir():
        raise UsageError(f"{output_dir}: the folder {target.parent} does not exist; make it or name another")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{output_dir}: the folder {target.parent} is not writable; name one that is")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{output_dir}: is a file; name a folder that is new or empty")
    if target.is_mount():
        raise UsageError(f"{output_dir}: is a mount point, which cannot be replaced whole; name a folder inside it")
    stranger = foreign_entry(target) if target.is_dir() else None
    if stranger is not None:
        raise UsageError(
            f"{output_dir}: holds {stranger!r}, which lazysched did not write; name a folder that is new or empty"
        )
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < num_bytes:
        raise UsageError(
            f"{output_dir}: {format_bytes(num_bytes)} will be written and {format_bytes(free_bytes)} are free; "
            f"free disk space or name a folder on another disk"
        )


def write_folder(
    output_dir: Path,
    config: PretrainedConfig,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    fetch: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    source_dir: Path | None = None,
    extra_files: Mapping[str, str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder: all of it, or nothing.

    Args:
        output_dir: missing, empty, or written by this function before; its parent exists.
        config: written with ``dtype``; the caller's object is left alone.
        tensors: (name, shape) in the order of writing. Tied weights are named once.
        fetch: name -> contiguous CPU tensor of that shape and ``dtype``. It must hold its values until its shard is
            written; views into the store cost no memory.
        dtype: of all tensors.
        source_dir: where tokenizer, chat template and generation_config.json are copied from, if they are there.
        extra_files: file name -> text, to be put beside the model.
        max_shard_bytes: size of one weight file; a larger tensor gets a file of its own.

    Raises:
        UsageError: ``output_dir`` cannot be used; see ``check_output_dir``.
        RunError: writing failed, for example because the disk is full.
    """
    check_output_dir(output_dir, sum(math.prod(shape) for _, shape in tensors) * dtype.itemsize)
    with new_folder(output_dir) as folder:
        for name, text in (extra_files or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        write_model(folder, config, tensors, fetch, dtype, source_dir, max_shard_bytes)


def write_model(
    folder: Path,
    config: PretrainedConfig,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    fetch: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    source_dir: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Put a model into a folder that exists; arguments as for ``write_folder``.

    Raises:
        RunError: the writer of safetensors files failed.
        OSError: another file could not be written.
    """
    _write_config(folder, config, dtype)
    for pattern in _COPIED_FILES if source_dir is not None else ():
        for path in Path(source_dir or "").glob(pattern):
            shutil.copyfile(path, folder / path.name)
    sizes = [(name, math.prod(shape) * dtype.itemsize) for name, shape in tensors]
    write_shards(folder, "model", sizes, fetch, max_shard_bytes)


def write_shards(
    folder: Path,
    stem: str,
    sizes: Sequence[tuple[str, int]],
    fetch: Callable[[str], torch.Tensor],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write tensors as safetensors files, and their index where there are several.

    Args:
        folder: exists.
        stem: files are ``{stem}.safetensors``, or ``{stem}-00001-of-0000N.safetensors``.
        sizes: (name, bytes) of the tensors in the order of writing.
        fetch: name -> contiguous CPU tensor of so many bytes; those of one file are held at a time.
        max_shard_bytes: of one file; a larger tensor gets a file of its own.

    Raises:
        RunError: the writer failed.
    """
    shards = _shards(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors"
        try:
            save_file({name: fetch(name) for name in names}, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # how the writer reports a full disk
            raise RunError(f"{folder / file}: cannot be written ({error}); free disk space") from error
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(size for _, size in sizes)}, "weight_map": weight_map}
        text = json.dumps(index, indent=1) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")


def _shards(sizes: Sequence[tuple[str, int]], max_bytes: int) -> list[list[str]]:
    """Names per file, filled in order."""
    shards: list[list[str]] = [[]]
    used_bytes = 0
    for name, num_bytes in sizes:
        if shards[-1] and used_bytes + num_bytes > max_bytes:
            shards.append([])
            used_bytes = 0
        shards[-1].append(name)
        used_bytes += num_bytes
    return shards


def _write_config(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> None:
    written = copy.deepcopy(config)
    written.dtype = dtype
    if not written.architectures and written.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        # Inference servers choose the model's class by this entry, which a config made by hand often lacks.
        written.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[written.model_type]]
    written.save_pretrained(folder)
