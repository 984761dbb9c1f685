"""Where the compute engine waits, and for what: the waits of one simulated step, told apart by kind and added up."""

from __future__ import annotations

from collections import defaultdict

from lazysched.schemas import Engine, Op, Program, Schema
from lazysched.timeline import Chain, Interval, Wait, intervals_by_step, waits_of_step

_WHAT = {
    "batch": "the batch to arrive", "load": "weights to arrive", "fetch": "saved tensors to come back",
    "save": "saved tensors to have left", "grads": "gradients to have left", "totals": "the step's report to leave",
    "scale": "the clip factor to leave", "update": "weights to be updated", "read": "a file to be read",
    "write": "a file to be written",
}  # fmt: skip
"""First part of an operation's id -> what one waits for that waits for it."""
_WHO = {
    "forward": "forward", "recompute": "recompute", "backward": "backward", "loss": "loss", "norm": "gradient norm",
    "update": "update", "totals": "end of the step", "scale": "end of the step",
}  # fmt: skip


class WaitGroup(Schema):
    """Waits of one kind within a step."""

    engine: Engine
    """What ``compute`` waited for."""
    waiting: str
    """What could not start: ``forward``, ``backward`` ..."""
    cause: str
    """What it waited for, in words."""
    behind: Engine | None = None
    """Where that was itself kept waiting: by which engine."""
    seconds: float
    """All of them together, per step."""
    count: int
    worst_stage: str | None
    """Stage of the longest wait."""
    worst_s: float


def wait_groups(program: Program, intervals: list[Interval], *, in_line: bool) -> list[WaitGroup]:
    """The waits of the last step, longest group first.

    Args:
        program: one step.
        intervals: of at least two consecutive steps.
        in_line: whether all engines are one thread; then all that is not compute is waited for.
    """
    by_step = intervals_by_step(intervals)
    last = max(by_step)
    here, before = by_step[last], by_step[last - 1]
    groups: dict[tuple[Engine, str, str, Engine | None], list[Wait]] = defaultdict(list)
    chain = Chain(program, here, before)
    for wait in waits_of_step(program, here, before, in_line=in_line):
        behind = None if in_line else _behind(wait, chain)
        waiting = "everything else" if in_line else _who(program.ops[wait.op])
        groups[wait.engine, waiting, _what(program.ops[wait.cause]), behind].append(wait)
    result = [_group(program, key, waits) for key, waits in groups.items()]
    return sorted(result, key=lambda group: -group.seconds)


def _group(program: Program, key: tuple[Engine, str, str, Engine | None], waits: list[Wait]) -> WaitGroup:
    engine, waiting, cause, behind = key
    worst = max(waits, key=lambda wait: wait.seconds)
    return WaitGroup(
        engine=engine, waiting=waiting, cause=cause, behind=behind, seconds=sum(wait.seconds for wait in waits),
        count=len(waits), worst_stage=program.ops[worst.op].stage, worst_s=worst.seconds,
    )  # fmt: skip


def _who(op: Op) -> str:
    return _WHO.get(op.kind, op.kind)


def _what(op: Op) -> str:
    return _WHAT.get(op.id.split("/")[0], op.kind)


def _behind(wait: Wait, chain: Chain) -> Engine | None:
    """The engine that was at work when ``wait`` began, if it is neither that of its cause nor ``compute``."""
    first = chain.leading_to(wait)[-1]
    at_work = first.start_s <= wait.free_s
    return first.engine if at_work and first.engine not in (wait.engine, "compute") else None
