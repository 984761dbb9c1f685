"""How fast the optimizer updates parameters in each format of its state, on the host and where the model computes.

On the host beside a GPU both alone and beside copies in both directions at full speed, which share the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch

from lazysched.optimizer_state import FP32_STATE_ELEMENTS, state_bytes
from lazysched.profiles.clock import durations_of, on_cpu_engine, rate
from lazysched.profiles.links import copies_under_way
from lazysched.profiles.random_data import WEIGHT_SCALE, random_normal
from lazysched.runtime.arena import HostArena
from lazysched.runtime.engines import cpu_threads
from lazysched.runtime.stage_updates import AdamWFp32, AdamWSettings, Hybrid8Update, StageUpdate, StepScale
from lazysched.schemas import Rate, Stage, StateFormat

WALKED_BYTES = 1 << 28
"""Stages are updated one after another until so much was touched: the next step finds nothing of it in a cache."""
_CPU = torch.device("cpu")
_GRAD_SCALE = 1e-3
_SETTINGS = AdamWSettings(weight_decay=0.01)
_Buffer = Callable[[str, torch.dtype], torch.Tensor]
"""(name, dtype) -> flat zeros."""
_Make = Callable[[_Buffer, torch.device], Callable[[], None]]
"""(where buffers come from, their device) -> the work to be timed."""


class UpdateRates(NamedTuple):
    """Parameters per second, as ``Profile`` has them."""

    alone: dict[Literal["cpu", "gpu"], dict[str, Rate]]
    """processor -> format -> rate."""
    beside_copies: dict[str, Rate]
    """format -> rate on the host while both directions are busy; empty without a GPU."""

    def in_a_step(self, state_format: str) -> Rate:
        """On the host, one rate for all: copies run beside the update about half of the time."""
        alone, beside = self.alone["cpu"][state_format], self.beside_copies.get(state_format)
        if beside is None or alone.per_s is None or beside.per_s is None:
            return alone
        per_s = 2 / (1 / alone.per_s + 1 / beside.per_s)
        return Rate(per_s=per_s, spread=max(alone.spread, beside.spread), repeats=beside.repeats)


def measure_updates(
    blocks: list[Stage], dtype: torch.dtype, device: torch.device, host_limit_bytes: int, repeats: int | None,
    *, pinned: bool = True,
) -> UpdateRates:  # fmt: skip
    """Parameters per second of AdamW by format of the optimizer state.

    Args:
        blocks: decoder blocks; stages like the first are updated, at most as many as there are.
        dtype: of weights and gradients.
        device: the processor ``gpu``; on a machine without one, the same CPU with memory of its own.
        host_limit_bytes: host memory that may be used.
        repeats: timed repeats; None chooses by the time one takes.
        pinned: whether the copies beside the host's updates are from and to page-locked memory.
    """
    rates = UpdateRates({"cpu": {}, "gpu": {}}, {})
    threads = cpu_threads(device)
    for state_format in get_args(StateFormat):
        sizes = _sizes(blocks[0], dtype, state_format)
        count = max(1, min(len(blocks), WALKED_BYTES // sum(sizes.values())))
        names = {f"{kind}/{index}": size for kind, size in sizes.items() for index in range(count)}
        make = partial(_update_work, blocks[0], count, dtype=dtype, state_format=state_format, threads=threads)
        num_params = blocks[0].num_params * count
        alone, beside = _cpu_rates(make, num_params, names, device, host_limit_bytes, repeats, pinned)
        rates.alone["cpu"][state_format] = alone
        if beside is not None:
            rates.beside_copies[state_format] = beside
        rates.alone["gpu"][state_format] = _gpu_rate(make, num_params, names, device, repeats)
    return rates


def _cpu_rates(
    make: _Make, num_params: int, names: Mapping[str, int], device: torch.device,
    host_limit_bytes: int, repeats: int | None, pinned: bool,
) -> tuple[Rate, Rate | None]:  # fmt: skip
    """Alone, and beside copies where there are any."""
    arena = HostArena(names, (), _CPU, host_limit_bytes)
    try:
        work = make(arena.tensor, _CPU)
        alone_s = on_cpu_engine(lambda: durations_of(work, _CPU, repeats), device)
        if device.type != "cuda":
            return rate(alone_s, num_params), None
        with copies_under_way(device, host_limit_bytes, pinned=pinned):
            beside_s = on_cpu_engine(lambda: durations_of(work, _CPU, len(alone_s)), device)
        return rate(alone_s, num_params), rate(beside_s, num_params)
    finally:
        arena.close()


def _gpu_rate(
    make: _Make, num_params: int, names: Mapping[str, int], device: torch.device,
    repeats: int | None,
) -> Rate:  # fmt: skip
    """Rate on ``device``, null where it cannot hold a block's optimizer state."""

    def buffer(name: str, kind: torch.dtype) -> torch.Tensor:
        return torch.zeros(names[name] // kind.itemsize, dtype=kind, device=device)

    try:
        work = make(buffer, device)
        work()  # kernels are compiled at their first call, which must not count as what one repeat takes
        return rate(durations_of(work, device, repeats), num_params)
    except torch.OutOfMemoryError:
        return Rate(per_s=None, reason="weights, gradient and optimizer state of a block do not fit the GPU's memory")


def _sizes(stage: Stage, dtype: torch.dtype, state_format: StateFormat) -> Mapping[str, int]:
    """Bytes of each buffer of an update."""
    state = state_bytes(stage, dtype.itemsize, state_format, FP32_STATE_ELEMENTS)
    return {"weights": stage.weight_bytes, "grads": stage.weight_bytes, "state": state}


def _update_work(
    stage: Stage, count: int, buffer: _Buffer, device: torch.device, *, dtype: torch.dtype, state_format: StateFormat,
    threads: int,
) -> Callable[[], None]:  # fmt: skip
    """A call that updates ``count`` stages in ``buffer(name, dtype)`` once.

    Moments start at zero; the first call, which nobody times, gives them the size of the gradients.
    """
    updates: list[StageUpdate] = []
    for index in range(count):
        weights, grads = buffer(f"weights/{index}", dtype), buffer(f"grads/{index}", dtype)
        state = buffer(f"state/{index}", torch.uint8)
        grads.copy_(random_normal((grads.numel(),), dtype, device, _GRAD_SCALE))
        if state_format == "hybrid8":
            updates.append(Hybrid8Update(stage, weights, grads, state, _SETTINGS, FP32_STATE_ELEMENTS, threads))
        else:
            updates.append(AdamWFp32(stage, weights, grads, state.view(torch.float32), _SETTINGS))
        for name in updates[-1].weights:
            updates[-1].load(name, _fill, dtype)
    factor, skip, step = torch.tensor([0.5, 0.0, 10.0], device=device)
    scale = StepScale(factor, _SETTINGS.coefficients(factor, skip, step, 1e-5), learning_rate=1e-5)

    def work() -> None:
        for update in updates:
            update.update(scale)

    return work


def _fill(target: torch.Tensor) -> None:
    target.copy_(random_normal(target.shape, target.dtype, target.device, WEIGHT_SCALE))
