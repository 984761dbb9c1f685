"""How fast the optimizer updates parameters, on the host and where the model computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch

from lazysched.layout import MASTER_BYTES
from lazysched.profiles.clock import durations_of, on_cpu_engine, rate
from lazysched.profiles.random_data import random_normal
from lazysched.runtime.arena import HostArena
from lazysched.runtime.optimizer import AdamWFp32, AdamWSettings, StepScale
from lazysched.schemas import Rate, Stage

WALKED_BYTES = 1 << 28
"""Stages are updated one after another until so much was touched: the next step finds nothing of it in a cache."""
_CPU = torch.device("cpu")
_GRAD_SCALE, _MOMENT_SCALE = 1e-3, 1e-6


def measure_updates(
    blocks: list[Stage], dtype: torch.dtype, device: torch.device, host_limit_bytes: int, repeats: int | None
) -> dict[Literal["cpu", "gpu"], dict[str, Rate]]:
    """Parameters per second of fp32 AdamW, by processor.

    Args:
        blocks: decoder blocks; the first is updated, as often as a step would update blocks like it.
        dtype: of weights and gradients.
        device: the processor ``gpu``; on a machine without one, the same CPU with memory of its own.
        host_limit_bytes: host memory that may be used.
        repeats: timed repeats; None chooses by the time one takes.
    """
    stage = blocks[0]
    sizes = _sizes(stage, dtype)
    count = max(1, min(len(blocks), WALKED_BYTES // sum(sizes.values())))
    names = {f"{kind}/{index}": size for kind, size in sizes.items() for index in range(count)}
    arena = HostArena(names, (), _CPU, host_limit_bytes)
    try:
        on_host = _update_work(stage, count, lambda name, kind: arena.tensor(name, kind), dtype, _CPU)
        cpu = on_cpu_engine(lambda: durations_of(on_host, _CPU, repeats), device)
    finally:
        arena.close()
    on_device = _update_work(
        stage, count, lambda name, kind: torch.empty(names[name] // kind.itemsize, dtype=kind, device=device), dtype,
        device,
    )  # fmt: skip
    gpu = durations_of(on_device, device, repeats)
    num_params = stage.num_params * count
    return {"cpu": {"fp32": rate(cpu, num_params)}, "gpu": {"fp32": rate(gpu, num_params)}}


def _sizes(stage: Stage, dtype: torch.dtype) -> Mapping[str, int]:
    """Bytes of each buffer of an update; the fp32 master is in the state where the weights are narrower."""
    elements = stage.weight_bytes // dtype.itemsize
    num_states = 3 if dtype != torch.float32 else 2
    return {
        "weights": stage.weight_bytes, "grads": stage.weight_bytes, "state": num_states * MASTER_BYTES * elements
    }  # fmt: skip


def _update_work(
    stage: Stage, count: int, buffer: Callable[[str, torch.dtype], torch.Tensor], dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], None]:  # fmt: skip
    """A call that updates ``count`` stages in ``buffer(name, dtype)`` once."""
    settings = AdamWSettings(weight_decay=0.01)
    updates = []
    for index in range(count):
        weights, grads = buffer(f"weights/{index}", dtype), buffer(f"grads/{index}", dtype)
        state = buffer(f"state/{index}", torch.float32)
        _fill(weights, grads, state)
        updates.append(AdamWFp32(stage, weights, grads, state, settings))
    factor, skip, step = torch.tensor([0.5, 0.0, 10.0], device=device)
    scale = StepScale(factor=factor, skip=skip, step=step, learning_rate=1e-5)

    def work() -> None:
        for update in updates:
            update.update(scale)

    return work


def _fill(weights: torch.Tensor, grads: torch.Tensor, state: torch.Tensor) -> None:
    """Random values of the size that training has; the second moments must not be negative."""
    device, elements = weights.device, weights.numel()
    weights.copy_(random_normal((elements,), weights.dtype, device, 0.02))
    grads.copy_(random_normal((elements,), grads.dtype, device, _GRAD_SCALE))
    segments = state.split(elements)
    for segment in segments[:-2]:
        segment.copy_(weights)
    segments[-2].copy_(grads).mul_(0.1)
    segments[-1].copy_(grads).square_().add_(_MOMENT_SCALE)
