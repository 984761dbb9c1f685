"""Stateless block templates: one module per block structure, bound to a stage's weights whenever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lazysched.runtime.flat import flat_views
from lazysched.runtime.saved import Graph, Kept, Packing, Saved
from lazysched.runtime.skeleton import replace_with_placeholders
from lazysched.schemas import Stage


class BlockTemplate:
    """A block module without weights of its own.

    Args:
        module: a block of the structure, its parameters without storage.
        element_bytes: of the computing dtype.
        constants: storage addresses of tensors that every call shares.
    """

    def __init__(self, module: nn.Module, element_bytes: int, constants: set[int], device: torch.device) -> None:
        self.module = module
        self.params = list(replace_with_placeholders(module, device).values())
        self._element_bytes = element_bytes
        self._constants = constants
        self._weights = torch.empty(0)

    def bind(self, weights: torch.Tensor, stage: Stage) -> None:
        """Use ``weights``, the stage's flat store [elements], until bound again."""
        views = flat_views(weights, stage, self._element_bytes).values()
        for param, view in zip(self.params, views, strict=True):
            param.data = view
        self._weights = weights

    def run(self, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Output of the block, [rows, tokens, hidden]."""
        output = self.module(hidden, **arguments)
        return output[0] if isinstance(output, tuple) else output

    def forward(self, hidden: torch.Tensor, arguments: dict[str, Any], keep: bool) -> tuple[torch.Tensor, Saved]:
        """Run the block and keep its input and, with ``keep``, what its backward needs.

        Args:
            hidden: [rows, tokens, hidden].
            arguments: what the model passes to this block.
            keep: whether to keep intermediates; otherwise the backward runs the block again.
        """
        if not keep:
            with torch.no_grad():
                return self.run(hidden, arguments), Saved(Kept(hidden), hidden.shape)
        leaf = hidden.detach().requires_grad_()
        kept = Kept(hidden)
        packing = Packing(kept, self._weights, hidden, self._constants)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(packing.pack, packing.unpack):
            output = self.run(leaf, arguments)
        graph = Graph(torch.autograd.graph.get_gradient_edge(output), leaf, packing)
        return output.detach(), Saved(kept, hidden.shape, graph)

    def backward(
        self, saved: Saved, arguments: dict[str, Any], output_grad: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Gradients of input and parameters; ``saved`` is used up.

        Args:
            saved: of this micro-batch's forward, all of it back on the device.
            arguments: as in the forward.
            output_grad: [rows, tokens, hidden].
        """
        if saved.graph is not None:
            saved.graph.packing.bind(self._weights)
            output, leaf = saved.graph.output, saved.graph.leaf
            saved.graph = None
        else:
            assert saved.kept.input is not None
            leaf = saved.kept.input.detach().requires_grad_()
            with torch.enable_grad():
                output = self.run(leaf, arguments)
        grads = torch.autograd.grad([output], [leaf, *self.params], [output_grad], materialize_grads=True)
        return grads[0], list(grads[1:])


def add_gradients(targets: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], first: bool) -> None:
    """Put ``grads`` into ``targets``, which may be fp32, or add them to what is there."""
    if first:
        torch._foreach_copy_(list(targets), list(grads))
    else:
        torch._foreach_add_(list(targets), list(grads))
