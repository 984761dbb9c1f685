"""``profile --hardware-only``: what this machine can do without any model, as a file for ``solve --hardware``."""

from __future__ import annotations

import os
import platform
import statistics
from datetime import UTC, datetime

import torch

from lazysched.errors import RunError
from lazysched.profiles.clock import durations_of, wall_s
from lazysched.profiles.files import Storage, check_folder, measure_storage
from lazysched.profiles.links import buffers_can_be_pinned, measure_copies
from lazysched.profiles.measure import chosen_device, tier_memory
from lazysched.profiles.pinning import measure_pinning
from lazysched.profiles.random_data import random_normal
from lazysched.profiles.stages import HEAT_S
from lazysched.profiles.updates import measure_updates
from lazysched.runtime.engines import cpu_threads
from lazysched.runtime.flat import flat_bytes
from lazysched.runtime.machine import configure_allocator, context_bytes, hardware_id, hold_to_budget, host_memory
from lazysched.schemas import BYTES_PER_ELEMENT, Curve, Dtype, Figure, Hardware, Rate, Stage
from lazysched.schemas.hardware import unknown
from lazysched.schemas.profile import interquartile

MATMUL_SIZES = {"cuda": 8192, "cpu": 2048}
"""Rows and columns of the square matrices that are multiplied."""
UPDATED_SHAPE: tuple[int, ...] = (4096, 4096)
"""Of the matrix whose update is timed."""
_LINKS = ("h2d", "d2h", "h2d_both", "d2h_both", "nvme_read", "nvme_write")
_NO_GPU = "no GPU: what computes is the host"


def measure_hardware(
    *, device: str | None = None, storage_dir: str | None = None, pin_limit_bytes: int | None = None,
    repeats: int | None = None,
) -> Hardware:  # fmt: skip
    """Measure links, memory, matrix products, updates and storage; what is not there is null with a reason.

    Args:
        device: ``cuda`` or ``cpu``; None takes a GPU where there is one.
        storage_dir: an existing folder whose disk is measured as tier ``nvme``.
        pin_limit_bytes: most host memory that can be page-locked beside a GPU; None tries some GB.
        repeats: timed repeats of each figure; None chooses by the time one takes.

    Raises:
        UsageError: an argument is wrong.
        RunError: host memory or storage does not suffice.
    """
    where, folder = chosen_device(device, pin_limit_bytes), check_folder(storage_dir)
    configure_allocator(where)
    hold_to_budget(where, None)
    dtype: Dtype = "bfloat16" if where.type == "cuda" else "float32"
    total_bytes, _, notes = tier_memory(where)
    matmul = _matmul(where, dtype, repeats)
    limit_bytes = host_memory()[1]
    pinning = measure_pinning(where, limit_bytes, pin_limit_bytes)
    updates = measure_updates(
        [_updated_stage(dtype)], getattr(torch, dtype), where, limit_bytes, repeats,
        pinned=buffers_can_be_pinned(pinning.limit_bytes),
    )  # fmt: skip
    links = measure_copies(where, limit_bytes, repeats, pin_limit_bytes=pinning.limit_bytes)
    storage = measure_storage(folder, repeats)
    links |= storage.links
    if pinning.note:
        notes["page-locked"] = pinning.note
    if storage.note:
        notes["nvme"] = storage.note
    figures = {
        "gpu_memory_bytes": _measured(total_bytes["gpu"]),
        "host_memory_bytes": _measured(total_bytes["host"]),
        "nvme_bytes": _room(storage),
        **{f"{name}_bytes_per_s": _large(links[name]) for name in _LINKS},
        "gpu_bandwidth_bytes_per_s": unknown("the vendor's figure, not measured; see gpu_copy_bytes_per_s"),
        "gpu_copy_bytes_per_s": _large(links["gpu"]),
        "host_copy_bytes_per_s": _large(links["host"]),
        "peak_matmul_flop_per_s": unknown("the vendor's figure, not measured; see matmul_flop_per_s"),
        "matmul_flop_per_s": matmul,
        **{
            f"{place}_update_{state_format}_per_s": _rate(rate if place == "gpu" else updates.in_a_step(state_format))
            for place, rates in updates.alone.items()
            for state_format, rate in rates.items()
        },
        "context_bytes": _context(where),
        "price_usd_per_hour": unknown("not known; write it here to compare costs"),
    }
    identity = hardware_id(where)
    facts = {"name": identity, "device": where.type, "compute_dtype": dtype, "hardware_id": identity}
    return Hardware.model_validate(facts | figures | {"notes": notes | _versions(where)})


def _matmul(device: torch.device, dtype: Dtype, repeats: int | None) -> Figure:
    """Rate of large products, in operations per second."""
    size = MATMUL_SIZES[device.type]
    try:
        left, right = (random_normal((size, size), getattr(torch, dtype), device) for _ in range(2))
        result = torch.empty_like(left)

        def work() -> torch.Tensor:
            return torch.mm(left, right, out=result)

        if device.type == "cuda" and repeats is None:  # after a rest a GPU computes faster than it can for long
            work()
            once_s = wall_s(work, device)
            wall_s(lambda: [work() for _ in range(int(HEAT_S / once_s))], device)
        durations_s = durations_of(work, device, repeats)
    except torch.OutOfMemoryError:
        raise RunError(f"matmul: matrices of {size} x {size} do not fit the GPU; free some of its memory") from None
    median_s = statistics.median(durations_s)
    return Figure(
        value=2 * size**3 / median_s, source="measured", spread=interquartile(durations_s) / median_s,
        note=f"{size} x {size} x {size}, {dtype}, {_today()}",
    )  # fmt: skip


def _updated_stage(dtype: Dtype) -> Stage:
    params = {"matrix.weight": UPDATED_SHAPE}
    size = flat_bytes(params, BYTES_PER_ELEMENT[dtype])
    return Stage(id="block.0", structure="matrix", params=params, weight_bytes=size)


def _large(curve: Curve) -> Figure:
    """The rate of the largest request."""
    if not curve.points:
        return unknown(curve.reason or "not measured")
    size, rate = curve.points[-1]
    note = f"requests of {size / 1e6:.0f} MB, {_today()}"
    return Figure(value=rate, source="measured", spread=curve.spread, note=note)


def _rate(rate: Rate) -> Figure:
    if rate.per_s is None:
        return unknown(rate.reason or "not measured")
    return Figure(value=rate.per_s, source="measured", spread=rate.spread, note=f"median of {rate.repeats}, {_today()}")


def _room(storage: Storage) -> Figure:
    if not storage.free_bytes:
        return unknown("no --storage folder given" if storage.free_bytes is None else "the storage folder is full")
    return Figure(value=storage.free_bytes, source="measured", note=f"free in the storage folder, {_today()}")


def _context(device: torch.device) -> Figure:
    if device.type != "cuda":
        return unknown(_NO_GPU)
    torch.cuda.empty_cache()
    return Figure(
        value=context_bytes(device) + torch.cuda.memory_allocated(device), source="measured",
        note=f"in use beside torch's allocator, other processes included; a model's kernels add some, {_today()}",
    )  # fmt: skip


def _measured(value: int | None) -> Figure:
    assert value is not None
    return Figure(value=value, source="measured", note=_today())


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _versions(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    threads = f"{cpu_threads(device)} of {len(os.sched_getaffinity(0))} cores"
    return {"torch": torch.__version__, "device": name, "threads": threads}
