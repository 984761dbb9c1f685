"""The update of a stage behind one interface: fp32 AdamW (arXiv 1711.05101) by the fused kernel of torch.

The gradient comes in the computing dtype with one factor for the whole step, which the update applies; no pass over
gradients exists only for clipping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from lazysched.lower import GPU_UPDATE_CHUNK
from lazysched.runtime.flat import flat_views
from lazysched.schemas import Stage

CPU_UPDATE_CHUNK = 1 << 20
"""Elements updated at a time on the CPU: master, moments and gradient of a chunk stay in the outer caches."""


@dataclass(frozen=True)
class AdamWSettings:
    """Hyperparameters that stay the same for a run."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class StepScale:
    """What a step's gradients are multiplied by, and which step it is.

    Attributes:
        factor: fp32 scalar, min(1, max_norm / (norm + 1e-6)), or 1.
        skip: fp32 scalar, 1 where the gradient norm is not finite and nothing may change.
        step: fp32 scalar, number of updates including this one.
        learning_rate: of this step.
    """

    factor: torch.Tensor
    skip: torch.Tensor
    step: torch.Tensor
    learning_rate: float


class StageUpdate(Protocol):
    """Updates one stage in place; the formats of optimizer state implement it.

    Attributes:
        weights: name -> view of the stage's weights in the computing dtype.
        master: name -> view of the weights that are updated; loading writes them.
    """

    weights: dict[str, torch.Tensor]
    master: dict[str, torch.Tensor]

    def publish(self) -> None:
        """Make ``weights`` agree with ``master`` after loading."""

    def update(self, scale: StepScale) -> None:
        """Apply one step to weights and state."""


class AdamWFp32:
    """fp32 master weights and moments of one stage, on any device.

    Args:
        stage: names and shapes.
        weights: flat store, [elements] or longer, in the computing dtype; the master itself where that is fp32.
        grads: flat gradients, [elements] or longer, in the computing dtype.
        state: flat fp32 [3 * elements]: master, first and second moment; [2 * elements] without the master.
        settings: hyperparameters. Biases and one-dimensional tensors do not decay.
    """

    def __init__(
        self, stage: Stage, weights: torch.Tensor, grads: torch.Tensor, state: torch.Tensor, settings: AdamWSettings
    ) -> None:
        element_bytes = weights.element_size()
        elements = stage.weight_bytes // element_bytes
        segments = state.split(elements)
        self.has_master = weights.dtype != torch.float32
        master = segments[0] if self.has_master else weights[:elements]
        first, second = segments[-2:]
        named = [flat_views(flat, stage, element_bytes) for flat in (weights, grads, master, first, second)]
        self.weights, self.master = named[0], named[2]
        self._flat_weights, self._flat_master = weights, master
        self._settings = settings
        self._tensors = [
            (tuple(views[name].view(-1) for views in named), 0.0 if _undecayed(name, shape) else settings.weight_decay)
            for name, shape in stage.params.items()
        ]
        chunk = GPU_UPDATE_CHUNK if weights.is_cuda else CPU_UPDATE_CHUNK
        self._chunk = chunk
        largest = max((t[0][0].numel() for t in self._tensors), default=0)
        self._scratch_size = min(chunk, largest)

    def publish(self) -> None:
        """Round the master weights, as just loaded, to the weights."""
        if self.has_master:
            self._flat_weights[: self._flat_master.numel()].copy_(self._flat_master)

    def update(self, scale: StepScale) -> None:
        """Apply one step of AdamW; nothing changes where ``scale.skip`` is set."""
        on_cpu = not self._tensors[0][0][0].is_cuda
        if on_cpu and bool(scale.skip):
            return
        clips = not on_cpu or float(scale.factor) != 1.0  # a device's factor is not read: that would wait for it
        scratch = torch.empty(self._scratch_size, dtype=torch.float32, device=self._tensors[0][0][0].device)
        for flats, weight_decay in self._tensors:
            for weight, grad, master, first, second in zip(*(flat.split(self._chunk) for flat in flats), strict=True):
                exact = scratch[: grad.numel()].copy_(grad)
                if clips:
                    exact.mul_(scale.factor)
                self._adamw(master, exact, first, second, scale, weight_decay)
                if self.has_master:
                    weight.copy_(master)

    def _adamw(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        scale: StepScale,
        weight_decay: float,
    ) -> None:
        settings = self._settings
        torch._fused_adamw_(
            [master], [grad], [first], [second], [], [scale.step],
            lr=scale.learning_rate, beta1=settings.beta1, beta2=settings.beta2, weight_decay=weight_decay,
            eps=settings.epsilon, amsgrad=False, maximize=False, grad_scale=None,
            found_inf=scale.skip if master.is_cuda else None,
        )  # fmt: skip


def _undecayed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a bias or one-dimensional, as norms are; transformers' Trainer does not decay those."""
    return len(shape) < 2 or name.endswith("bias")
