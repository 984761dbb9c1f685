"""Machines that do not exist: files in a folder, and what their children would have said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from lazysched.doctor.facts import GpuFacts, PinningFacts, TorchFacts
from lazysched.doctor.looking import CannotLook, Later
from lazysched.doctor.scene import Device, Scene

GB = 10**9
BUS_ID = "0000:65:00.0"
GPU = GpuFacts(
    name="RTX", bus_id=BUS_ID, total_bytes=24 * GB, free_bytes=23 * GB, capability=(8, 9), num_visible=1
)  # fmt: skip
WITH_GPU = TorchFacts(
    version="2.13.0", cuda_build="13.0", hip_build=None, driver_cuda="13.1", gpu=GPU, problem=None
)  # fmt: skip
WITHOUT_GPU = TorchFacts(
    version="2.13.0", cuda_build=None, hip_build=None, driver_cuda=None, gpu=None, problem="not compiled with CUDA"
)  # fmt: skip
REFUSED = PinningFacts(limit_bytes=1 * GB, tried_bytes=34 * GB)
LOCKED = PinningFacts(limit_bytes=None, tried_bytes=34 * GB)
HUNG = "no answer within 120 s"


def refusing(reason: str) -> NoReturn:
    raise CannotLook(reason)


def scene(
    root: Path,
    files: Mapping[str, str] | None = None,
    *,
    torch: TorchFacts | str = WITH_GPU,
    pinning: PinningFacts | str = LOCKED,
    environment: Mapping[str, str] | None = None,
    device: Device = "auto",
    model: Path | None = None,
) -> Scene:
    """A machine.

    Args:
        root: an empty folder for ``files``; path below it -> content.
        torch: what torch says, or why it cannot be asked.
        pinning: likewise, of page-locking.
    """
    for name, content in (files or {}).items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return Scene(
        folder=root, model=model, device=device, root=root, environment=environment or {},
        torch=Later(lambda: refusing(torch) if isinstance(torch, str) else torch),
        pinning=Later(lambda: refusing(pinning) if isinstance(pinning, str) else pinning),
    )  # fmt: skip
