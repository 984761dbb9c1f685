"""The loss of one chunk of tokens and its gradient as one compiled graph: logits are made once and never kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lazysched.runtime.ends import IGNORED_LABEL
from lazysched.runtime.graphs import compile_joint
from lazysched.runtime.straight import run_straight, sums_in_place


class CompiledLoss:
    """Loss and gradient of a chunk; scaling and soft caps of the logits are the model's own.

    Args:
        model: the causal language model, its body replaced by a stub that hands its input on.
        names: of the output embedding's parameters in ``model``.
        shapes: of these parameters.
        trained: which of them are; the others have no gradient.
        hidden_shape: of the chunk, [tokens, hidden].
        dtype: of hidden states and parameters.
        device: where it will run.
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], shapes: Sequence[tuple[int, ...]], trained: Sequence[bool],
        hidden_shape: tuple[int, int], dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        def loss(normed: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor]:
            *params, targets = rest
            keywords = {"inputs_embeds": normed[None], "use_cache": False}
            named = dict(zip(names, params, strict=True))
            logits: torch.Tensor = torch.func.functional_call(model, named, (), keywords).logits[0].float()
            return (F.cross_entropy(logits, targets, ignore_index=IGNORED_LABEL, reduction="sum"),)

        with FakeTensorMode():
            wanted = zip((hidden_shape, *shapes), (True, *trained), strict=True)
            floats = [torch.empty(shape, dtype=dtype, device=device, requires_grad=grad) for shape, grad in wanted]
            targets = torch.empty(hidden_shape[0], dtype=torch.int64, device=device)
        sums_in_place(device)  # tried out now, not within a step
        self._run, self._straight = compile_joint(loss, [*floats, targets], trained)

    def run(
        self, normed: torch.Tensor, params: Sequence[torch.Tensor], targets: torch.Tensor, scale: float,
        sums: Sequence[torch.Tensor], *, first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Loss times ``scale`` and its gradient with respect to ``normed`` [tokens, hidden].

        That with respect to those of ``params`` that are trained goes to ``sums``, which hold nothing yet if it is the
        ``first``.
        """
        upstream = torch.full((), scale, device=normed.device)
        inputs: list[Any] = [normed, *(param.detach() for param in params), targets, upstream]
        loss, grad = run_straight(self._run, inputs, self._straight, sums, first=first, skip=2)
        return loss * upstream, grad
