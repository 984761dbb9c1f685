"""Model folders that ``from_pretrained`` loads, written shard by shard from the host's buffers."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lazysched.errors import RunError, UsageError
from lazysched.runtime.folders import foreign_entry, new_folder, sync
from lazysched.runtime.tensor_reader import stored_as
from lazysched.units import format_bytes

MAX_SHARD_BYTES = 1_000_000_000
_COPIED_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""What goes with a model unchanged: its tokenizer, its chat template and how it generates."""


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
        RunError: the writer failed, or a file on the disk is not what was written.
        OSError: the file system refuses.
    """
    shards = _shards(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, {name: fetch(name) for name in names})
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(size for _, size in sizes)}, "weight_map": weight_map}
        text = json.dumps(index, indent=1) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write one file, and look at what reached the disk."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # how the writer reports a full disk
        raise RunError(f"{path}: cannot be written ({error}); free disk space") from error
    sync(path)
    try:
        written = safe_open(path, framework="pt")  # refuses a file that is not as long as its header says
    except SafetensorError as error:
        raise RunError(f"{path}: is not what was written ({error}); check the disk") from error
    expected = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    found = {name: stored_as(written.get_slice(name)) for name in written.keys()}  # noqa: SIM118 - not a dict
    for name in dict.fromkeys([*expected, *found]):
        if found.get(name) != expected.get(name):
            raise RunError(f"{path}: {name}: is {found.get(name)}, written was {expected.get(name)}; check the disk")


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
