"""The update of a stage behind one interface, for each format of optimizer state.

``fp32``: AdamW (arXiv 1711.05101) by the fused kernel of torch, the exact reference. ``hybrid8``: 8-bit moments as
:mod:`lazysched.runtime.hybrid8` specifies. The gradient comes in the computing dtype with one factor for the whole
step, which the update applies; no pass over gradients exists only for clipping.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from lazysched.layout import GPU_UPDATE_CHUNK
from lazysched.optimizer_state import TensorState, hybrid8_layout
from lazysched.runtime import hybrid8, hybrid8_torch
from lazysched.runtime.flat import flat_views
from lazysched.runtime.hybrid8 import BlockState, Coefficients, Fp32State
from lazysched.runtime.hybrid8_backends import prepare
from lazysched.schemas import Stage
from lazysched.trainable import trained_part

CPU_UPDATE_CHUNK = 1 << 20
"""Elements updated at a time on the CPU: master, moments and gradient of a chunk stay in the outer caches."""
SPLIT_ELEMENTS = 1 << 16
"""Masters split at a time while loading: a hundred bytes each for integers of 64 bits, beside the tensor itself."""
SPLIT_THREADS = 4
"""That split while loading; each has such a chunk."""

_SKIP, STEP_COEFFICIENT = (Coefficients._fields.index(name) for name in ("skip", "step"))
_PARTS = ("master", "correction", "first", "second", "first_scale", "second_scale")

Fill = Callable[[torch.Tensor], object]
"""Writes one tensor's values into a tensor of its shape, any float dtype."""


@dataclass(frozen=True)
class AdamWSettings:
    """Hyperparameters that stay the same for a run; ``seed`` is that of the random bits of format ``hybrid8``."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    seed: int = 0

    def coefficients(
        self, factor: torch.Tensor, skip: torch.Tensor, step: torch.Tensor, learning_rate: float
    ) -> torch.Tensor:
        """What updates of format ``hybrid8`` read in one step, fp32 [14], on the device of the arguments."""
        return hybrid8.coefficients(
            factor, skip, step, learning_rate=learning_rate, beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon,
            weight_decay=self.weight_decay,
        )  # fmt: skip


@dataclass(frozen=True)
class StepScale:
    """What a step's gradients are multiplied by, and which step it is.

    Attributes:
        factor: fp32 scalar, min(1, max_norm / (norm + 1e-6)), or 1.
        coefficients: fp32 [14], the same and the hyperparameters as format ``hybrid8`` reads them.
        learning_rate: of this step.
    """

    factor: torch.Tensor
    coefficients: torch.Tensor
    learning_rate: float

    @property
    def skip(self) -> torch.Tensor:
        """fp32 scalar, 1 where the gradient norm is not finite and nothing may change."""
        return self.coefficients[_SKIP]

    @property
    def step(self) -> torch.Tensor:
        """fp32 scalar, number of updates including this one."""
        return self.coefficients[STEP_COEFFICIENT]


class StageUpdate(Protocol):
    """Updates one stage in place; the formats of optimizer state implement it. Moments start as the zeros they find.

    Gradients and state are those of what is trained, laid out as ``lazysched.trainable.trained_part``.

    Attributes:
        weights: name -> view of the stage's weights in the computing dtype.
        parts: ``name.part`` -> flat view of the optimizer state; with the weights it is all that a run goes on from.
    """

    weights: dict[str, torch.Tensor]
    parts: dict[str, torch.Tensor]

    def load(self, name: str, fill: Fill, stored: torch.dtype) -> None:
        """Take one tensor's value, with all the bits that the master has; needs memory for that tensor at most.

        Args:
            name: of the weight.
            fill: writes its value.
            stored: dtype of that value: what the weight can hold takes no detour.
        """

    def update(self, scale: StepScale) -> None:
        """Apply one step to weights and state; nothing changes where ``scale.skip`` is set."""


class AdamWFp32:
    """fp32 master weights and moments of one stage, on any device.

    Args:
        stage: names and shapes.
        weights: flat store, [elements] or longer, in the computing dtype; the master itself where that is fp32.
        grads: flat gradients of the trained parameters, [elements] or longer, in the computing dtype.
        state: flat fp32 [3 * elements] of these: master, first and second moment; [2 * elements] without the master.
        settings: hyperparameters. Biases and one-dimensional tensors do not decay.
    """

    def __init__(
        self, stage: Stage, weights: torch.Tensor, grads: torch.Tensor, state: torch.Tensor, settings: AdamWSettings
    ) -> None:
        element_bytes = weights.element_size()
        trained = trained_part(stage, element_bytes)
        self.weights = flat_views(weights, stage, element_bytes)
        self.has_master = weights.dtype != torch.float32
        parts = state.view(3 if self.has_master else 2, trained.weight_bytes // element_bytes)
        *masters, first, second = (flat_views(part, trained, element_bytes) for part in parts)
        self.master = masters[0] if masters else {name: self.weights[name] for name in trained.params}
        stored = {"first": first, "second": second} | ({"master": self.master} if self.has_master else {})
        self.parts = {
            f"{name}.{part}": views[name].view(-1) for part, views in stored.items() for name in trained.params
        }
        self._settings = settings
        named = [self.weights, flat_views(grads, trained, element_bytes), self.master, first, second]
        self._tensors = [
            (tuple(views[name].view(-1) for views in named), 0.0 if _undecayed(name, shape) else settings.weight_decay)
            for name, shape in trained.params.items()
        ]
        chunk = GPU_UPDATE_CHUNK if weights.is_cuda else CPU_UPDATE_CHUNK
        self._chunk = chunk
        largest = max((t[0][0].numel() for t in self._tensors), default=0)
        self._scratch_size = min(chunk, largest)

    def load(self, name: str, fill: Fill, stored: torch.dtype) -> None:
        """Fill the master and round it to the weight; a frozen one has none."""
        if name not in self.master:
            fill(self.weights[name])
            return
        fill(self.master[name])
        if self.has_master:
            self.weights[name].copy_(self.master[name])

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


class Hybrid8Update:
    """8-bit moments of one stage's matrices and fp32 ones of its small tensors, on any device.

    Args:
        stage: names and shapes.
        weights: flat store, [elements] or longer, bf16 or fp32; fp32 is the master itself.
        grads: flat gradients of the trained parameters, [elements] or longer, in the dtype of the weights.
        state: flat uint8, as ``lazysched.optimizer_state.hybrid8_layout`` lays it out; zeros, but for loaded masters.
        settings: hyperparameters. Biases and one-dimensional tensors do not decay.
        fp32_elements: tensors with at most so many elements keep fp32 state.
        threads: that update on a CPU; their number changes no bit.
    """

    def __init__(
        self, stage: Stage, weights: torch.Tensor, grads: torch.Tensor, state: torch.Tensor, settings: AdamWSettings,
        fp32_elements: int, threads: int,
    ) -> None:  # fmt: skip
        element_bytes = weights.element_size()
        self.weights = flat_views(weights, stage, element_bytes)
        named_grads = flat_views(grads, trained_part(stage, element_bytes), element_bytes)
        self._states = {
            tensor.name: _carve(tensor, self.weights[tensor.name], named_grads[tensor.name], state, settings)
            for tensor in hybrid8_layout(stage, element_bytes, fp32_elements)[0]
        }
        self.parts = {
            f"{name}.{part}": tensor
            for name, state in self._states.items()
            for part in _PARTS
            if (tensor := getattr(state, part, None)) is not None
        }
        self._prepared = prepare(list(self._states.values()), threads=threads)

    def load(self, name: str, fill: Fill, stored: torch.dtype) -> None:
        """Fill the master: the fp32 weight itself, the fp32 master, or 24 bits; of a frozen one the weight."""
        state, weight = self._states.get(name), self.weights[name]
        if isinstance(state, BlockState) and state.correction is not None:
            if stored == weight.dtype:
                fill(weight)
                state.correction.zero_()
                return
            exact = torch.empty(weight.shape, dtype=torch.float32)  # on the host: a GPU's memory is planned
            fill(exact)
            _store_nearest(exact.view(-1), state.weight, state.correction)
        elif isinstance(state, Fp32State) and state.master is not None:
            fill(state.master.view(weight.shape))
            state.weight.copy_(state.master)
        else:
            fill(weight)

    def update(self, scale: StepScale) -> None:
        """Apply one step of AdamW; nothing changes where ``scale.skip`` is set."""
        self._prepared.update(scale.coefficients)


def _carve(
    tensor: TensorState, weight: torch.Tensor, grad: torch.Tensor, state: torch.Tensor, settings: AdamWSettings
) -> BlockState | Fp32State:
    """The parts of one tensor's state as flat views of ``state``, uint8."""

    def part(name: str, dtype: torch.dtype) -> torch.Tensor:
        offset, num_bytes = tensor.parts[name]
        return state[offset : offset + num_bytes].view(dtype)

    decays = not _undecayed(tensor.name, tensor.shape)
    weight, grad = weight.view(-1), grad.view(-1)
    if not tensor.is_8bit:
        master = part("master", torch.float32) if "master" in tensor.parts else None
        return Fp32State(weight, grad, master, part("first", torch.float32), part("second", torch.float32), decays)
    return BlockState(
        weight, grad, part("correction", torch.int8) if "correction" in tensor.parts else None,
        part("first", torch.int8), part("second", torch.uint8), part("first_scale", torch.float32),
        part("second_scale", torch.float32), hybrid8.stream_of(settings.seed, tensor.name), decays,
    )  # fmt: skip


def _store_nearest(exact: torch.Tensor, weight: torch.Tensor, correction: torch.Tensor) -> None:
    """Split fp32 masters, rounded to nearest, into weights and corrections; flat, chunk by chunk.

    On the host a chunk is one thread's work. Left to OpenMP, each operation on it opens a parallel region, and where
    other programs keep the cores busy a region waits for their time slices: 12 s instead of 0.7 s for 28 M elements.
    """
    parts = list(zip(*(tensor.split(SPLIT_ELEMENTS) for tensor in (exact, weight, correction)), strict=True))
    if weight.is_cuda:
        for part in parts:
            _store_chunk(*part)
        return
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(min(threads, SPLIT_THREADS), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(_store_chunk, *zip(*parts, strict=True)))
    torch.set_num_threads(threads)  # a worker's number is that of threads to come, too


def _store_chunk(exact: torch.Tensor, weight: torch.Tensor, correction: torch.Tensor) -> None:
    hybrid8_torch.store_master(exact.to(weight.device), 128, weight, correction)


def _undecayed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a bias or one-dimensional, as norms are; transformers' Trainer does not decay those."""
    return len(shape) < 2 or name.endswith("bias")
