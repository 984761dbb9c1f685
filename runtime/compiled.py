"""Blocks as compiled graphs: what each save variant keeps was decided when its graph was split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from lazysched.runtime.attention import in_one_order
from lazysched.runtime.blocks import BlockTemplate
from lazysched.runtime.saved import CompiledGraph, Kept, Packing, Saved
from lazysched.runtime.straight import run_straight

if TYPE_CHECKING:
    from lazysched.runtime.graphs import SplitGraph


class CompiledForm:
    """Runs a split graph on the weights that its template is bound to; neither autograd nor Dynamo is involved."""

    def __init__(self, template: BlockTemplate, graph: SplitGraph) -> None:
        self._template, self._graph = template, graph

    def forward(self, hidden: torch.Tensor, arguments: dict[str, Any], output: torch.Tensor) -> Saved:
        """Run the forward half and pack what it keeps."""
        template = self._template
        tensors = self._run_forward(hidden, arguments, output)
        kept = Kept(hidden)
        packing = Packing(kept, template.weights, hidden, template.constants)
        graph = CompiledGraph([packing.pack(tensor) for tensor in tensors], packing)
        return Saved(kept, hidden.shape, graph)

    def evaluate(self, hidden: torch.Tensor, arguments: dict[str, Any], output: torch.Tensor) -> None:
        """Run the forward half; what it would keep is dropped at once."""
        self._run_forward(hidden, arguments, output)

    def backward(
        self, saved: Saved, arguments: dict[str, Any], output_grad: torch.Tensor, input_grad: torch.Tensor,
        targets: Sequence[torch.Tensor], *, first: bool,
    ) -> None:  # fmt: skip
        """Run the backward half on what was kept and the weights as they lie now."""
        assert isinstance(saved.graph, CompiledGraph)
        packed, packing = saved.graph.packed, saved.graph.packing
        packing.bind(self._template.weights)
        inputs = [packing.unpack(handle) for handle in packed]
        # The graph lets go of each input after its last use, if nobody else holds it.
        saved.graph = None
        saved.kept.storages.clear()
        saved.kept.input = None
        inputs += [output_grad, input_grad]
        with in_one_order(self._template.full_determinism):
            run_straight(self._graph.backward, inputs, self._graph.straight, targets, first=first, skip=0)

    def _run_forward(self, hidden: torch.Tensor, arguments: dict[str, Any], output: torch.Tensor) -> Any:
        template = self._template
        leaves = tree_leaves((template.buffers, arguments))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return self._graph.forward([hidden, *template.views, *tensors, output])
