"""What this machine has: memory of the device, of this process, and a name for it."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import platform
import re
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from lazysched.machine_memory import LARGE_PAGE_BYTES
from lazysched.runtime.host_memory import host_memory as host_memory

_ROOT = Path("/")


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


def hold_to_budget(device: torch.device, budget_bytes: int | None, planned_outside_bytes: int = 0) -> None:
    """Let torch's allocator refuse what would exceed a budget.

    Args:
        device: nothing happens unless it is a CUDA device.
        budget_bytes: most bytes that this process may take on the GPU, the driver's context included; None: all.
        planned_outside_bytes: of it, what will lie outside the allocator once all kernels are loaded.
    """
    if device.type != "cuda":
        return
    share = 1.0  # an earlier run in this process may have left a smaller one
    if budget_bytes is not None:
        outside_bytes = max(context_bytes(device), planned_outside_bytes)
        share = (budget_bytes - outside_bytes) / torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(share, 0.0)))


def claim(device: torch.device, planned_bytes: int, planned_outside_bytes: int = 0) -> None:
    """Take from the driver now what a plan will need, so that no step has to ask, and nobody else can take it first.

    Whole pages alone: rounded up, they would be beyond a budget that the plan fills.

    Args:
        device: nothing happens unless it is a CUDA device.
        planned_bytes: what this process will hold on the GPU at most, the driver's context included.
        planned_outside_bytes: of it, what will lie outside the allocator once all kernels are loaded.

    Raises:
        torch.OutOfMemoryError: the GPU has not that much left.
    """
    if device.type != "cuda":
        return
    outside_bytes = max(context_bytes(device), planned_outside_bytes)
    missing_bytes = planned_bytes - outside_bytes - torch.cuda.memory_reserved(device)
    whole_bytes = missing_bytes // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    torch.empty(max(0, whole_bytes), dtype=torch.uint8, device=device)


def give_back_heap() -> None:
    """Return to the system what was freed; glibc keeps much of a model's smaller tensors, by chance more or less."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)


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
