"""More memory as a remedy: the least that a plan was found with, as far as the machine has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lazysched.errors import MoreMemory
from lazysched.machine_memory import MachineMemory, memories_of
from lazysched.schemas import Tier
from lazysched.solver.infeasible import MARGIN_BYTES, TIERS, Question, closest, fitting
from lazysched.solver.options import EVERYTHING, EXECUTABLE
from lazysched.solver.words import join
from lazysched.units import format_bytes

FLAGS: dict[Tier, str] = {"gpu": "gpu-memory", "host": "host-memory", "nvme": "nvme"}
"""Tier -> the option that sets its budget."""
NUM_FIGURES = 4
"""Of a size that is missing: rounding up adds a thousandth at most."""
MAX_GROWTHS = 5
"""How often a budget is raised until a plan fits: once for what is missing, again where the lowered plan disagrees with
the memory rows, or where the plan would not be found by a solve that has just so much."""
FINDABLE_SHARE = 100
"""In the latter case so much of what was missing, one hundredth, is added."""


def more_in_words(remedy: MoreMemory, question: Question) -> str:
    """The remedy in words, as ``+3.412 GB gpu (--gpu-memory 9.412GB)``."""
    sizes: dict[Tier, int] = {tier: size for tier, size in sizes_of(remedy).items() if size}
    more = " and ".join(f"+{_size(size, ' ')} {tier}" for tier, size in sizes.items())
    flags = [f"--{FLAGS[tier]} {_total(question.budget_bytes[tier], size)}" for tier, size in sizes.items()]
    if remedy.executable:
        return f"{more} ({' '.join(flags)})"
    return f"{more} ({' '.join(flags)} --not-executable, only to look at: the runtime does not execute files yet)"


def exceeded(remedy: MoreMemory, question: Question) -> list[MachineMemory]:
    """Memories that ``remedy`` asks more of than there is; not where the budgets were beyond them already."""
    more, budget = sizes_of(remedy), question.budget_bytes
    return [
        memory
        for memory in memories_of(question.profile)
        if memory.bytes_of(more) and memory.bytes_of(budget) <= memory.num_bytes < memory.bytes_of(_sum(budget, more))
    ]


def beyond_in_words(remedy: MoreMemory, question: Question) -> str:
    """As ``with more gpu memory alone it would take 30.1 GB of gpu, and the GPU has 24 GB``."""
    grown = _sum(question.budget_bytes, sizes_of(remedy))
    tiers: list[Tier] = [tier for tier, size in sizes_of(remedy).items() if size]
    needed = join(f"{format_bytes(grown[tier])} of {tier}" for tier in tiers)
    there = join(f"the {m.name} has {format_bytes(m.num_bytes)}" for m in exceeded(remedy, question))
    alone = " alone" if len(tiers) == 1 else ""
    return f"with more {join(tiers)} memory{alone} it would take {needed}, and {there}"


def _sum(budget: Mapping[Tier, int], more: Mapping[Tier, int]) -> dict[Tier, int]:
    return {tier: budget.get(tier, 0) + more.get(tier, 0) for tier in FLAGS}


def more_of_both(question: Question) -> MoreMemory | None:
    """The least growth of both together; where one is beyond the machine then, all of it, and more of the other.

    The other may be beyond the machine too.
    """
    least = more_memory(question, TIERS)
    beyond = exceeded(least, question) if least else []
    if not beyond or len(beyond[0].tiers) > 1:
        return least
    tier = next(iter(beyond[0].tiers))
    room: dict[Tier, int] = {tier: max(0, _all_of(beyond[0], question.budget_bytes[tier]))}
    grown = replace(question, budget_bytes=_sum(question.budget_bytes, room))
    rest = more_memory(grown, [other for other in TIERS if other != tier])
    if rest is None:
        return least
    sizes = _sum(sizes_of(rest), room)
    return MoreMemory(gpu_bytes=sizes["gpu"], host_bytes=sizes["host"])


def _all_of(memory: MachineMemory, budget_bytes: int) -> int:
    """By how much a budget may grow so that neither it nor what is printed of it exceeds ``memory``."""
    room_bytes = memory.num_bytes - budget_bytes
    grain = _grain(max(room_bytes, 1))
    return (memory.num_bytes // grain * grain - budget_bytes) // grain * grain


def more_memory(question: Question, tiers: Sequence[Tier]) -> MoreMemory | None:
    """The least growth of ``tiers`` with which a plan fits, rounded up to what is printed."""
    more: dict[Tier, int] = dict.fromkeys(FLAGS, 0)
    nearest = closest(question, tiers).nearest
    if nearest is None:
        return None
    for _ in range(MAX_GROWTHS):
        grown = replace(question, budget_bytes={t: size + more.get(t, 0) for t, size in question.budget_bytes.items()})
        over = grown.over_bytes(nearest)
        if not set(over) <= set(tiers) or not (over or any(more.values())):
            return None
        if over:
            more |= {t: _rounded_up(more[t] + over[t] + MARGIN_BYTES) for t in tiers if t in over}
        elif fitting(grown).nearest is not None:  # asked as a later solve asks
            return MoreMemory(gpu_bytes=more["gpu"], host_bytes=more["host"], nvme_bytes=more["nvme"])
        elif question.watch.has_time():
            more = {tier: _rounded_up(size + size // FINDABLE_SHARE) for tier, size in more.items()}
        else:
            return None
    return None


def files(question: Question) -> MoreMemory | None:
    """More of files alone, in the first scope that has them."""
    scope = next(scope for scope in (question.scope, EXECUTABLE, EVERYTHING) if scope.has_files)
    scope = replace(scope, segments=question.scope.segments)
    remedy = more_memory(replace(question, scope=scope), ["nvme"])
    return remedy and replace(remedy, executable=question.scope.has_files or EXECUTABLE.has_files)


def sizes_of(remedy: MoreMemory) -> dict[Tier, int]:
    """Tier -> bytes by which its budget grows."""
    return {"gpu": remedy.gpu_bytes, "host": remedy.host_bytes, "nvme": remedy.nvme_bytes}


def _grain(size: int) -> int:
    """The unit of the last figure that is printed of ``size``."""
    return int(10 ** max(0, len(str(size)) - NUM_FIGURES))


def _rounded_up(size: int) -> int:
    return -(-size // _grain(size)) * _grain(size)


def _total(budget_bytes: int, more_bytes: int) -> str:
    """The grown budget as a flag takes it, no finer than what it grows by."""
    grain = _grain(more_bytes)
    return _size(-(-(budget_bytes + more_bytes) // grain) * grain, "")


def _size(num_bytes: int, space: str) -> str:
    """Exactly ``num_bytes``, in the unit that suits it."""
    unit, power = next((u, p) for u, p in (("GB", 9), ("MB", 6), ("kB", 3), ("B", 0)) if num_bytes >= 10**p or not p)
    whole, rest = divmod(num_bytes, 10**power)
    digits = f"{rest:0{power}d}".rstrip("0") if power else ""
    return f"{whole}{'.' if digits else ''}{digits}{space}{unit}"
