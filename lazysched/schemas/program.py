"""Program: a plan lowered to operations on engines with their dependencies; the simulator and the executor read it."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import networkx as nx

from lazysched.schemas.base import Document, Engine, Phase, Schema, Tier

OpKind = Literal[
    "copy", "forward", "recompute", "backward", "loss", "norm", "totals", "scale", "accumulate", "select",
    "update", "read", "write", "collective",
]  # fmt: skip


class Op(Schema):
    """One operation, a node of a program."""

    id: str
    kind: OpKind
    engine: Engine
    rank: int = 0
    priority: int
    """The one order, within an engine, that simulator and executor both obey."""
    stage: str | None = None
    phase: Phase | None = None
    micro_batch: int | None = None
    chunk: int | None = None
    cost: tuple[str, ...] = ()
    """Key into the profile, never a duration: ``("variant", structure, name, "forward" | "backward")``,
    ``("link", name)`` or ``("update", processor, format)``; empty costs nothing."""
    num_bytes: int = 0
    """Bytes moved; by a backward, inside GPU memory to add its gradients up, at the cost of the link ``gpu``."""
    num_params: int = 0
    """Parameters updated."""
    working_bytes: int = 0
    """GPU bytes that exist only while the operation runs."""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    """Buffer ids. Whatever is both read and changed stands in ``writes`` alone or in both."""
    every: int = 1
    """Runs each k-th step (selective updates)."""


class Buffer(Schema):
    """Bytes in a tier with their lifetime within a step."""

    id: str
    tier: Tier
    kind: str
    num_bytes: int
    alloc_at: str | None = None
    """Operation at which it comes to exist; null: it exists all the time."""
    free_after: str | None = None
    """Operation after which it is gone."""
    pinned: bool = False


class Program(Document):
    """A directed acyclic graph of one step, with edges that wrap into the next."""

    plan_hash: str
    ops: dict[str, Op]
    """Operation id -> operation, in order of priority."""
    edges: list[tuple[str, str, int]]
    """(before, after, step distance); distance 1 is the wrap into the next step."""
    buffers: dict[str, Buffer]

    @cached_property
    def graph(self) -> nx.DiGraph[str]:
        """Operations of one step with the edges of distance 0."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(self.ops)
        graph.add_edges_from((before, after) for before, after, distance in self.edges if distance == 0)
        return graph

    @cached_property
    def predecessors(self) -> dict[str, list[tuple[str, int]]]:
        """Operation id -> [(operation before it, step distance)]."""
        result: dict[str, list[tuple[str, int]]] = {op: [] for op in self.ops}
        for before, after, distance in self.edges:
            result[after].append((before, distance))
        return result
