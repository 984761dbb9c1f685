"""What torch says of the GPU, for ``lazysched doctor``; run in a process of its own, which may hang or die."""

from __future__ import annotations

import ctypes
import time
import warnings
from pathlib import Path

import torch

from lazysched.doctor.facts import GpuFacts, GraphFacts, Link, TorchFacts
from lazysched.doctor.link import read_link

_DRIVER = "libcuda.so.1"
LOAD_BYTES, NUM_COPIES, SETTLE_S = 1 << 28, 64, 0.2
"""16 GiB of copies: under half a second on the fastest link, longer than it takes to wake up."""


def torch_facts() -> TorchFacts:
    """Version, build and GPU; where there is no GPU, torch's reason."""
    problem = None
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        problem = _reason(str(complaints[-1].message) if complaints else "torch sees no CUDA device")
    return TorchFacts(
        version=torch.__version__, cuda_build=torch.version.cuda, hip_build=torch.version.hip,
        driver_cuda=_driver_cuda(), gpu=_gpu() if available else None, problem=problem,
    )  # fmt: skip


def _reason(otherwise: str) -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return otherwise


def _driver_cuda() -> str | None:
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL(_DRIVER).cuDriverGetVersion(ctypes.byref(number))
    except OSError:  # no driver
        return None
    return None if failed or not number.value else f"{number.value // 1000}.{number.value % 1000 // 10}"


def _gpu() -> GpuFacts:
    properties = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    return GpuFacts(
        name=properties.name, bus_id=bus_id(), total_bytes=total_bytes, free_bytes=free_bytes,
        capability=(properties.major, properties.minor), num_visible=torch.cuda.device_count(),
    )  # fmt: skip


def bus_id() -> str | None:
    """PCI address of the first visible GPU, as sysfs writes it; None where the driver does not tell."""
    torch.cuda.init()  # the driver answers once it is in use
    text = ctypes.create_string_buffer(32)
    try:
        failed = ctypes.CDLL(_DRIVER).cuDeviceGetPCIBusId(text, len(text), 0)
    except OSError:  # a ROCm build
        return None
    return None if failed else text.value.decode().lower()


def link_under_load(bus_id: str, root: str = "/") -> Link:
    """The link while copies run over it: at rest a GPU lets it fall to a lower generation.

    Args:
        bus_id: PCI address of torch's first GPU.
        root: where ``sys`` is found.
    """
    host = torch.zeros(LOAD_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty(LOAD_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(NUM_COPIES):
        target.copy_(host, non_blocking=True)
    time.sleep(SETTLE_S)
    link = read_link(Path(root), bus_id)
    torch.cuda.synchronize()
    return link


def compile_on_gpu() -> GraphFacts:
    """Compile a small function for the GPU and compare what it gives with plain torch."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).relu().sum(-1)

    values = torch.arange(-512, 512, device="cuda", dtype=torch.float32).view(32, 32)
    expected = function(values)
    try:
        found = torch.compile(function, fullgraph=True)(values)
    except torch.OutOfMemoryError:  # says nothing about compilers
        raise
    except Exception as error:  # dozens of kinds: no Triton, no C compiler, no headers, an unknown GPU
        return GraphFacts(problem=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return GraphFacts(problem=None if torch.equal(found, expected) else "it gives other numbers than plain torch")
