"""The norm of every gradient, taken when the gradient was accumulated: no later pass exists only for clipping."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary


class GradNorms:
    """Norms of the gradients of parameters that are watched.

    Hooks on the parameters lead to small records and never back to here: autograd holds hooks where the garbage
    collector does not see them. They go when this object goes.
    """

    def __init__(self) -> None:
        self._records = WeakIdKeyDictionary()

    def watch(self, param: Tensor) -> None:
        """Take the norms of ``param``'s gradients from now on, if it is one that autograd accumulates gradients in."""
        if param in self._records or not param.requires_grad or not param.is_leaf:
            return
        record = self._records[param] = _NormRecord()
        handle = param.register_post_accumulate_grad_hook(record.after_accumulation)
        weakref.finalize(self, handle.remove)

    def total(self, params: list[Tensor]) -> Tensor:
        """The norm of the norms of ``params``' gradients, in order: fp32 scalar on the device of the first.

        The combination is that of ``torch.nn.utils.clip_grad_norm_`` for fp32 gradients. Call it once a step.
        """
        norms = [self._norm(param) for param in params]
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))

    def forget(self) -> None:
        """Take all norms anew: gradients were changed in a way that leaves no trace."""
        for record in self._records.values():
            record.forget()

    def _norm(self, param: Tensor) -> Tensor:
        record = self._records.get(param)
        if record is None:  # unfrozen since, or another tensor in a group
            self.watch(param)
        assert param.grad is not None
        return _norm_of(param.grad) if record is None else record.at_step(param.grad)


class _NormRecord:
    """The last norm of one parameter's gradient, and of which tensor in which state it is the norm."""

    def __init__(self) -> None:
        self._grad: TensorWeakRef | None = None  # strong, it would keep the gradient's memory after zero_grad
        self._state = (0, 0)
        self._norm: Tensor | None = None
        self._count, self._expected = 0, 1

    def after_accumulation(self, param: Tensor) -> None:
        """The hook. With accumulation only the gradient of a step's last backward counts: as many as last time."""
        self._count += 1
        if self._count >= self._expected and param.grad is not None and _is_final(param.grad):
            self._take(param.grad)

    def at_step(self, grad: Tensor) -> Tensor:
        """The norm of ``grad``, taken anew where the gradient was set or changed after its accumulation."""
        self._expected, self._count = max(self._count, 1), 0
        is_same = self._grad is not None and self._grad() is grad and self._state == _state_of(grad)
        return self._norm if is_same and self._norm is not None else self._take(grad)

    def forget(self) -> None:
        """Drop the norm."""
        self._norm = None

    def _take(self, grad: Tensor) -> Tensor:
        self._grad, self._state, self._norm = TensorWeakRef(grad), _state_of(grad), _norm_of(grad)
        return self._norm


def _state_of(grad: Tensor) -> tuple[int, int]:
    return grad.data_ptr(), grad._version


def _is_final(grad: Tensor) -> bool:
    """Whether nothing that leaves no trace will change the gradient: data parallel reduces it in place, later."""
    return grad.layout == torch.strided and not (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    )


def _norm_of(grad: Tensor) -> Tensor:
    return torch.linalg.vector_norm(grad.detach(), dtype=torch.float32)
