"""What this machine has: memory of the host within its control groups, memory of the device, and a name for it."""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

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


def device_memory(device: torch.device) -> tuple[int, int]:
    """(total, free) bytes of the memory that ``device`` computes in; for ``cpu`` the host's."""
    if device.type != "cuda":
        return host_memory()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes, free_bytes


def context_bytes(device: torch.device) -> int:
    """GPU memory in use that torch's allocator does not hold: the driver's context, and other processes."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device)


def configure_allocator(device: torch.device) -> None:
    """Let torch's allocator grow its segments in place, which keeps fragmentation low.

    Args:
        device: nothing happens unless it is a CUDA device.
    """
    if device.type != "cuda":
        return
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):  # torch 2.11 moved it here
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    else:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def hold_to_budget(device: torch.device, budget_bytes: int | None, planned_context_bytes: int = 0) -> None:
    """Let torch's allocator refuse what would exceed a budget.

    Args:
        device: nothing happens unless it is a CUDA device.
        budget_bytes: most bytes that this process may take on the GPU, the driver's context included; None: all.
        planned_context_bytes: what the context and libraries will have taken of it once all kernels are loaded.
    """
    if device.type != "cuda":
        return
    share = 1.0  # an earlier run in this process may have left a smaller one
    if budget_bytes is not None:
        outside_bytes = max(context_bytes(device), planned_context_bytes)
        share = (budget_bytes - outside_bytes) / torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(share, 0.0)))


def claim(device: torch.device, planned_bytes: int, planned_context_bytes: int = 0) -> None:
    """Take from the driver now what a plan will need, so that no step has to ask, and nobody else can take it first.

    Args:
        device: nothing happens unless it is a CUDA device.
        planned_bytes: what this process will hold on the GPU at most, the driver's context included.
        planned_context_bytes: what the context and libraries will have taken of it once all kernels are loaded.

    Raises:
        torch.OutOfMemoryError: the GPU has not that much left.
    """
    if device.type != "cuda":
        return
    outside_bytes = max(context_bytes(device), planned_context_bytes)
    missing_bytes = planned_bytes - outside_bytes - torch.cuda.memory_reserved(device)
    torch.empty(max(0, missing_bytes), dtype=torch.uint8, device=device)


def rss_bytes() -> int:
    """Bytes of physical memory that this process holds now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes(root: Path = _ROOT) -> int:
    """Most bytes of physical memory that this process has held.

    ``getrusage`` would give the peak of the process that started this one, where that was higher.
    """
    status = (root / "proc/self/status").read_text(encoding="utf-8")
    match = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    assert match, "/proc/self/status has no VmHWM"
    return int(match.group(1)) * 1024


def reset_peaks(device: torch.device) -> None:
    """Let the peaks of host memory (Linux: writing 5 to ``clear_refs``) and of the GPU start from what is held now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def hardware_id(device: torch.device, root: Path = _ROOT) -> str:
    """Name of this machine as ``device`` sees it: readable, with a hash of what a measured time depends on.

    Equal on every run on one machine; ``cuda-NVIDIA-H200-139GiB-16cores-1f2e3d4c``.
    """
    num_cores = len(os.sched_getaffinity(0))
    host_gib, processor = round(host_memory(root)[0] / 2**30), _processor(root)
    facts = [processor, f"{num_cores}cores", f"{host_gib}GiB"]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = [properties.name, f"{properties.total_memory // 2**30}GiB"]
        name = ["cuda", *gpu, f"{num_cores}cores"]
        facts += [*gpu, f"{properties.major}.{properties.minor}"]
    else:
        name = ["cpu", *facts]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in [*name, digest])


def _processor(root: Path) -> str:
    cpuinfo = root / "proc/cpuinfo"
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)  # absent on ARM
    return match.group(1) if match else platform.machine()


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
