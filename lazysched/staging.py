"""What lives in files passes through host memory: the reads and writes, and the slots that they use.

A read stands just before the copy or the update that needs it, so files are read in the order in which things are
needed, and run ahead as far as there are slots. Slots are used in turn.
"""

from __future__ import annotations

from collections import Counter

from lazysched.emitter import Emitter
from lazysched.layout import Layout
from lazysched.schemas import Phase, Stage

STATE_SLOTS = 3
"""One is read, one is updated, one is written."""


class Staging:
    """Emits reads and writes; whatever does not live in files is passed by.

    Args:
        layout: of the plan.
        emitter: of the program.
    """

    def __init__(self, layout: Layout, emitter: Emitter) -> None:
        self._layout, self._emitter = layout, emitter
        self._used: Counter[str] = Counter()

    def weights(self, stage: Stage, phase: Phase) -> str:
        """Host buffer that holds the stage's weights for an upload."""
        if self._layout.choice(stage).weights != "nvme":
            return f"host/weights/{stage.id}"
        target = self._next("weights", num_read_slots(self._layout)) if stage.is_block else "host/weights/vocabulary"
        self._emitter.emit(
            f"read/weights/{stage.id}/{phase}", "read", "nvme_read", stage=stage.id, phase=phase,
            num_bytes=stage.weight_bytes, reads=(f"nvme/weights/{stage.id}",), writes=(target,),
        )  # fmt: skip
        return target

    def outgoing(self, stage: Stage, m: int) -> str:
        """Host buffer that what the stage saves is copied to."""
        if self._layout.offload_tier(stage) == "nvme":
            return self._next("outgoing", num_write_slots(self._layout))
        return f"host/saved/{stage.id}/{m}"

    def put_away(self, stage: Stage, m: int, source: str) -> None:
        """Write what was copied to ``source`` to where it waits for the backward."""
        tier = self._layout.offload_tier(stage)
        num_bytes, home = self._layout.offloaded_bytes(stage), f"{tier}/saved/{stage.id}/{m}"
        self._emitter.buffer(home, num_bytes)
        if tier == "nvme":
            self._emitter.emit(
                f"write/saved/{stage.id}/{m}", "write", "nvme_write", stage=stage.id, phase="forward", micro_batch=m,
                num_bytes=num_bytes, reads=(source,), writes=(home,),
            )  # fmt: skip

    def saved(self, stage: Stage, m: int) -> str:
        """Host buffer that what the stage saved is fetched from."""
        if self._layout.offload_tier(stage) != "nvme":
            return f"host/saved/{stage.id}/{m}"
        target = self._next("fetched", num_read_slots(self._layout))
        self._emitter.emit(
            f"read/saved/{stage.id}/{m}", "read", "nvme_read", stage=stage.id, phase="backward", micro_batch=m,
            num_bytes=self._layout.offloaded_bytes(stage), reads=(f"nvme/saved/{stage.id}/{m}",), writes=(target,),
        )  # fmt: skip
        return target

    def record(self, stage: Stage) -> tuple[str, ...]:
        """Buffers that the stage's update changes, read from files where they live there."""
        choice, place = self._layout.choice(stage), "host" if self._layout.on_host(stage) else "gpu"
        weights = () if choice.weights == "nvme" else (f"{place}/weights/{stage.id}",)
        if choice.state != "nvme":
            return (f"{place}/state/{stage.id}", *weights)
        slot = self._next("state", STATE_SLOTS)
        self._emitter.emit(
            f"read/state/{stage.id}", "read", "nvme_read", stage=stage.id,
            num_bytes=self._layout.record_bytes(stage), reads=self._files(stage), writes=(slot,),
        )  # fmt: skip
        return (slot, *weights)

    def write_record(self, stage: Stage, record: tuple[str, ...]) -> None:
        """Write back what ``record`` named, once it is updated."""
        if self._layout.choice(stage).state == "nvme":
            self._emitter.emit(
                f"write/state/{stage.id}", "write", "nvme_write", stage=stage.id,
                num_bytes=self._layout.record_bytes(stage), reads=record[:1], writes=self._files(stage),
            )  # fmt: skip

    def _files(self, stage: Stage) -> tuple[str, ...]:
        weights = (f"nvme/weights/{stage.id}",) if self._layout.choice(stage).weights == "nvme" else ()
        return (f"nvme/state/{stage.id}", *weights)

    def _next(self, kind: str, count: int) -> str:
        self._used[kind] += 1
        return f"host/{kind}/slot{(self._used[kind] - 1) % count}"


def num_read_slots(layout: Layout) -> int:
    """Host slots for weights, and for saved tensors, on their way from files to the GPU: one more than it has itself.

    While a slot is copied to the GPU the next is read.
    """
    return layout.plan.prefetch_depth + 2


def num_write_slots(layout: Layout) -> int:
    """Host slots for saved tensors on their way from the GPU to files: one more than the GPU has itself."""
    return layout.plan.d2h_lag + 2


def staging_slot_sizes(layout: Layout, training: bool) -> dict[str, tuple[int, int]]:
    """Kind of slot -> (number of slots, bytes of one); 0 bytes where nothing of the kind lives in files."""
    blocks, stages = layout.blocks, layout.stages
    reads, writes = num_read_slots(layout), num_write_slots(layout)
    weights = [stage.weight_bytes for stage in blocks if layout.choice(stage).weights == "nvme"]
    saved = [layout.offloaded_bytes(stage) for stage in blocks if layout.offload_tier(stage) == "nvme"]
    records = [layout.record_bytes(stage) for stage in stages if layout.choice(stage).state == "nvme"]
    sizes = {"weights": (reads, max(weights, default=0))}
    if training:
        sizes["outgoing"] = (writes, max(saved, default=0))
        sizes["fetched"] = (reads, max(saved, default=0))
        sizes["state"] = (STATE_SLOTS, max(records, default=0))
    return sizes
