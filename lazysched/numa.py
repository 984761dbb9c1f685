"""Which cores are near a GPU: those of the processor socket whose memory nodes it is attached to.

Memory is taken from the node of the thread that touches it first, and copies between a GPU and memory beside another
processor pass through both. Nodes of one socket are near each other, so the socket counts, not the node: where a socket
has several nodes, one of them has a part of its memory channels and cores only.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lazysched.doctor.looking import CannotLook, read_text

_PARTS = 2
"""Threads are bound where the socket has at least this part of an even share of the cores that may be used."""


@dataclass(frozen=True)
class Placement:
    """Where a GPU is, and where a process may run.

    Attributes:
        node: the memory node that the GPU is attached to; None where the system does not say.
        nodes: every node with cores -> its cores.
        allowed: cores that the process may use.
        near: those of them that are in the socket of ``node``.
        num_sockets: of ``allowed``.
    """

    node: int | None
    nodes: dict[int, frozenset[int]]
    allowed: frozenset[int]
    near: frozenset[int]
    num_sockets: int

    @property
    def mine(self) -> list[int]:
        """Nodes that the process may run on."""
        return sorted(node for node, cores in self.nodes.items() if cores & self.allowed)

    @property
    def should_bind(self) -> bool:
        """Whether threads should keep to ``near``: there are others, and ``near`` is no small rest."""
        is_enough = len(self.near) * self.num_sockets * _PARTS >= len(self.allowed)
        return bool(self.near) and self.near != self.allowed and is_enough


def placement(root: Path, bus_id: str, allowed: Collection[int]) -> Placement:
    """Look at ``sys`` below ``root``.

    Args:
        root: ``/``, but in tests.
        bus_id: PCI address of the GPU, as ``0000:65:00.0``.
        allowed: cores that the process may use.

    Raises:
        CannotLook: ``sys`` does not show memory nodes or the GPU.
    """
    nodes = memory_nodes(root)
    node = int(read_text(root / "sys/bus/pci/devices" / bus_id / "numa_node"))
    known, mine = node in nodes, frozenset(allowed)
    socket = _sockets(root, nodes[node]) if known else set[str]()
    near = frozenset(core for core in mine if _socket(root, core) in socket or (known and core in nodes[node]))
    return Placement(node if known else None, nodes, mine, near, len(_sockets(root, mine)))


def memory_nodes(root: Path) -> dict[int, frozenset[int]]:
    """Node -> its cores; nodes of memory alone are left out.

    Raises:
        CannotLook: ``sys`` shows none.
    """
    folder = root / "sys/devices/system/node"
    if not folder.is_dir():
        raise CannotLook(f"{folder} is absent")
    nodes = {
        int(entry.name.removeprefix("node")): _cores(read_text(entry / "cpulist"))
        for entry in folder.iterdir()
        if re.fullmatch(r"node\d+", entry.name)
    }
    found = {node: cores for node, cores in nodes.items() if cores}
    if not found:
        raise CannotLook(f"{folder} lists no node with cores")
    return found


def _cores(text: str) -> frozenset[int]:
    """The cores of ``0-3,8``."""
    ranges = (part.partition("-") for part in text.split(",") if part)
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))


def _sockets(root: Path, cores: Collection[int]) -> set[str]:
    return {_socket(root, core) for core in cores}


def _socket(root: Path, core: int) -> str:
    """The socket's number; where it does not show, the core's memory node stands for it."""
    folder = root / f"sys/devices/system/cpu/cpu{core}"
    try:
        return read_text(folder / "topology/physical_package_id")
    except CannotLook:
        nodes = [node for node, cores in memory_nodes(root).items() if core in cores]
        return f"node {nodes[0]}" if nodes else f"core {core}"
