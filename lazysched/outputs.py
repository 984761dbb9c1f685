"""Files that commands write."""

from __future__ import annotations

from pathlib import Path

from lazysched.errors import UsageError


def require_folder_of(output: Path) -> None:
    """Refuse an output that could not be written before the work is done, not after it."""
    if not output.parent.is_dir():
        raise UsageError(f"--output: {output}: the folder {output.parent} does not exist; make it first")
    if output.is_dir():
        raise UsageError(f"--output: {output} is a folder; name a file")
