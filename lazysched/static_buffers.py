"""The buffers of a program that exist all the time, with their sizes; what a step makes and drops is not among them."""

from __future__ import annotations

from lazysched.hidden_slots import num_hidden_slots, num_segment_slots
from lazysched.layout import MASTER_BYTES, SCALE_ELEMENTS, TOTAL_ELEMENTS, Layout
from lazysched.schemas import Stage
from lazysched.staging import staging_slot_sizes


def static_buffer_sizes(layout: Layout, training: bool) -> dict[str, int]:
    """Buffer id -> bytes."""
    sizes = {"gpu/loss": MASTER_BYTES, "gpu/norms": layout.norms_bytes}
    for place in ("host", "gpu"):
        sizes[f"{place}/batch"] = layout.batch_bytes
        sizes[f"{place}/scale"] = MASTER_BYTES * SCALE_ELEMENTS
        sizes[f"{place}/totals"] = MASTER_BYTES * TOTAL_ELEMENTS + layout.norms_bytes
    if layout.plan.packing:
        sizes |= {f"gpu/arguments/{m}": layout.plan.argument_bytes for m in range(layout.plan.accumulation)}
    for stage in layout.stages:
        sizes |= _of_stage(layout, stage, training)
    slot_bytes = max((stage.weight_bytes for stage in layout.blocks if layout.streamed(stage)), default=0)
    sizes |= _slots("gpu/weights", layout.num_slots, slot_bytes)
    if layout.shared_vocabulary_slot:
        sizes["gpu/weights/vocabulary"] = max(layout.embed.weight_bytes, layout.head.weight_bytes)
    sizes |= _slots("gpu/hidden", num_hidden_slots(layout, training), layout.hidden_bytes)
    for kind, (count, slot_bytes) in staging_slot_sizes(layout, training).items():
        sizes |= _slots(f"host/{kind}", count, slot_bytes)
    files = [stage.weight_bytes for stage in (layout.embed, layout.head) if layout.choice(stage).weights == "nvme"]
    if files:
        sizes["host/weights/vocabulary"] = max(files)
    return sizes | _gradients(layout) | _offloading(layout) if training else sizes


def _offloading(layout: Layout) -> dict[str, int]:
    """Slots on the GPU for what leaves in the forward and comes back."""
    alone = [stage for stage in layout.blocks if not layout.in_segment(stage)]
    firsts = [segment[0] for segment in layout.segments if len(segment) > 1]
    return {
        **_slots("gpu/outgoing", layout.plan.d2h_lag + 1, max(map(layout.outgoing_bytes, layout.blocks))),
        **_slots("gpu/fetched", layout.num_slots, max(map(layout.offloaded_bytes, alone), default=0)),
        **_slots("gpu/segment", num_segment_slots(layout), max(map(layout.offloaded_bytes, firsts), default=0)),
    }


def _slots(prefix: str, count: int, num_bytes: int) -> dict[str, int]:
    return {f"{prefix}/slot{slot}": num_bytes for slot in range(count)} if num_bytes else {}


def _of_stage(layout: Layout, stage: Stage, training: bool) -> dict[str, int]:
    """Weights, and of what is trained gradient and state, where they live; a buffer of its own on the GPU, if any."""
    place = "host" if layout.on_host(stage) else "gpu"
    choice = layout.choice(stage)
    home = "nvme" if choice.weights == "nvme" else place
    sizes = {f"{home}/weights/{stage.id}": stage.weight_bytes}
    if stage.is_trained:
        sizes[f"{choice.state}/state/{stage.id}"] = layout.state_bytes(stage)
    if layout.has_own_weights(stage):
        sizes[f"gpu/weights/{stage.id}"] = stage.weight_bytes
    if training and stage.is_trained:
        sizes[f"{place}/grads/{stage.id}"] = layout.grad_bytes(stage)
    return sizes


def _gradients(layout: Layout) -> dict[str, int]:
    """Accumulators, and what holds rounded gradients until they have left."""
    host_blocks = [layout.grad_bytes(stage) for stage in layout.blocks if layout.on_host(stage)]
    sizes = _slots("gpu/grads", layout.plan.d2h_lag + 1, max(host_blocks, default=0))
    host_ends = [layout.grad_bytes(stage) for stage in (layout.embed, layout.head) if layout.on_host(stage)]
    if any(host_ends):
        sizes["gpu/grads/vocabulary"] = max(host_ends)
    for stage in layout.stages:
        if stage.is_trained and layout.accumulates(stage):
            key = layout.accumulator(stage)
            sizes[key] = max(sizes.get(key, 0), MASTER_BYTES * layout.elements(stage))
    if layout.tied and layout.embed.is_trained:
        sizes["gpu/accumulator/shared"] = MASTER_BYTES * layout.elements(layout.embed)
    return sizes
