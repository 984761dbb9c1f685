"""What ``--data`` names: a file, datasets of a ``dataset_info.json``, or a dataset on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lazysched.errors import UsageError
from lazysched.runtime.data.files import SUFFIXES, PlacedRow, read_rows
from lazysched.runtime.data.formats import RowFormat, format_named
from lazysched.runtime.data.registry import REGISTRY, Entry, read_entries

_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")


@dataclass(frozen=True)
class Source:
    """Rows of one format.

    Attributes:
        name: for people.
        rows: reads them, from the beginning at every call.
        row_format: None: the first row's columns tell.
        content: what changes when the rows do.
    """

    name: str
    rows: Callable[[], Iterator[PlacedRow]]
    row_format: RowFormat | None
    content: Callable[[], str]


def resolve_data(data: str | Path, data_format: str | None = None) -> list[Source]:
    """Sources of ``data``, to be read one after another.

    Args:
        data: a file; ``FOLDER:NAME`` or ``FOLDER:NAME,NAME`` for datasets of the folder's ``dataset_info.json``; or a
            hub name, ``owner/name`` or ``owner/name:subset``, whose split ``train`` is taken.
        data_format: of a file or hub dataset; None lets its columns tell.

    Raises:
        UsageError: nothing of that name, or ``data_format`` is unknown or given where a registry has it.
    """
    text = str(data)
    row_format = None if data_format is None else format_named(data_format)
    folder, colon, names = text.rpartition(":")
    if Path(text).expanduser().is_file():
        return [_file(Path(text).expanduser(), row_format)]
    if colon and Path(folder).expanduser().is_dir():
        if data_format is not None:
            raise UsageError(f"data_format: {data_format}: {REGISTRY} has the format already; leave one of them out")
        registry = _registry(Path(folder).expanduser())
        return [s for entry in read_entries(registry, names.split(",")) for s in _of_entry(entry)]
    if Path(text).expanduser().is_dir():
        raise UsageError(f"{data}: cannot be read (Is a directory); {_remedy_for_folder(Path(text).expanduser())}")
    matched = _HUB_NAME.fullmatch(text)
    if matched is None or text.endswith(SUFFIXES) or text.startswith("."):
        raise UsageError(f"{data}: no such file; check the path of the data")
    return [_hub(matched[1], matched[2], "train", None, row_format)]


def _registry(folder: Path) -> Path:
    if not (folder / REGISTRY).is_file():
        raise UsageError(f"{folder}: has no {REGISTRY}; name a file, or put {REGISTRY} into the folder")
    return folder / REGISTRY


def _remedy_for_folder(folder: Path) -> str:
    if (folder / REGISTRY).is_file():
        return f"name a dataset of its {REGISTRY}: {folder}:NAME"
    return f"name one of its files, or put a {REGISTRY} into it"


def _file(path: Path, row_format: RowFormat | None) -> Source:
    return Source(str(path), lambda: read_rows(path), row_format, lambda: _digest(path))


def _digest(path: Path) -> str:
    """Of the content: a copied file is the same data, and one written within the clock's grain is not."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give a file of data") from None


def _of_entry(entry: Entry) -> list[Source]:
    fields = entry.fields
    if hub := fields.get("hf_hub_url"):
        if not isinstance(hub, str) or not _HUB_NAME.fullmatch(hub):
            raise UsageError(f"{entry.where}: hf_hub_url: {hub!r} is no name on the hub; write owner/name")
        return [_hub(hub, fields.get("subset"), fields.get("split", "train"), fields.get("folder"), entry.row_format)]
    name = fields.get("file_name")
    if not isinstance(name, str):
        raise UsageError(f"{entry.where}: file_name: missing; name a file, or a dataset with hf_hub_url")
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise UsageError(
            f"{entry.where}: file_name: {name!r} leads out of {entry.folder}; put the file, or a link, there"
        )
    path = entry.folder / name
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise UsageError(f"{entry.where}: file_name: {path}: no such file; check the name")
    described = json.dumps(fields, sort_keys=True)
    return [_described(_file(file, entry.row_format), described) for file in files]


def _described(source: Source, text: str) -> Source:
    """``source`` with ``text`` as part of what its tokens depend on."""
    return replace(source, content=lambda: f"{source.content()} {text}")


def _hub(name: str, subset: str | None, split: str, folder: str | None, row_format: RowFormat | None) -> Source:
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(f"{name}: no such file here; for datasets of the hub, pip install 'lazysched[hub]'")
    loaded: list[Any] = []

    def dataset() -> Any:
        if not loaded:
            loaded.append(_load_hub(name, subset, split, folder))
        return loaded[0]

    def rows() -> Iterator[PlacedRow]:
        for number, values in enumerate(dataset(), 1):
            yield PlacedRow(f"{name}: row {number}", dict(values))

    return Source(name, rows, row_format, lambda: f"{name} {dataset()._fingerprint}")


def _load_hub(name: str, subset: str | None, split: str, folder: str | None) -> Any:
    try:
        return importlib.import_module("datasets").load_dataset(name, subset, split=split, data_dir=folder)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{name}: the hub gives no such dataset ({reason}); check name, subset and split") from None
