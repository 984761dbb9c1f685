"""How fast the optimizer updates parameters, on the host and where the model computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch

from lazysched.layout import MASTER_BYTES
from lazysched.profiles.clock import durations_of, on_cpu_engine, rate
from lazysched.profiles.random_data import random_normal
from lazysched.runtime.arena import HostArena
from lazysched.runtime.stage_updates import AdamWFp32, AdamWSettings, StepScale
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
        blocks: decoder blocks; stages like the first are updated, at most as many as there are.
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
        on_host = _update_work(stage, count, arena.tensor, dtype, _CPU)
        cpu = on_cpu_engine(lambda: durations_of(on_host, _CPU, repeats), device)
    finally:
        arena.close()
    on_gpu = _gpu_rate(stage, count, names, dtype, device, repeats)
    return {"cpu": {"fp32": rate(cpu, stage.num_params * count)}, "gpu": {"fp32": on_gpu}}


def _gpu_rate(
    stage: Stage, count: int, names: Mapping[str, int], dtype: torch.dtype, device: torch.device, repeats: int | None
) -> Rate:
    """Rate on ``device``, null where it cannot hold a block's optimizer state."""

    def buffer(name: str, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(names[name] // kind.itemsize, dtype=kind, device=device)

    try:
        work = _update_work(stage, count, buffer, dtype, device)
        return rate(durations_of(work, device, repeats), stage.num_params * count)
    except torch.OutOfMemoryError:
        return Rate(per_s=None, reason="weights, gradient and optimizer state of a block do not fit the GPU's memory")


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
