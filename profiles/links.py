"""Throughput of copies: between host and GPU, each way and both ways at once, and within each memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from threading import Event

import torch

from lazysched.profiles.clock import EventStopwatch, durations_of, num_repeats, on_cpu_engine, wall_s
from lazysched.profiles.random_data import fill_bytes
from lazysched.runtime.arena import HostArena
from lazysched.schemas import Curve

SIZES = (10**6, 4 * 10**6, 16 * 10**6, 64 * 10**6, 256 * 10**6)
LAP_BYTES = 64 * 10**6
"""Requests are timed in groups of about so many bytes: one event pair around each would cost as much as a small one."""
TARGET_S = 0.1
BESIDE_BYTES = 1 << 28
_CPU = torch.device("cpu")
_IN_LINE = "engines run in line on a CPU: copies never overlap"
CopyRequests = Callable[[], None]


def measure_copies(device: torch.device, host_limit_bytes: int, repeats: int | None) -> dict[str, Curve]:
    """Curves ``h2d d2h h2d_both d2h_both host gpu``.

    Between two memories, buffers are larger than caches and each request takes the next part of them. On a CPU the
    executor copies between ordinary buffers, and so does this.

    Args:
        device: where the tier ``gpu`` is.
        host_limit_bytes: host memory that may be used.
        repeats: timed repeats of each size; None chooses by the time one takes.

    Raises:
        RunError: host memory does not suffice or cannot be page-locked.
    """
    arena = HostArena({"up": SIZES[-1], "down": SIZES[-1]}, ("up", "down"), device, host_limit_bytes)
    try:
        up, down = arena.tensor("up", torch.uint8), arena.tensor("down", torch.uint8)
        inside, outside = (torch.empty(SIZES[-1], dtype=torch.uint8, device=device) for _ in range(2))
        for buffer in (up, down, inside, outside):
            fill_bytes(buffer)
        curves = {
            "h2d": _one_way(up, inside, device, repeats),
            "d2h": _one_way(outside, down, device, repeats),
            "host": on_cpu_engine(lambda: _one_way(up, down, _CPU, repeats), device),
            "gpu": _read_and_written(_one_way(outside, inside, device, repeats)),
        }
        if device.type != "cuda":
            return curves | {name: Curve(reason=_IN_LINE) for name in ("h2d_both", "d2h_both")}
        return curves | _both_ways((up, inside), (outside, down), device, repeats)
    finally:
        arena.close()


@contextmanager
def copies_under_way(device: torch.device, host_limit_bytes: int) -> Iterator[None]:
    """Keep both directions between host and GPU busy, as a step does; without a GPU nothing is copied."""
    if device.type != "cuda":
        yield
        return
    arena = HostArena({"up": BESIDE_BYTES, "down": BESIDE_BYTES}, ("up", "down"), device, host_limit_bytes)
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


def _one_way(source: torch.Tensor, target: torch.Tensor, device: torch.device, repeats: int | None) -> Curve:
    points = []
    for size in SIZES:
        durations_s = durations_of(_requests(source, target, size), device, repeats, TARGET_S)
        points.append((size, _rate_bytes_per_s(size, durations_s)))
    return Curve(points=points)


def _both_ways(
    up: tuple[torch.Tensor, torch.Tensor], down: tuple[torch.Tensor, torch.Tensor], device: torch.device,
    repeats: int | None,
) -> dict[str, Curve]:  # fmt: skip
    """Curves of both directions while the other runs too, each on a stream of its own."""
    curves: dict[str, list[tuple[int, float]]] = {"h2d_both": [], "d2h_both": []}
    for size in SIZES:
        ways = [_requests(*up, size), _requests(*down, size)]
        # The median leaves out the last laps, in which the slower direction runs alone.
        watches = [EventStopwatch(torch.cuda.Stream(device)) for _ in ways]
        count = num_repeats(wall_s(ways[0], device) + wall_s(ways[1], device), repeats, TARGET_S)
        for _ in range(count):
            for watch, requests in zip(watches, ways, strict=True):
                watch.lap(requests)
        for points, watch in zip(curves.values(), watches, strict=True):
            points.append((size, _rate_bytes_per_s(size, watch.durations_s())))
    return {name: Curve(points=points) for name, points in curves.items()}


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


def _rate_bytes_per_s(size: int, durations_s: Sequence[float]) -> float:
    return size * _per_lap(size) / statistics.median(durations_s)


def _read_and_written(curve: Curve) -> Curve:
    return Curve(points=[(size, 2 * rate) for size, rate in curve.points])
