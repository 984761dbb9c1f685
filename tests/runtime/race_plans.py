"""Which edges between engines a program needs, what kinds of them there are, and plans that have them all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import networkx as nx

from lazysched.runtime.model import Model
from lazysched.schemas import Dtype, Op, Plan, Program, SaveVariant, StagePlan, Tier, Update

Case = tuple[Plan, bool, float | None]
"""A plan, whether the model is tied, and the norm to clip to."""
Edge = tuple[str, str, int]
Kind = tuple[str, str, int]
"""(what comes first, what follows, step distance), each as ``engine: kind of operation``."""
LAUNCH = " launched"
_Node = tuple[int, str]

KINDS: list[Kind] = [
    # gradients leave, and their slots are used again
    ("compute: backward", "d2h: grads", 0),
    ("compute: norm", "d2h: grads", 0),
    ("d2h: grads", "compute: backward", 0),
    ("d2h: grads", "compute: norm", 0),
    ("d2h: grads", "cpu: update", 0),
    # weights come, and their slots are used again
    ("cpu: update", "h2d: load", 1),
    ("h2d: load", "compute: forward", 0),
    ("h2d: load", "compute: loss", 0),
    ("h2d: load", "compute: backward", 0),
    ("compute: forward", "h2d: load", 0),
    ("compute: backward", "h2d: load", 0),
    # saved tensors leave and come back
    ("compute: forward", "d2h: save", 0),
    ("d2h: save", "compute: forward", 0),
    ("d2h: save", "compute: loss", 0),
    ("d2h: save", "compute: backward", 0),
    ("d2h: save", "h2d: fetch", 0),
    ("h2d: fetch", "compute: backward", 0),
    ("compute: backward", "h2d: fetch", 0),
    # what a step begins and ends with
    ("h2d: batch", "compute: forward", 0),
    ("compute: backward", "h2d: batch", 1),
    ("compute: totals", "d2h: totals copy", 0),
    ("d2h: totals copy", "compute: totals", 1),
    ("compute: scale", "d2h: scale copy", 0),
    ("d2h: scale copy", "cpu: update", 0),
    ("d2h: scale copy", "compute: scale", 1),
]
"""Every kind of edge between engines that is not implied by others in every plan."""

HARMLESS: Kind = ("cpu: update", "d2h: scale copy", 1)
"""Each step has its own ``host/scale``, which the program counts as one buffer."""

SAVED: dict[str, tuple[str, Tier | None, Tier]] = {
    "all on host": ("all", "host", "host"), "all on gpu": ("all", "gpu", "gpu"),
    "all but input on host": ("all", "host", "gpu"),
    "input on host": ("input", None, "host"), "input on gpu": ("input", None, "gpu"),
}  # fmt: skip
"""Variant, tier of what it saves beside the input, and tier of the input."""

PLACES: list[tuple[bool, int, float | None, int, int, tuple[str, ...], str]] = [
    # tied, accumulation, clip_norm, depth, lag, what blocks save, place of each stage: s streamed, g all on the GPU,
    # h resident with its state on the host
    (False, 2, 0.5, 1, 0, ("all on host",) * 3, "sssss"),
    (True, 1, 0.5, 1, 1, ("input on host",) * 3, "sssss"),
    (False, 1, 0.5, 1, 0, ("all on gpu",) * 3, "sssss"),
    (True, 2, 0.5, 1, 0, ("all on gpu",) * 3, "ggggg"),
    (False, 1, None, 1, 0, ("all on gpu",) * 3, "ggggh"),
    # A gradient takes the slot of the first block's input while that may still be on its way to the host.
    (False, 1, 0.5, 1, 0, ("input on host", "all but input on host", "input on gpu"), "sssss"),
]


def fixed_plans(
    model_of: Callable[[bool], tuple[Model, dict[str, SaveVariant]]], compute_dtype: Dtype, *, micro_batch: int,
    seq_len: int, chunk_tokens: int, fp32_elements: int,
) -> Iterator[Case]:  # fmt: skip
    """Plans of a model of three blocks that between them have every kind of edge."""
    for tied, accumulation, clip_norm, depth, lag, blocks, places in PLACES:
        saves = iter(blocks)
        model, variants = model_of(tied)
        stages = {}
        for stage, place in zip(model.stages, places, strict=True):
            choice = StagePlan(
                weights="host" if place == "s" else "gpu",
                state="gpu" if place == "g" else "host",
                state_format="hybrid8",
            )
            if stage.is_block:
                save, tier, input_tier = SAVED[next(saves)]
                saved = {} if tier is None else {"intermediates": tier}
                choice = choice.model_copy(update={"save": save, "saved_tiers": saved, "input_tier": input_tier})
            stages[stage.id] = choice
        plan = Plan(
            model_id=model.model_id, hardware_id="any", compute_dtype=compute_dtype, micro_batch=micro_batch,
            batch_size=micro_batch * accumulation, seq_len=seq_len, accumulation=accumulation, prefetch_depth=depth,
            loss_chunk_tokens=chunk_tokens, d2h_lag=lag, stages=stages, variants=variants, budget_bytes={},
            fp32_state_elements=fp32_elements, update=Update(clip_norm=clip_norm, check_finite=clip_norm is not None),
        )  # fmt: skip
        yield plan, tied, clip_norm


def examples_of(programs: Sequence[Program], *, one_launcher: bool = False) -> dict[Kind, tuple[int, Edge]]:
    """For each kind of edge the first that matters, and the index of its program."""
    found: dict[Kind, tuple[int, Edge]] = {}
    for index, program in enumerate(programs):
        for edge in needed_edges(program, one_launcher=one_launcher):
            if matters(program, edge):
                found.setdefault(kind_of(program, edge), (index, edge))
    return found


def matters(program: Program, edge: Edge) -> bool:
    """Whether anybody would notice if ``edge`` were missing."""
    kind = kind_of(program, edge)
    unread = "d2h: scale copy" in kind[:2] and not any(op.engine == "cpu" for op in program.ops.values())
    return kind != HARMLESS and not unread


def kind_of(program: Program, edge: Edge) -> Kind:
    before, after, distance = edge
    return _name(program.ops[before]), _name(program.ops[after]), distance


def _name(op: Op) -> str:
    what = op.id.split("/")[0] if op.kind == "copy" else op.kind
    return f"{op.engine}: {what}" + (" copy" if op.id.endswith("/copy") else "")


def needed_edges(program: Program, *, one_launcher: bool = False) -> list[Edge]:
    """Edges between engines that neither the order of the engines nor all other edges together imply.

    An edge of distance 0 or 1 can be implied only by what happens in the same two steps.

    Args:
        program: of one step.
        one_launcher: one thread launches everything in the program's order, and itself waits for the engine ``cpu``.
    """
    ops = program.ops
    crossing = [edge for edge in program.edges if ops[edge[0]].engine != ops[edge[1]].engine]
    follows = _engine_orders(program, one_launcher)
    copies: dict[Edge, list[tuple[_Node, _Node]]] = defaultdict(list)
    for before, after, distance in crossing:
        waiting = after + LAUNCH if one_launcher and ops[before].engine == "cpu" else after
        for step in range(2 - distance):
            copies[before, after, distance].append(((step, before), (step + distance, waiting)))
    for edge in crossing:
        follows.add_edges_from(copies[edge])
    return [edge for edge in crossing if not _implied(follows, copies[edge], edge)]


def _engine_orders(program: Program, one_launcher: bool) -> nx.DiGraph:
    """Operations of two steps, each after the one before it on its engine and, if so, after its launch."""
    follows: nx.DiGraph = nx.DiGraph()
    last: dict[str, _Node] = {}
    for step in (0, 1):
        for op in program.ops.values():
            nodes = {op.engine: (step, op.id)} | ({LAUNCH: (step, op.id + LAUNCH)} if one_launcher else {})
            for line, node in nodes.items():
                if line in last:
                    follows.add_edge(last[line], node)
                last[line] = node
            if one_launcher:
                follows.add_edge(nodes[LAUNCH], nodes[op.engine])
    return follows


def _implied(follows: nx.DiGraph, copies: list[tuple[_Node, _Node]], edge: Edge) -> bool:
    before, after, distance = edge
    follows.remove_edges_from(copies)
    found = nx.has_path(follows, (0, before), (distance, after))
    follows.add_edges_from(copies)
    return found
