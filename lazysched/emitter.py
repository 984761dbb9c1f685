"""Operations and buffers of a program as they are added, in order."""

from __future__ import annotations

from typing import cast

from lazysched.layout import link_name
from lazysched.schemas import Buffer, Engine, HostMemory, Op, OpKind, Phase, Tier


class Emitter:
    """Gathers what a program consists of; an operation's priority is its place.

    Args:
        host_memory: kind of the host's memory, which decides how fast copies are.

    Attributes:
        ops: by id, in order.
        buffers: by id.
    """

    def __init__(self, host_memory: HostMemory) -> None:
        self.ops: dict[str, Op] = {}
        self.buffers: dict[str, Buffer] = {}
        self._host_memory = host_memory
        self._links: dict[Engine, tuple[str, ...]] = {
            "h2d": ("link", link_name("h2d", host_memory)), "d2h": ("link", link_name("d2h", host_memory)),
            "nvme_read": ("link", "nvme_read"), "nvme_write": ("link", "nvme_write"),
        }  # fmt: skip

    def emit(
        self,
        op_id: str,
        kind: OpKind,
        engine: Engine,
        *,
        stage: str | None = None,
        phase: Phase | None = None,
        micro_batch: int | None = None,
        cost: tuple[str, ...] | None = None,
        num_bytes: int = 0,
        num_params: int = 0,
        working_bytes: int = 0,
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
    ) -> None:
        """Add an operation; without ``cost`` a copy, read or write costs its link, anything else nothing."""
        self.ops[op_id] = Op(
            id=op_id, kind=kind, engine=engine, priority=len(self.ops), stage=stage, phase=phase,
            micro_batch=micro_batch, cost=self._links.get(engine, ()) if cost is None else cost, num_bytes=num_bytes,
            num_params=num_params, working_bytes=working_bytes, reads=reads, writes=writes,
        )  # fmt: skip

    def buffer(
        self, buffer_id: str, num_bytes: int, alloc_at: str | None = None, free_after: str | None = None
    ) -> None:
        """Add a buffer, which exists all the time unless operations are named."""
        tier, kind = buffer_id.split("/")[:2]
        pinned = tier == "host" and kind != "state" and self._host_memory == "pinned"
        self.buffers[buffer_id] = Buffer(
            id=buffer_id, tier=cast(Tier, tier), kind=kind, num_bytes=num_bytes, alloc_at=alloc_at,
            free_after=free_after, pinned=pinned,
        )  # fmt: skip
