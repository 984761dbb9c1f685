"""Times torch's attention kernels on the very calls that a model's blocks make."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lazysched.profiles.clock import durations_of
from lazysched.profiles.random_data import random_normal, random_weights
from lazysched.runtime.attention import ANY_ORDER, attention, in_one_order
from lazysched.runtime.model import Model
from lazysched.schemas import AttentionBackend, Stage

CANDIDATES: tuple[AttentionBackend, ...] = ("cudnn", "flash", "efficient")
TARGET_S = 0.05
"""Time for one kernel's repeats."""


@dataclass(frozen=True)
class AttentionChoice:
    """The fastest kernel, and a line on what was measured."""

    backend: AttentionBackend
    note: str


def fastest_attention(model: Model) -> AttentionChoice:
    """Time forward and backward of every attention call of one block of each structure; ``default`` on a CPU."""
    if model.device.type != "cuda":
        return AttentionChoice("default", "torch's choice")
    calls = [call for stage in representatives(model.stages) for call in _calls(model, stage)]
    times_s: dict[AttentionBackend, float] = {}
    candidates: list[AttentionBackend] = [
        name for name in CANDIDATES if not (model.full_determinism and name in ANY_ORDER)
    ]
    for backend in candidates if calls else ():
        try:
            with attention(backend, only=True), in_one_order(model.full_determinism), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # at length, why a kernel does not take such a call
                times_s[backend] = sum(_seconds(args, kwargs, model.device) for args, kwargs in calls)
        except RuntimeError:  # this kernel does not know such a call, or does not exist here
            continue
    if not times_s:
        return AttentionChoice("default", "torch's choice: no kernel could be chosen for this model")
    best = min(times_s, key=lambda backend: times_s[backend])
    measured = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in times_s.items())
    return AttentionChoice(best, f"{best}; forward and backward of a block's attention: {measured}")


def representatives(stages: list[Stage]) -> Iterator[Stage]:
    """The first block of each structure."""
    first = {stage.structure: stage for stage in reversed(stages) if stage.is_block}
    return (stage for stage in stages if first.get(stage.structure) is stage)


class _Recorder(TorchFunctionMode):
    """Notes the arguments of every attention call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function."""
        if func is F.scaled_dot_product_attention:
            self.calls.append((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _calls(model: Model, stage: Stage) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    template = model.templates[stage.structure]
    template.bind(random_weights(stage, model.dtype, model.device), stage)
    hidden = random_normal(model.calls.hidden_shape, model.dtype, model.device)
    with torch.no_grad(), _Recorder() as recorder:
        template.run(hidden, model.arguments(stage))
    return recorder.calls


def _seconds(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> float:
    """Median of forward and backward of one call."""
    tensors = [value.detach().requires_grad_() for value in args[:3]]
    names = [name for name in ("query", "key", "value") if name in kwargs]
    named = {name: kwargs[name].detach().requires_grad_() for name in names}
    inputs = [*tensors, *named.values()]

    def run() -> None:
        output = F.scaled_dot_product_attention(*tensors, *args[3:], **(kwargs | named))
        torch.autograd.grad([output], inputs, [torch.ones_like(output)])

    return statistics.median(durations_of(run, device, None, TARGET_S))
