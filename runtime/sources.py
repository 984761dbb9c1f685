"""Where a model comes from: a Hugging Face folder, a hub name, a GGUF file, or a configuration alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lazysched.errors import UNREADABLE_JSON, UsageError, short_repr
from lazysched.runtime.held_warnings import warnings_held
from lazysched.runtime.tensor_reader import open_safetensors

_INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt", "tf_model*.h5", "flax_model*.msgpack")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")
_DOWNLOADED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_NOT_DOWNLOADED = ("*/*", "consolidated*")
"""Sub-folders and ``consolidated*`` hold the same weights once more in other formats."""
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "n_embd", "n_layer", "n_head",
)  # fmt: skip
MAX_SIZE = 10**8
"""Far beyond any model's rows, columns or blocks."""
_MEND = "mend it or download it again"


@dataclass(frozen=True)
class ModelSource:
    """A model on this disk, its files checked."""

    config_dir: Path
    """Folder of config.json and, where there is one, of the tokenizer."""
    config: PretrainedConfig
    weight_files: dict[str, Path]
    """Checkpoint tensor name -> safetensors file; empty: random weights."""

    @property
    def has_weights(self) -> bool:
        """Whether there is a checkpoint."""
        return bool(self.weight_files)

    @property
    def has_tokenizer(self) -> bool:
        """Whether ``config_dir`` holds a tokenizer."""
        return any(any(self.config_dir.glob(pattern)) for pattern in _TOKENIZERS)


def resolve_model(model: str, cache_dir: Path | None = None) -> ModelSource:
    """Find, and where needed fetch or convert, the model that ``model`` names.

    Args:
        model: a folder with config.json and perhaps safetensors files, a config.json alone, a ``.gguf`` file
            (converted once), or a name on the Hugging Face hub (downloaded once).
        cache_dir: where converted GGUF files are kept; by default ``lazysched`` in the user's cache.

    Raises:
        UsageError: not found, damaged, or of a form that cannot be read.
        RunError: a GGUF file could not be converted for lack of disk space.
    """
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        # Imported here, since it loads the model classes of transformers.
        from lazysched.runtime.gguf import convert_gguf

        return _from_folder(convert_gguf(path, cache_dir or default_cache_dir()))
    if path.is_dir():
        return _from_folder(path)
    if path.suffix == ".json" and path.is_file():
        return ModelSource(path.parent, _load_config(path), {})
    if path.exists():
        raise UsageError(f"{model}: not a model; name a folder, a .gguf file, a config.json or a hub name")
    return _from_hub(model)


def default_cache_dir() -> Path:
    """``lazysched`` in the user's cache folder, as the XDG base directory specification has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lazysched"


def _from_folder(folder: Path) -> ModelSource:
    config_path = folder / "config.json"
    if not config_path.is_file():
        gguf = min(folder.glob("*.gguf"), default=None)
        remedy = f"name the file {gguf} itself" if gguf else "name the folder of a Hugging Face model"
        raise UsageError(f"{folder}: has no config.json; {remedy}")
    config = _load_config(config_path)
    weight_files = _weight_files(folder)
    pickle = min((path for pattern in _PICKLES for path in folder.glob(pattern)), default=None)
    if pickle and not weight_files:
        raise UsageError(
            f"{pickle}: only safetensors weights are read; load the folder with transformers and save it again "
            f"with save_pretrained, or name another revision"
        )
    return ModelSource(folder, config, weight_files)


def _from_hub(name: str) -> ModelSource:
    is_path = name.startswith(("/", ".", "~")) or name.endswith((".json", ".safetensors"))
    if is_path:
        raise UsageError(f"{name}: no such file or folder; check the path")
    try:
        folder = snapshot_download(name, allow_patterns=list(_DOWNLOADED), ignore_patterns=list(_NOT_DOWNLOADED))
    except (HFValidationError, OSError) as error:  # all of the hub's failures, and being offline, are OSErrors
        raise UsageError(
            f"{name}: no such folder here, and the hub cannot give a model of that name ({_one_line(error)}); "
            f"check the name and the connection"
        ) from None
    source = _from_folder(Path(folder))
    if not source.has_weights:
        # A config.json alone asks for random weights; from the hub that would be a surprise.
        raise UsageError(f"{name}: the hub has no safetensors weights under that name; name another model")
    return source


def _load_config(path: Path) -> PretrainedConfig:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except UNREADABLE_JSON as error:
        raise UsageError(f"{path}: not valid JSON ({_one_line(error)}); download it again") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        # transformers would guess the type from the name of the folder.
        raise UsageError(f"{path}: model_type: missing; name the config.json of a Hugging Face model")
    if "auto_map" in raw and raw["model_type"] not in CONFIG_MAPPING:
        raise UsageError(
            f"{path}: auto_map: names code beside the weights, which lazysched never runs, and transformers itself has "
            f"no model_type {raw['model_type']!r}; use a model that transformers knows"
        )
    _check_sizes(path, raw)
    try:
        with warnings_held():
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # nonsense in a setting fails anywhere in transformers, in any way
        raise UsageError(f"{path}: transformers cannot read this configuration ({_one_line(error)}); {_MEND}") from None
    assert isinstance(config, PretrainedConfig)
    return config


def _check_sizes(path: Path, raw: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, with which transformers builds modules that fail later."""
    inner = raw.get("text_config")
    for settings in (raw, inner if isinstance(inner, dict) else {}):
        for name in _SIZES:
            value = settings.get(name)
            # Some models list a size for each block, and null stands for a default.
            if not isinstance(value, list | None) and (type(value) is not int or not 1 <= value <= MAX_SIZE):
                raise UsageError(f"{path}: {name}: {short_repr(value)}, give a number from 1 to {MAX_SIZE}; {_MEND}")
        heads, groups = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
        if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
            raise UsageError(
                f"{path}: num_key_value_heads: {groups} do not divide the {heads} attention heads; {_MEND}"
            )


def _weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, every header read; the choice of files follows transformers."""
    single, index = folder / "model.safetensors", folder / _INDEX
    if single.is_file():
        return _tensors_of([single])
    if index.is_file():
        return _indexed_files(index)
    return _tensors_of(sorted(folder.glob("*.safetensors")))


def _indexed_files(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        wanted = {str(name): index.parent / file for name, file in weight_map.items()}
    except (*UNREADABLE_JSON, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index}: not a safetensors index ({_one_line(error)}); download it again") from None
    for path in sorted(set(wanted.values())):
        if path.parent != index.parent or path.name == "..":
            raise UsageError(f"{index}: names {path}, which lies outside its folder; download the model again")
        if not path.is_file():
            raise UsageError(f"{path}: missing, though {index.name} names it; download the model again")
    found = _tensors_of(sorted(set(wanted.values())))
    for name, path in wanted.items():
        if found.get(name) != path:
            raise UsageError(f"{path}: {name}: missing, though {index.name} names it; download the model again")
    return wanted


def _tensors_of(paths: list[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in paths:
        for name in open_safetensors(path).keys():  # noqa: SIM118 - not a dict
            if name in found:
                raise UsageError(f"{path}: {name}: also in {found[name].name}; keep one of the two files")
            found[name] = path
    return found


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
