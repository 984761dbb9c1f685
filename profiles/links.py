"""Throughput of copies: between host and GPU, each way and both ways at once, and within each memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from threading import Event

import torch

from lazysched.profiles.clock import EventStopwatch, durations_of, num_repeats, on_cpu_engine, wall_s
from lazysched.profiles.random_data import fill_bytes
from lazysched.runtime.arena import HostArena
from lazysched.schemas import Curve
from lazysched.units import format_bytes

SIZES = (10**6, 4 * 10**6, 16 * 10**6, 64 * 10**6, 256 * 10**6)
LAP_BYTES = 64 * 10**6
"""Requests are timed in groups of about so many bytes: one event pair around each would cost as much as a small one."""
TARGET_S = 0.1
BESIDE_BYTES = 1 << 28
PAGEABLE_SIZES = (10**6, 16 * 10**6, 64 * 10**6)
"""For ordinary memory: the driver moves it piece by piece, so that from some size on the rate stays."""
BOTH = ("h2d_both", "d2h_both")
PAGEABLE = ("h2d_pageable", "d2h_pageable", "h2d_pageable_both", "d2h_pageable_both")
_CPU = torch.device("cpu")
_IN_LINE = "engines run in line on a CPU: copies never overlap"
_NOT_LOCKED = "no GPU: no memory is page-locked, all copies are between ordinary buffers"
CopyRequests = Callable[[], None]


def measure_copies(
    device: torch.device, host_limit_bytes: int, repeats: int | None, *, pin_limit_bytes: int | None = None
) -> dict[str, Curve]:
    """Curves ``h2d d2h h2d_both d2h_both host gpu``, and the first four again as ``h2d_pageable`` and so on.

    Between two memories, buffers are larger than caches and each request takes the next part of them. On a CPU the
    executor copies between ordinary buffers, and so does this.

    Args:
        device: where the tier ``gpu`` is.
        host_limit_bytes: host memory that may be used.
        repeats: timed repeats of each size; None chooses by the time one takes.
        pin_limit_bytes: most that can be page-locked; where it is too little for these buffers, nothing is.

    Raises:
        RunError: host memory does not suffice or cannot be page-locked.
    """
    pinned = ("up", "down") if buffers_can_be_pinned(pin_limit_bytes) else ()
    arena = HostArena({"up": SIZES[-1], "down": SIZES[-1]}, pinned, device, host_limit_bytes)
    try:
        up, down = arena.tensor("up", torch.uint8), arena.tensor("down", torch.uint8)
        inside, outside = (torch.empty(SIZES[-1], dtype=torch.uint8, device=device) for _ in range(2))
        for buffer in (up, down, inside, outside):
            fill_bytes(buffer)
        curves = {
            "host": on_cpu_engine(lambda: _one_way(up, down, _CPU, repeats), device),
            "gpu": _read_and_written(_one_way(outside, inside, device, repeats)),
        }
        if pinned:
            curves["h2d"] = _one_way(up, inside, device, repeats)
            curves["d2h"] = _one_way(outside, down, device, repeats)
        if device.type != "cuda":
            return curves | _without(BOTH, _IN_LINE) | _without(PAGEABLE, _NOT_LOCKED)
        if pinned:
            curves |= _both_ways((up, inside), (outside, down), device, repeats)
        else:
            curves |= _without(("h2d", "d2h", *BOTH), f"only {format_bytes(pin_limit_bytes or 0)} can be page-locked")
        arena.close()  # from here on the same memory is ordinary
        return curves | _pageable((up, inside), (outside, down), device, repeats)
    finally:
        arena.close()


def buffers_can_be_pinned(pin_limit_bytes: int | None) -> bool:
    """Whether the buffers of this module can be page-locked under such a limit."""
    return pin_limit_bytes is None or pin_limit_bytes >= 2 * max(SIZES[-1], BESIDE_BYTES)


def _without(names: Sequence[str], reason: str) -> dict[str, Curve]:
    return {name: Curve(reason=reason) for name in names}


@contextmanager
def copies_under_way(device: torch.device, host_limit_bytes: int, *, pinned: bool = True) -> Iterator[None]:
    """Keep both directions between host and GPU busy, as a step does; without a GPU nothing is copied.

    Args:
        device: where the tier ``gpu`` is.
        host_limit_bytes: host memory that may be used.
        pinned: whether it is page-locked.
    """
    if device.type != "cuda":
        yield
        return
    sizes = {"up": BESIDE_BYTES, "down": BESIDE_BYTES}
    arena = HostArena(sizes, sizes if pinned else (), device, host_limit_bytes)
    inside = [torch.zeros(BESIDE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    ways = [(arena.tensor("up", torch.uint8), inside[0]), (inside[1], arena.tensor("down", torch.uint8))]
    stop = Event()

    def run(source: torch.Tensor, target: torch.Tensor) -> None:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            while not stop.is_set():
                target.copy_(source, non_blocking=True)
                stream.synchronize()

    try:
        with ThreadPoolExecutor(len(ways)) as workers:
            for way in ways:
                workers.submit(run, *way)
            try:
                yield
            finally:
                stop.set()
    finally:
        arena.close()


def _one_way(
    source: torch.Tensor, target: torch.Tensor, device: torch.device, repeats: int | None,
    sizes: Sequence[int] | None = None,
) -> Curve:  # fmt: skip
    return Curve.of(
        {
            size: _each_s(size, durations_of(_requests(source, target, size), device, repeats, TARGET_S))
            for size in sizes or SIZES
        }
    )


def _both_ways(
    up: tuple[torch.Tensor, torch.Tensor], down: tuple[torch.Tensor, torch.Tensor], device: torch.device,
    repeats: int | None,
) -> dict[str, Curve]:  # fmt: skip
    """Curves of both directions while the other runs too, each on a stream of its own."""
    curves: dict[str, dict[int, list[float]]] = {name: {} for name in BOTH}
    for size in SIZES:
        ways = [_requests(*up, size), _requests(*down, size)]
        # The median leaves out the last laps, in which the slower direction runs alone.
        watches = [EventStopwatch(torch.cuda.Stream(device)) for _ in ways]
        count = num_repeats(wall_s(ways[0], device) + wall_s(ways[1], device), repeats, TARGET_S)
        for _ in range(count):
            for watch, requests in zip(watches, ways, strict=True):
                watch.lap(requests)
        for durations_s, watch in zip(curves.values(), watches, strict=True):
            durations_s[size] = _each_s(size, watch.durations_s())
    return {name: Curve.of(durations_s) for name, durations_s in curves.items()}


def _pageable(
    up: tuple[torch.Tensor, torch.Tensor], down: tuple[torch.Tensor, torch.Tensor], device: torch.device,
    repeats: int | None,
) -> dict[str, Curve]:  # fmt: skip
    """Curves of copies from and to ordinary memory, each direction alone and both at once.

    Such a copy keeps the thread that asks for it, so that both at once take two threads, as in the executor.
    """
    curves = [_one_way(*way, device, repeats, PAGEABLE_SIZES) for way in (up, down)]
    both: tuple[dict[int, list[float]], ...] = ({}, {})
    with ThreadPoolExecutor(2) as workers:
        for size in PAGEABLE_SIZES:
            ways = [_requests(*up, size), _requests(*down, size)]
            count = num_repeats(sum(wall_s(way, device) for way in ways), repeats, TARGET_S)
            laps = workers.map(partial(_laps_s, count=count, device=device), ways)
            for durations_s, laps_s in zip(both, laps, strict=True):
                durations_s[size] = _each_s(size, laps_s)
    curves += map(Curve.of, both)
    return dict(zip(PAGEABLE, curves, strict=True))


def _laps_s(requests: CopyRequests, count: int, device: torch.device) -> list[float]:
    """Seconds of each of ``count`` laps on a stream of their own."""
    watch = EventStopwatch(torch.cuda.Stream(device))
    for _ in range(count):
        watch.lap(requests)
    return watch.durations_s()


def _per_lap(size: int) -> int:
    return max(1, LAP_BYTES // size)


def _requests(source: torch.Tensor, target: torch.Tensor, size: int) -> CopyRequests:
    """A call that makes one lap of requests of ``size`` bytes, each for the next part of the buffers."""
    parts: Iterator[tuple[torch.Tensor, torch.Tensor]] = cycle(
        (source[offset : offset + size], target[offset : offset + size])
        for offset in range(0, source.numel() - size + 1, size)
    )

    def run() -> None:
        for _ in range(_per_lap(size)):
            part, place = next(parts)
            place.copy_(part, non_blocking=True)

    return run


def _each_s(size: int, laps_s: Sequence[float]) -> list[float]:
    """Seconds of a request in each lap."""
    return [lap_s / _per_lap(size) for lap_s in laps_s]


def _read_and_written(curve: Curve) -> Curve:
    return curve.model_copy(update={"points": [(size, 2 * rate) for size, rate in curve.points]})
