"""What to change so that a plan fits: every remedy is proposed only after a plan was found with it.

Files are a remedy where the profile knows how fast they are. While the runtime does not execute them it is said that
such a plan is only to look at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lazysched.errors import (
    InfeasibleError,
    LazyschedError,
    MoreMemory,
    Remedy,
    SmallerBatch,
    SmallerState,
    TimeLimitError,
    UsageError,
)
from lazysched.schemas import Tier
from lazysched.solver.batches import max_accumulation
from lazysched.solver.bounds import least_missing_gb
from lazysched.solver.infeasible import MARGIN_BYTES, TIERS, Question, closest, fitting
from lazysched.solver.input_checks import check_file_links
from lazysched.solver.measured import check_profile, host_memories, usable_micro_batches
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


@dataclass(frozen=True)
class Advice:
    """What was worked out.

    Attributes:
        remedies: changes each of which suffices.
        not_worked_out: what the time did not suffice for, in words.
    """

    remedies: list[Remedy]
    not_worked_out: list[str]


def explain(question: Question, proven: bool) -> LazyschedError:
    """The error that says what no plan fits into, or fits as far as was looked, and what would surely help.

    Args:
        question: what was asked; its watch is for all remedies together.
        proven: whether it is certain that no plan fits.
    """
    advice = remedies(question)
    found = advice.remedies
    budget = question.budget_bytes
    within = join(f"{format_bytes(size)} of {tier}" for tier, size in budget.items() if size)
    helps = ", or ".join(described(r, question) for r in found)
    left_out = ", ".join(advice.not_worked_out)
    more = f"; not worked out in the time: {left_out}; a longer --time-limit may name more" if left_out else ""
    if not proven:
        message = f"no plan was found in time within {within} memory, though one may fit"
        return TimeLimitError(f"{message}; sure to fit: {helps}{more}" if found else f"{message}{more}")
    if not found and not left_out:
        return TimeLimitError("no plan was found, nor what is missing for one; profile a smaller --micro-batch")
    alone = [r for r in found if isinstance(r, MoreMemory) and r.executable and not (r.gpu_bytes and r.host_bytes)]
    missing = {str(tier): size for r in alone for tier, size in _sizes(r).items() if size}
    return InfeasibleError(f"no plan fits {within} memory{f': {helps}' if found else ''}{more}", missing, found)


def remedies(question: Question) -> Advice:
    """Changes each of which suffices: more memory, a smaller batch, smaller optimizer state.

    Each gets an even share of the time that is left; what did not suffice for one is tried once more with what the
    quick ones left.
    """
    found: dict[str, Remedy] = {}
    waiting = [name for name in _WAYS if name not in _NEEDS or _NEEDS[name](question)]
    for _ in range(2):
        ways, waiting = waiting, []
        for count, name in enumerate(ways):
            if name == BOTH and not found.keys().isdisjoint(EACH):  # it is for where neither helps alone
                continue
            share = question.within(question.watch.remaining_s / (len(ways) - count))
            is_open = name == BOTH and not set(waiting).isdisjoint(EACH)
            remedy = _WAYS[name](share) if share.watch.has_time() and not is_open else None
            if remedy is not None:
                found[name] = remedy
            elif is_open or not share.watch.has_time():
                waiting.append(name)
    return Advice([found[name] for name in _WAYS if name in found], waiting)


def described(remedy: Remedy, question: Question) -> str:
    """The remedy in words, as ``+3.412 GB gpu (--gpu-memory 9.412GB)``."""
    if isinstance(remedy, SmallerBatch):
        return f"batch {remedy.batch_size} instead of {question.batch_size}"
    if isinstance(remedy, SmallerState):
        return f"optimizer state {remedy.optimizer_state} instead of {question.state_format}"
    sizes: dict[Tier, int] = {tier: size for tier, size in _sizes(remedy).items() if size}
    more = " and ".join(f"+{_size(size, ' ')} {tier}" for tier, size in sizes.items())
    flags = [f"--{FLAGS[tier]} {_total(question.budget_bytes[tier], size)}" for tier, size in sizes.items()]
    if remedy.executable:
        return f"{more} ({' '.join(flags)})"
    return f"{more} ({' '.join(flags)} --not-executable, only to look at: the runtime does not execute files yet)"


# ---- memory


def _more_memory(question: Question, tiers: Sequence[Tier]) -> MoreMemory | None:
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


def _files(question: Question) -> MoreMemory | None:
    """More of files alone, in the first scope that has them."""
    scope = next(scope for scope in (question.scope, EXECUTABLE, EVERYTHING) if scope.has_files)
    scope = replace(scope, segments=question.scope.segments)
    remedy = _more_memory(replace(question, scope=scope), ["nvme"])
    return remedy and replace(remedy, executable=question.scope.has_files or EXECUTABLE.has_files)


def _sizes(remedy: MoreMemory) -> dict[Tier, int]:
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


# ---- batch and state


def _smaller_batch(question: Question) -> SmallerBatch | None:
    """The most rows below the batch, as micro-batches of any profiled size, that fit; what time is left for counts."""
    best = 0
    for size in usable_micro_batches(question.profile):
        low, high = best // size + 1, min((question.batch_size - 1) // size, max_accumulation(question.profile))

        def may_fit(count: int, size: int = size) -> bool:
            return _may_fit(question, size, count)

        def fits(count: int, size: int = size) -> bool:
            smaller = replace(question, batch_size=size * count)
            return question.watch.has_time() and fitting(smaller).nearest is not None

        count = _largest(low, high, may_fit)
        if count is not None and not fits(count):
            count = _largest(low, count - 1, fits)
        best = best if count is None else size * count
    return SmallerBatch(best) if best else None


def _may_fit(question: Question, size: int, count: int) -> bool:
    """Whether ``count`` micro-batches of ``size`` rows pass the quick bound; what fits does."""
    return any(
        least_missing_gb(instance, question.budgets(instance), ()) < math.inf
        for instance in question.instances_of(size, count)
    )


def _largest(low: int, high: int, works: Callable[[int], bool]) -> int | None:
    """The largest number in ``low..high`` that works, where all below one that works do; None if none does."""
    if low > high or not works(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if works(middle) else (low, middle - 1)
    return low


def _smaller_state(question: Question) -> SmallerState | None:
    sought = fitting(replace(question, state_format="hybrid8"))
    return SmallerState("hybrid8") if sought.nearest is not None else None


# ---- what there is


def _has_file_links(question: Question) -> bool:
    """Otherwise they were not measured, and no plan can be made with them."""
    try:
        check_file_links(question.profile)
    except UsageError:
        return False
    return True


def _has_smaller_state(question: Question) -> bool:
    profile = question.profile
    try:
        check_profile(profile, "hybrid8", host_memories(profile, question.budget_bytes["host"]))
    except UsageError:  # not measured, so that no plan can be made with it
        return False
    return question.state_format != "hybrid8"


EACH, BOTH = ("more gpu memory", "more host memory"), "more memory of both"
_WAYS: dict[str, Callable[[Question], Remedy | None]] = {
    EACH[0]: lambda question: _more_memory(question, ["gpu"]),
    EACH[1]: lambda question: _more_memory(question, ["host"]),
    BOTH: lambda question: _more_memory(question, TIERS),
    "files": _files,
    "a smaller batch": _smaller_batch,
    "a smaller optimizer state": _smaller_state,
}
"""What may help, in words and in the order in which it is worked out and told."""
_NEEDS: dict[str, Callable[[Question], bool]] = {
    "files": _has_file_links,
    "a smaller batch": lambda question: question.batch_size > min(usable_micro_batches(question.profile)),
    "a smaller optimizer state": _has_smaller_state,
}
"""Where something does not always come into question: when it does."""
