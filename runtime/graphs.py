"""Compiled graphs of blocks and of the loss: traced once, split at a memory budget, compiled by Inductor.

A block is traced to one joint graph of forward and backward. The partitioner of torch (``activation_memory_budget``;
https://pytorch.org/blog/activation-checkpointing-techniques) chooses what the forward keeps for the backward, and each
half is compiled on its own. Both are then plain functions on lists of tensors: neither Dynamo nor autograd runs in a
step, nothing can recompile, and what is kept is a list that the executor may place where the plan says.

Attention is bound while tracing, so that trace within the backend that is wanted (``lazysched.runtime.attention``).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_flatten, tree_unflatten

from lazysched.runtime.attention_cost import grouped_queries_counted
from lazysched.runtime.straight import put_straight, sums_in_place

_WRITTEN = "written"
"""Input of a graph into which it writes its first output."""
Runnable = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph: takes its inputs as a list, which it empties, and returns its outputs."""


@dataclass(frozen=True)
class SplitGraph:
    """Forward and backward of one block, compiled.

    Attributes:
        forward: [block input, parameters, tensors among the arguments, where the output goes] -> [what is kept].
        backward: [what is kept, output gradient, where the input's gradient goes, a target for each of ``straight``,
            ``first`` if there are any] -> [parameter gradients, None for each argument].
        straight: trained parameters, by number among these, whose gradients the backward puts into targets and
            returns as None (``lazysched.runtime.straight``).
    """

    forward: Runnable
    backward: Runnable
    straight: tuple[int, ...]


class JointGraph:
    """Forward and backward of one block as one graph, not yet split.

    Gradients are those of the input and of the module's parameters that require them.

    Args:
        module: the block; its parameters may be without storage.
        param_shapes: of ``module.parameters()``, in that order.
        hidden_shape: of the block's input, [rows, tokens, hidden].
        arguments: what the block is called with beside it; tensors in there become inputs of the graph.
        dtype: of input and parameters.
        device: where the graph will run; tracing takes no memory there.
    """

    def __init__(
        self,
        module: nn.Module,
        param_shapes: Sequence[tuple[int, ...]],
        hidden_shape: Sequence[int],
        arguments: dict[str, Any],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        names = [name for name, _ in module.named_parameters()]
        trained = [param.requires_grad for param in module.parameters()]
        buffers = dict(module.named_buffers())
        leaves, spec = tree_flatten((buffers, arguments))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def run(hidden: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor]:
            named = dict(zip(names, rest, strict=False))
            left = iter(rest[len(names) :])
            filled = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            own_buffers, keywords = tree_unflatten(filled, spec)
            output = torch.func.functional_call(module, {**named, **own_buffers}, (hidden,), keywords)
            return (output[0] if isinstance(output, tuple) else output,)

        with FakeTensorMode() as mode:
            shapes = [tuple(hidden_shape), *param_shapes]
            wanted = [
                torch.empty(shape, dtype=dtype, device=device, requires_grad=grad)
                for shape, grad in zip(shapes, (True, *trained), strict=True)
            ]
        inputs = (*wanted, *(mode.from_tensor(tensor) for tensor in tensors))
        self._joint = _joint_graph(run, inputs)
        _drop_frozen(self._joint, trained)
        self._num_inputs, self._num_trained, self._device = len(inputs), sum(trained), device

    def split(self, budget: float) -> tuple[fx.GraphModule, fx.GraphModule, tuple[int, ...]]:
        """Forward and backward when about ``budget`` of the bytes that could be kept are kept; 0 keeps the input.

        Also which trained parameters' gradients the backward puts straight into targets.
        """
        with functorch_config.patch(activation_memory_budget=budget), grouped_queries_counted():
            forward, backward = min_cut_rematerialization_partition(
                _copied(self._joint), None, num_fwd_outputs=1,
                static_lifetime_input_indices=list(range(1, self._num_inputs)),
            )  # fmt: skip
        for graph in (forward, backward):
            _write_first_output(graph)
        return forward, backward, put_straight(backward, self._num_trained, skip=0)

    def kept(self, budget: float) -> list[torch.Tensor]:
        """What the forward keeps beside its inputs when split at ``budget``: one fake tensor for each storage."""
        forward, _, _ = self.split(budget)
        outputs = _outputs(forward)
        given = {_storage(tensor) for tensor in _example_inputs(forward)}
        kept = {_storage(node.meta["val"]): node.meta["val"] for node in outputs}
        return [tensor for storage, tensor in kept.items() if storage not in given]

    def returned(self, budget: float) -> list[torch.Tensor]:
        """Parameter gradients that the backward returns, not put straight into targets: fake tensors."""
        _, backward, _ = self.split(budget)
        grads = _outputs(backward)[: self._num_trained]
        return [node.meta["val"] for node in grads if node is not None]

    def compile(self, budget: float, *, input_grad: bool = True) -> SplitGraph:
        """Split at ``budget`` and compile both halves; without ``input_grad`` the backward leaves that out.

        What the forward keeps is the same.
        """
        forward, backward, straight = self.split(budget)
        if not input_grad:
            backward = without_written(backward)
        sums_in_place(self._device)  # tried out now, not within a step
        compiled, strides = compile_graph(forward)
        _set_strides(backward, strides)
        return SplitGraph(compiled, compile_graph(backward, is_backward=True)[0], straight)


def compile_joint(
    function: Callable[..., tuple[torch.Tensor]], inputs: Sequence[torch.Tensor], trained: Sequence[bool]
) -> tuple[Runnable, tuple[int, ...]]:
    """``function`` and the gradient of its one output in a single graph.

    Args:
        function: of ``inputs``, returning one tensor in a tuple.
        inputs: fake tensors, the parameters from the second on; those that require a gradient get one.
        trained: which parameters are; only those have gradients.

    Returns:
        [inputs, gradient of the output, a target for each parameter that goes straight, ``first`` if there are any] ->
        [output, gradients of the first input, of each trained parameter, and None for the rest]; and which of the
        trained parameters go straight.
    """
    joint = _joint_graph(function, tuple(inputs))
    joint.graph.set_codegen(CodeGen())  # traced, it takes and returns nested tuples
    joint.recompile()
    _drop_frozen(joint, trained)
    straight = put_straight(joint, sum(trained), skip=2)
    return compile_graph(joint)[0], straight


def compile_graph(graph: fx.GraphModule, *, is_backward: bool = False) -> tuple[Runnable, list[Any]]:
    """Compile with Inductor, which keeps its code on disk; also returns the strides of the outputs, None as traced."""
    inputs = _example_inputs(graph)
    context = TracingContext(detect_fake_mode(inputs))
    with tracing(context), context.report_output_strides() as strides:  # type: ignore[attr-defined]
        compiled = compile_fx_inner(graph, inputs, is_backward=is_backward, is_inference=False)
    return compiled, list(strides or [])


def interpret_graph(graph: fx.GraphModule, *, is_backward: bool = False) -> tuple[Runnable, list[Any]]:
    """Stands in for :func:`compile_graph` in tests: the same operations, one after the other, uncompiled.

    However the graph was split, it gives the same bits, because recomputing repeats the very operations.
    """

    def run(inputs: list[Any]) -> Sequence[Any]:
        given = list(inputs)
        inputs.clear()
        with torch.no_grad():
            return graph(*given)  # type: ignore[no-any-return]

    return run, [None] * len(_outputs(graph))


def _joint_graph(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    exported: Any = aot_export_joint_simple(function, inputs, trace_joint=True, decompositions=select_decomp_table())
    graph = exported[0] if isinstance(exported, tuple) else exported
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:  # a check that has passed; no value
            graph.graph.erase_node(node)
    mode = detect_fake_mode(_example_inputs(graph))
    with V.set_fake_mode(mode), tracing(TracingContext(mode)):
        joint_graph_passes(graph)
    return graph  # type: ignore[no-any-return]


def _example_inputs(graph: fx.GraphModule) -> list[torch.Tensor]:
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


def _outputs(graph: fx.GraphModule) -> Sequence[Any]:
    nodes: Any = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    return nodes  # type: ignore[no-any-return]


def _drop_frozen(joint: fx.GraphModule, trained: Sequence[bool]) -> None:
    """Of the outputs [output, gradients of the input and of each parameter, ...], leave those of frozen ones out."""
    if all(trained):
        return
    node = joint.graph.output_node()
    output, grad, *rest = _outputs(joint)
    params, others = rest[: len(trained)], rest[len(trained) :]
    kept = [param for param, is_trained in zip(params, trained, strict=True) if is_trained]
    node.args = ((output, grad, *kept, *others),)
    joint.recompile()


def _write_first_output(graph: fx.GraphModule) -> None:
    """Write the first output to one more input, the last, instead of returning it; Inductor fuses such a copy."""
    nodes = graph.graph
    output = nodes.output_node()
    result, *rest = _outputs(graph)
    mode = detect_fake_mode(_example_inputs(graph)) or nullcontext()
    with nodes.inserting_after([node for node in nodes.nodes if node.op == "placeholder"][-1]):
        target = nodes.placeholder(_WRITTEN)
    with mode:
        target.meta["val"] = torch.empty_like(result.meta["val"], memory_format=torch.contiguous_format)
    with nodes.inserting_before(output):
        copied = nodes.call_function(torch.ops.aten.copy_.default, (target, result))
    copied.meta["val"] = target.meta["val"]
    output.args = (tuple(rest),)
    graph.recompile()


def without_written(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of ``graph`` that does not write its first output, nor computes what only that needs; its inputs stay."""
    left = _copied(graph)
    target = next(node for node in left.graph.nodes if node.op == "placeholder" and node.target == _WRITTEN)
    (written,) = target.users
    left.graph.erase_node(written)
    left.graph.eliminate_dead_code()  # operators that write into their arguments stay
    left.recompile()
    return left


def _copied(graph: fx.GraphModule) -> fx.GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of how torch 2.11 copies its own tree specifications
        return copy.deepcopy(graph)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _set_strides(backward: fx.GraphModule, strides: Sequence[Any]) -> None:
    """Tell the backward half how the compiled forward lays out what it keeps, which may differ from the trace."""
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    for node, stride in zip(placeholders, strides, strict=False):
        value = node.meta["val"]
        if stride is not None and isinstance(value, torch.Tensor) and value.stride() != tuple(stride):
            with detect_fake_mode([value]) or nullcontext():
                node.meta["val"] = value.as_strided(value.size(), tuple(int(size) for size in stride))
