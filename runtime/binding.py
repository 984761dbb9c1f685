"""Keeps the threads of a command, and with them its host memory, beside the GPU on a machine of several sockets."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rich.console import Console

from lazysched.doctor.looking import CannotLook
from lazysched.lines import say, warn
from lazysched.numa import placement
from lazysched.runtime.arguments import choose_device
from lazysched.runtime.gpu_facts import bus_id

_ROOT = Path("/")


def bind_to_gpu(device: str | None, console: Console, *, wanted: bool = True, root: Path = _ROOT) -> None:
    """Let this process run on the cores of the GPU's socket alone, of those that it may use; say so.

    To be called before host memory is taken. Nothing happens beside no GPU, on one socket, where the system does not
    show where the GPU is (``lazysched doctor`` says why), or where its socket has few of the allowed cores.

    Args:
        device: ``cuda`` or ``cpu``; None and ``auto`` take the GPU where there is one.
        console: where a line goes.
        wanted: with False nothing happens at all.
        root: where ``sys`` is found.

    Raises:
        UsageError: there is no such device.
    """
    if not wanted or choose_device(device).type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    try:
        address = bus_id()
        found = None if address is None else placement(root, address, os.sched_getaffinity(0))
    except CannotLook:
        return
    if found is None or found.node is None:
        return
    where = f"numa: the GPU at {address} is attached to memory node {found.node}"
    if found.should_bind:
        _bind(set(found.near))
        say(
            console, f"{where}, so threads keep to the {len(found.near)} cores there; --no-numa-bind lets them run free"
        )
    elif found.near != found.allowed:
        warn(
            console,
            f"{where}, of whose cores this process may use {len(found.near)} of {len(found.allowed)}: copies may be "
            f"slow; allow more of them with taskset, numactl or the container's cpuset",
        )


def _bind(cores: set[int]) -> None:
    """Every thread that there is; later ones follow the thread that makes them."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # it has ended meanwhile
            continue
    torch.set_num_threads(min(torch.get_num_threads(), len(cores)))
