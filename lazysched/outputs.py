"""Files that commands write."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

from lazysched.errors import UsageError
from lazysched.schemas.recording import RECORDING_FILE
from lazysched.schemas.run import RUN_FILE
from lazysched.step_rows import LOG_FILE

FILES_IN_FOLDERS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "chat_template*", "*.model", "*.tiktoken", "*.safetensors", "*.safetensors.index.json", "*.gguf",
    RUN_FILE, LOG_FILE, RECORDING_FILE, "plan.json",
)  # fmt: skip
"""What is read of a folder that a command is given: of a model, and of a run. Others may be written there."""


def require_folder_of(output: Path, flag: str = "--output") -> None:
    """Refuse an output that could not be written before the work is done, not after it."""
    if not output.parent.is_dir():
        raise UsageError(f"{flag}: {output}: the folder {output.parent} does not exist; make it first")
    if output.is_dir():
        raise UsageError(f"{flag}: {output} is a folder; name a file")


def require_page(output: Path, flag: str = "--output") -> None:
    """Refuse a name by which a page would be opened as something else.

    Raises:
        UsageError: it does not end as HTML's do.
    """
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{flag}: {output}: an HTML page is written; name it {output.with_suffix('.html').name}")


def require_no_input(output: Path, inputs: Mapping[str, str | Path | None], flag: str = "--output") -> None:
    """Refuse an output that would replace what the command reads, whatever the path is spelled like.

    Args:
        output: file, or folder that is replaced whole.
        inputs: as the command calls it -> file or folder, or a hub name, or ``FOLDER:NAME`` of data; None: not given.
        flag: that names the output.

    Raises:
        UsageError: it is one of the inputs, or a file of a folder that is one.
    """
    if not output.exists():
        return
    for name, given in inputs.items():
        if given is not None and any(path.exists() and output.samefile(path) for path in _read_of(str(given))):
            kind = "folder" if output.is_dir() else "file"
            raise UsageError(f"{flag}: {output}: is read as {name} and would be lost; name another {kind}")


def _read_of(given: str) -> Iterator[Path]:
    """``given`` and, if it is a folder, what is read there; nothing that exists for a name on the hub."""
    path = Path(given).expanduser()
    yield path
    folder, _, _ = given.rpartition(":")
    if path.is_dir():
        yield from (file for file in path.iterdir() if any(fnmatch(file.name, known) for known in FILES_IN_FOLDERS))
    elif folder and not path.exists() and Path(folder).expanduser().is_dir():
        from lazysched.runtime.data.registry import REGISTRY
        from lazysched.runtime.data.sources import resolve_data

        yield Path(folder).expanduser() / REGISTRY
        yield from (Path(source.name) for source in resolve_data(given))


def free_number(path: Path) -> Path:
    """The first of ``name.1.suffix``, ``name.2.suffix`` and so on beside ``path`` that nothing has, no link either."""
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))
