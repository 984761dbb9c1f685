"""Quantities and ranges as people write them. GB = 1e9 bytes, GiB = 2**30 bytes."""

from __future__ import annotations

import re

from lazysched.errors import UsageError

_FACTORS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")

_SLICE = re.compile(r"\s*(-?[0-9]{1,18})?\s*:\s*(-?[0-9]{1,18})?\s*(?::\s*(-?[0-9]{1,18})?\s*)?")


def parse_bytes(text: str, field: str = "size") -> int:
    """Bytes of ``"24GB"``, ``"1.5 GiB"`` or ``"0"``.

    Args:
        text: a number with a unit (B, KB, MB, GB, TB or KiB, MiB, GiB, TiB); 0 needs none.
        field: the name that an error shows.

    Raises:
        UsageError: the text is not such a quantity.
    """
    match = _PATTERN.fullmatch(text)
    if match and not match.group(2) and float(match.group(1)) == 0:
        return 0
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None or float(match.group(1)) > 1e30:
        is_number = match is not None and not match.group(2)
        example = f"{text.strip()}B for bytes, or for example 24GB" if is_number else "for example 24GB or 22.5GiB"
        raise UsageError(f"{field}: {text!r} is not a size; write {example}")
    return round(float(match.group(1)) * factor)


def parse_slice(text: str, field: str = "range") -> slice:
    """The slice of ``"3:5"``, ``"3:"``, ``":5"``, ``"-2:"`` or ``"0:100:10"``.

    Raises:
        UsageError: the text is no slice, or its stride is not positive.
    """
    match = _SLICE.fullmatch(text)
    if match is None:
        raise UsageError(f"{field}: {text!r} is not a range; write for example 3:5")
    start, stop, stride = (None if part in (None, "") else int(part) for part in match.groups())
    if stride is not None and stride < 1:
        raise UsageError(f"{field}: {text!r} has a stride of {stride}; give 1 or more")
    return slice(start, stop, stride)


def format_slice(chosen: slice) -> str:
    """``chosen`` as ``parse_slice`` reads it."""
    parts = [chosen.start, chosen.stop] + ([] if chosen.step is None else [chosen.step])
    return ":".join("" if part is None else str(part) for part in parts)


def format_bytes(num_bytes: float) -> str:
    """``num_bytes`` with three figures in the decimal unit that suits it."""
    value, size = abs(num_bytes), ""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        size = f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        if value < 999.5:
            break
        value /= 1000
    return f"-{size}" if num_bytes < 0 else size


def format_seconds(seconds: float) -> str:
    """``seconds`` with three figures in s, ms or µs."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * factor >= 0.9995 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError("unreachable")


def scale_of(num_bytes: float) -> tuple[float, str]:
    """Factor and unit that suit a picture whose largest figure is ``num_bytes``."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next(((1 / size, unit) for size, unit in units if num_bytes >= size), (1.0, "B"))
