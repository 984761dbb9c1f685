"""Memory of the host within this process's control groups; needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_ROOT = Path("/")


@dataclass(frozen=True)
class _GroupFiles:
    """File names of one version of the memory controller, and the counters of its reclaimable file cache."""

    limit: str
    usage: str
    cache: tuple[str, ...]


_V1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _GroupFiles("memory.max", "memory.current", ("active_file", "inactive_file"))


def host_memory(root: Path = _ROOT) -> tuple[int, int]:
    """(total, free) bytes of host memory that this process may use, its control groups' limits respected.

    Free is what could be allocated now: file cache that the kernel would drop counts as free.

    Args:
        root: where ``proc`` and ``sys`` are found.
    """
    memory = psutil.virtual_memory()
    total_bytes, free_bytes = memory.total, memory.available
    for group, files in _memory_groups(root):
        limit_bytes = _read_int(group / files.limit)
        if limit_bytes is None or limit_bytes >= memory.total:
            continue  # no limit; version 1 writes a number near 2**63
        used_bytes = (_read_int(group / files.usage) or 0) - _cache_bytes(group, files)
        total_bytes = min(total_bytes, limit_bytes)
        free_bytes = min(free_bytes, max(0, limit_bytes - used_bytes))
    return total_bytes, free_bytes


def _memory_groups(root: Path) -> Iterator[tuple[Path, _GroupFiles]]:
    """Every control group, from this process's own up to the top, that may limit memory.

    Inside a container the path in ``proc`` is often the host's and absent here; then only the top is left, which is
    the container's own group.
    """
    membership = root / "proc/self/cgroup"
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, files = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            top, files = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, files
            if folder == top:
                break


def _read_int(path: Path) -> int | None:
    """Read a number; None for ``max`` and where there is no such file."""
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else "max"
    return None if text == "max" else int(text)


def _cache_bytes(group: Path, files: _GroupFiles) -> int:
    stat = group / "memory.stat"
    lines = stat.read_text(encoding="utf-8").splitlines() if stat.is_file() else []
    counters = dict(line.split() for line in lines)
    return sum(int(counters.get(name, 0)) for name in files.cache)
