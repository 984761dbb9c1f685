"""GGUF files, turned once into a Hugging Face folder that the rest of lazysched reads."""

from __future__ import annotations

import hashlib
import importlib.util
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from lazysched.errors import RunError, UsageError
from lazysched.runtime.checkpoint import write_folder
from lazysched.runtime.machine import give_back_heap
from lazysched.runtime.quiet_transformers import quiet_transformers


def convert_gguf(path: Path, cache_dir: Path) -> Path:
    """Folder with the dequantised weights and the tokenizer of a GGUF file; made on the first call only.

    The whole model is in memory while it is converted, four bytes per parameter.

    Raises:
        UsageError: no such file, damaged, an architecture that transformers cannot read, or packages are missing.
        RunError: the cache folder cannot be written.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file; check the path")
    folder = cache_dir / f"{path.stem}-{_fingerprint(path)}"
    if folder.is_dir():
        return folder
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f'{path}: reading GGUF needs the package {package}; pip install "lazysched[gguf]"')
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{cache_dir}: cannot be made ({error.strerror}); set XDG_CACHE_HOME") from None
    with tempfile.TemporaryDirectory() as beside:
        _write(_load(path, Path(beside)), folder, Path(beside))
    give_back_heap()
    return folder


def _fingerprint(path: Path) -> str:
    """Another file, or the same one changed, gets a folder of its own."""
    status = path.stat()
    identity = f"{path.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def _load(path: Path, beside: Path) -> Any:
    """Load the model, every weight dense; tokenizer and generation settings go to the folder ``beside``."""
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # Newer versions may keep the weights packed in GGUF blocks unless told otherwise.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        named: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **named)
        with quiet_transformers():
            model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **named, **options)
    except (OSError, ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"{path}: GGUF file is damaged or of an architecture that transformers cannot read ({reason}); "
            f"download it again or name the original model"
        ) from None
    tokenizer.save_pretrained(beside)
    model.generation_config.save_pretrained(beside)
    return model


def _write(model: Any, folder: Path, beside: Path) -> None:
    # save_pretrained refuses a model that came from a quantised file, dense as it now is.
    model.config.__dict__.pop("quantization_config", None)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # a tied head is the embedding again
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    try:
        write_folder(folder, model.config, shapes, tensors.__getitem__, model.dtype, beside)
    except UsageError as error:
        raise RunError(f"{error} (set XDG_CACHE_HOME to keep converted files elsewhere)") from None
