"""Weight gradients that are matrix products go straight to where they are summed instead of being returned.

The operator ``lazysched::mm_into`` writes a product into a target, or adds it to what is there; ``put_straight`` lets a
backward graph call it. Whether it writes or adds is an input of the graph, as is the target, and the target's dtype
matters to the operator alone: one graph serves the only, the first and every later micro-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from lazysched.runtime.blocks import add_gradients

FIRST, LATER = torch.tensor([True]), torch.tensor([False])
"""Input ``first`` of a graph; on the host, where reading it waits for nothing."""

_LIBRARY = torch.library.Library("lazysched", "DEF")
# Strides may be any: a transposed operand must not be copied first.
_LIBRARY.define(
    "mm_into(Tensor(a!) target, Tensor left, Tensor right, Tensor first) -> ()", tags=(torch.Tag.flexible_layout,)
)


def mm_into(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, first: torch.Tensor) -> None:
    """``target = left @ right`` or ``target += left @ right``.

    On a device that does not sum in place the product is made apart, rounded to the operands' dtype, and added.

    Args:
        target: [rows, columns], contiguous, of the operands' dtype or fp32.
        left: [rows, inner].
        right: [inner, columns].
        first: bool [1] on the host; whether ``target`` holds nothing yet.
    """
    fresh = bool(first)
    if fresh and target.dtype == left.dtype:
        torch.mm(left, right, out=target)
    elif not sums_in_place(target.device):
        product = torch.mm(left, right)
        target.copy_(product) if fresh else target.add_(product)
    elif target.dtype == left.dtype:
        target.addmm_(left, right)
    elif fresh:
        _write_wide(target, left, right)
    else:
        _add_wide(target, left, right)


_LIBRARY.impl("mm_into", mm_into, "CompositeExplicitAutograd")
torch.library.register_fake("lazysched::mm_into", lambda target, left, right, first: None, lib=_LIBRARY)


@cache
def sums_in_place(device: torch.device) -> bool:
    """Whether ``device`` adds products where they are summed, those of bf16 matrices in fp32 and unrounded.

    Tried out once on a GPU; one that cannot draws a warning. A CPU does not: there sums keep the bits that uncompiled
    blocks give.
    """
    if device.type != "cuda":
        return False
    if _sums_bf16_in_fp32(device):
        return True
    warnings.warn(
        "lazysched: this build of torch cannot add bf16 matrix products to fp32 sums, so every product is rounded to "
        "bf16 and added afterwards: with accumulation the backward is slower than planned. Use torch 2.8 or later.",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _sums_bf16_in_fp32(device: torch.device) -> bool:
    small = 2.0**-10  # beside 16 it is lost in bf16
    total = torch.full((16, 16), small, device=device)
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        _add_wide(total, ones, ones)
        added = bool((total == 16 + small).all())
        _write_wide(total, ones, ones)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, RuntimeError):  # there is no such product, or not for this device
        return False
    return added and bool((total == 16).all())


def _write_wide(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    torch.ops.aten.mm.dtype_out(left, right, target.dtype, out=target)


def _add_wide(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    # As a batch of one: some versions of addmm want the sum in the operands' dtype.
    total = target[None]
    torch.ops.aten.baddbmm.dtype_out(total, left[None], right[None], target.dtype, out=total)


def put_straight(backward: fx.GraphModule, num_params: int, skip: int = 1) -> tuple[int, ...]:
    """Let ``backward`` put what matrix products it can where its caller says.

    Its inputs are followed by a target for each parameter named in the result and by ``first``, and its outputs for
    these are None. Gradients that are no plain product, or are used again, stay outputs.

    Args:
        backward: returns ``skip`` others, the trained parameters' gradients, and more; changed in place.
        num_params: of the trained parameters.
        skip: outputs before their gradients.

    Returns:
        Which parameters' gradients go straight, ascending; without any nothing changes.
    """
    graph = backward.graph
    output = next(node for node in graph.nodes if node.op == "output")
    results: list[Any] = list(output.args[0])
    chains = {index: _chain_to_product(results, skip + index) for index in range(num_params)}
    straight = tuple(index for index, chain in chains.items() if chain)
    if not straight:
        return ()
    targets, first = _add_inputs(graph, [results[skip + index] for index in straight])
    for index, target in zip(straight, targets, strict=True):
        _write_product(graph, chains[index], target, first)
        results[skip + index] = None
    output.args = (tuple(results),)
    for index in straight:
        for node in chains[index]:
            graph.erase_node(node)
    graph.lint()
    backward.recompile()
    return straight


def run_straight(
    graph: Callable[[list[Any]], Sequence[Any]], inputs: list[Any], straight: tuple[int, ...],
    targets: Sequence[torch.Tensor], *, first: bool, skip: int = 1,
) -> Sequence[Any]:  # fmt: skip
    """Run a graph that :func:`put_straight` changed, and put what gradients it returns into their targets too.

    Args:
        graph: compiled.
        inputs: those that it had before; emptied.
        straight: what was returned for it.
        targets: one for each trained parameter.
        first: whether there is nothing in ``targets`` yet.
        skip: outputs before the gradients.

    Returns:
        These outputs.
    """
    if straight:
        inputs += [*(targets[index] for index in straight), FIRST if first else LATER]
    results = graph(inputs)
    rest = [(target, results[skip + i]) for i, target in enumerate(targets) if i not in straight]
    if rest:
        grads = [torch.zeros_like(target) if grad is None else grad for target, grad in rest]
        add_gradients([target for target, _ in rest], grads, first)
    return results[:skip]


def _chain_to_product(results: list[Any], index: int) -> list[fx.Node]:
    """From an output back to the product that makes it, over views that nothing else uses; empty if there is none."""
    chain: list[fx.Node] = []
    node = results[index]
    while isinstance(node, fx.Node) and len(node.users) == 1 and results.count(node) <= 1:
        chain.append(node)
        if node.target is torch.ops.aten.mm.default:
            return chain
        if not (_is_transpose(node) or _changes_nothing(node)):
            break
        node = node.args[0]
    return []


def _is_transpose(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]


def _changes_nothing(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.view.default:
        return False
    before: Any = node.args[0]
    return bool(before.meta["val"].shape == node.meta["val"].shape)


def _add_inputs(graph: fx.Graph, grads: list[fx.Node]) -> tuple[list[fx.Node], fx.Node]:
    """Inputs for the targets of ``grads`` and for ``first``, behind those that are there."""
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    targets = []
    for number, grad in enumerate(grads):
        value = grad.meta["val"]
        with graph.inserting_after(last):
            last = graph.placeholder(f"target_{number}")
        with value.fake_mode:
            last.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        targets.append(last)
    with graph.inserting_after(last):
        first = graph.placeholder("first")
    with grads[0].meta["val"].fake_mode:
        first.meta["val"] = torch.empty(FIRST.shape, dtype=FIRST.dtype)
    return targets, first


def _write_product(graph: fx.Graph, chain: list[fx.Node], target: fx.Node, first: fx.Node) -> None:
    """Before the product at the end of ``chain``, write it into ``target`` instead."""
    product = chain[-1]
    operands: Any = product.args
    with graph.inserting_before(product):
        if sum(_is_transpose(node) for node in chain) % 2:
            operands = [_transposed(graph, operand) for operand in reversed(operands)]
        call = graph.call_function(torch.ops.lazysched.mm_into.default, (target, *operands, first))
    call.meta["val"] = None


def _transposed(graph: fx.Graph, operand: fx.Node) -> fx.Node:
    node = graph.call_function(torch.ops.aten.permute.default, (operand, [1, 0]))
    node.meta["val"] = operand.meta["val"].t()
    return node
