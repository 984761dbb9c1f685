"""Stateless block templates: one module per block structure, bound to a stage's weights whenever it runs.

A template runs in one of several forms, one for each save variant of a plan: uncompiled here, compiled in
``lazysched.runtime.compiled``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lazysched.runtime.attention import attention, in_one_order
from lazysched.runtime.flat import flat_views
from lazysched.runtime.saved import Graph, Kept, Packing, Saved
from lazysched.runtime.skeleton import freeze, replace_with_placeholders
from lazysched.schemas import AttentionBackend, Stage


class BlockTemplate:
    """A block module without weights of its own.

    Args:
        module: a block of the structure, its parameters without storage.
        stage: a block of the structure, which says what is trained.
        element_bytes: of the computing dtype.
        constants: storage addresses of tensors that every call shares.

    Attributes:
        params: the module's parameters, in the order of the flat store; those that are trained require gradients.
        buffers: name -> the module's buffers.
        weights: the flat store that is bound.
        views: the parameters in it.
        attention: the kernel of torch's attention that uncompiled code runs.
        full_determinism: whether backwards run ``in_one_order``.
    """

    def __init__(
        self, module: nn.Module, stage: Stage, element_bytes: int, constants: set[int], device: torch.device
    ) -> None:
        self.module = module
        self.params = replace_with_placeholders(module, device)
        freeze(self.params, stage)
        self.buffers = dict(module.named_buffers())
        self.constants = constants | {buffer.untyped_storage().data_ptr() for buffer in self.buffers.values()}
        self.weights = torch.empty(0)
        self.views: list[torch.Tensor] = []
        self.attention: AttentionBackend = "default"
        self.full_determinism = False
        self._element_bytes = element_bytes

    def bind(self, weights: torch.Tensor, stage: Stage) -> None:
        """Use ``weights``, the stage's flat store [elements], until bound again."""
        self.views = list(flat_views(weights, stage, self._element_bytes).values())
        for param, view in zip(self.params, self.views, strict=True):
            param.data = view
        self.weights = weights

    def run(self, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Output of the block, [rows, tokens, hidden]."""
        with attention(self.attention, full_determinism=self.full_determinism):
            output = self.module(hidden, **arguments)
        return output[0] if isinstance(output, tuple) else output


class BlockForm(Protocol):
    """A block in one save variant; its template is bound to the stage's weights whenever it runs."""

    def forward(self, hidden: torch.Tensor, arguments: dict[str, Any], output: torch.Tensor) -> Saved:
        """Run the block; its input, which must not change, and what else its backward needs are kept.

        Args:
            hidden: [rows, tokens, hidden].
            arguments: what the model passes to this block.
            output: where its output goes, [rows, tokens, hidden].
        """
        ...

    def evaluate(self, hidden: torch.Tensor, arguments: dict[str, Any], output: torch.Tensor) -> None:
        """Run the block, keep nothing."""
        ...

    def backward(
        self, saved: Saved, arguments: dict[str, Any], output_grad: torch.Tensor, input_grad: torch.Tensor,
        targets: Sequence[torch.Tensor], *, first: bool,
    ) -> None:  # fmt: skip
        """Gradients of input and trained parameters; ``saved`` is used up.

        Args:
            saved: of this micro-batch's forward, all of it back on the device.
            arguments: as in the forward.
            output_grad: [rows, tokens, hidden].
            input_grad: where the input's gradient goes, [rows, tokens, hidden]; not the memory of ``output_grad``. A
                form made without one leaves it as it is.
            targets: where gradients are summed, for each trained parameter one of its shape, of the computing dtype or
                fp32.
            first: whether there is nothing in ``targets`` yet, whatever they hold.
        """
        ...


class EagerForm:
    """Runs the template's own code; with ``keep`` autograd keeps all it wants, otherwise the backward runs it again.

    Without ``input_grad`` its backward leaves out what only the input's gradient needs; what is kept is the same.
    """

    def __init__(self, template: BlockTemplate, keep: bool, *, input_grad: bool = True) -> None:
        self._template, self._keep, self._input_grad = template, keep, input_grad

    def forward(self, hidden: torch.Tensor, arguments: dict[str, Any], output: torch.Tensor) -> Saved:
        """Run the block under autograd, or without it where the backward will run it again."""
        template = self._template
        if not self._keep:
            self.evaluate(hidden, arguments, output)
            return Saved(Kept(hidden), hidden.shape)
        leaf = hidden.detach().requires_grad_()
        kept = Kept(hidden)
        packing = Packing(kept, template.weights, hidden, template.constants)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(packing.pack, packing.unpack):
            result = template.run(leaf, arguments)
        graph = Graph(torch.autograd.graph.get_gradient_edge(result), leaf, packing)
        output.copy_(result.detach())
        return Saved(kept, hidden.shape, graph)

    def evaluate(self, hidden: torch.Tensor, arguments: dict[str, Any], output: torch.Tensor) -> None:
        """Run the block, keep nothing."""
        with torch.no_grad():
            output.copy_(self._template.run(hidden, arguments))

    def backward(
        self, saved: Saved, arguments: dict[str, Any], output_grad: torch.Tensor, input_grad: torch.Tensor,
        targets: Sequence[torch.Tensor], *, first: bool,
    ) -> None:  # fmt: skip
        """Gradients of input and trained parameters, through the kept graph or one made now."""
        if isinstance(saved.graph, Graph):
            saved.graph.packing.bind(self._template.weights)
            output, leaf = saved.graph.output, saved.graph.leaf
            saved.graph = None
        else:
            assert saved.kept.input is not None
            leaf = saved.kept.input.detach().requires_grad_()
            with torch.enable_grad():
                output = self._template.run(leaf, arguments)
        trained = [param for param in self._template.params if param.requires_grad]
        wanted = [*trained, leaf] if self._input_grad else trained
        with in_one_order(self._template.full_determinism):
            grads = torch.autograd.grad([output], wanted, [output_grad], materialize_grads=True)
        if self._input_grad:
            input_grad.copy_(grads[-1])
        add_gradients(targets, grads[: len(trained)], first)


def add_gradients(targets: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], first: bool) -> None:
    """Put ``grads`` into ``targets``, which may be fp32, or add them to what is there; there may be none."""
    if not targets:
        return
    if first:
        torch._foreach_copy_(list(targets), list(grads))
    else:
        torch._foreach_add_(list(targets), list(grads))
