"""Hardware files: those that ship with the package, by name, and one's own, by path."""

from __future__ import annotations

from difflib import SequenceMatcher
from importlib.resources import files
from pathlib import Path

from lazysched.errors import UsageError
from lazysched.schemas import Hardware


def library_names() -> list[str]:
    """Names of the hardware files of the package, sorted."""
    return sorted(path.name.removesuffix(".yaml") for path in _library().iterdir() if path.name.endswith(".yaml"))


def load_hardware(name: str) -> Hardware:
    """A hardware file of the package by its name, or any by its path.

    Raises:
        UsageError: there is none, or it is damaged; lists the names that exist, nearest first.
    """
    return Hardware.load(hardware_path(name))


def hardware_path(name: str) -> Path:
    """Where such a hardware file lies.

    Raises:
        UsageError: there is none of that name; lists the names that exist, nearest first.
    """
    if "/" in name or name.endswith((".yaml", ".yml", ".json")):
        return Path(name)
    names = library_names()
    if name.lower() not in names:
        nearest = sorted(names, key=lambda known: -SequenceMatcher(None, known, name.lower()).ratio())
        raise UsageError(
            f"hardware: {name!r} is not in the library; use {', '.join(nearest)}, or the path of a file that "
            f"`lazysched profile --hardware-only` wrote"
        )
    return _library() / f"{name.lower()}.yaml"


def _library() -> Path:
    return Path(str(files("lazysched.profiles"))) / "library"
