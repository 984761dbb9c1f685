"""The PCI Express link of a device: from sysfs, else from nvidia-smi."""

from __future__ import annotations

import re
from pathlib import Path

from lazysched.doctor.children import run_program
from lazysched.doctor.facts import Link
from lazysched.doctor.looking import CannotLook, read_text

_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""By gigatransfers a second, as sysfs writes them."""
_MOST_LANES = 32
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_QUERY = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
_NVIDIA_SMI_S = 30.0


def read_link(root: Path, bus_id: str) -> Link:
    """Generation and width now, and the most of card and slot.

    Args:
        root: where ``sys`` is found.
        bus_id: PCI address.

    Raises:
        CannotLook: neither sysfs nor nvidia-smi says.
    """
    device = root / "sys/bus/pci/devices" / bus_id
    now, most = (_generation(device / f"{which}_link_speed") for which in ("current", "max"))
    lanes, most_lanes = (_width(device / f"{which}_link_width") for which in ("current", "max"))
    if now and most and lanes and most_lanes:
        return Link(
            generation=now, max_generation=most, slot_generation=_slot_generation(device), width=lanes,
            max_width=most_lanes,
        )  # fmt: skip
    try:
        return _by_nvidia_smi(bus_id)
    except CannotLook as reason:
        raise CannotLook(f"{device} does not say, and nvidia-smi neither: {reason}") from None


def _generation(path: Path) -> int | None:
    try:
        return _GENERATIONS.get(float(read_text(path).split()[0]))
    except (CannotLook, ValueError, IndexError):  # "Unknown" in some virtual machines
        return None


def _slot_generation(device: Path) -> int | None:
    port = device.resolve().parent
    return _generation(port / "max_link_speed") if _ADDRESS.fullmatch(port.name) else None


def _width(path: Path) -> int | None:
    try:
        text = read_text(path)
    except CannotLook:
        return None
    return int(text) if text.isdigit() and 1 <= int(text) <= _MOST_LANES else None  # 0 and 255 mean unknown


def _by_nvidia_smi(bus_id: str) -> Link:
    printed = run_program(
        ["nvidia-smi", f"--id={bus_id}", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"], _NVIDIA_SMI_S
    )
    fields = [part.strip() for part in printed.strip().split(",")]
    if len(fields) != 4 or not all(field.isdigit() for field in fields):
        raise CannotLook(f"it prints {printed.strip()!r}")
    generation, max_generation, width, max_width = map(int, fields)
    # Its maximum is that of card and system together.
    return Link(
        generation=generation, max_generation=max_generation, slot_generation=None, width=width, max_width=max_width
    )
