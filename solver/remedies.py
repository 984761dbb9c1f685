"""What to change so that a plan fits: every remedy is proposed only after a plan was found with it.

Memory that the machine does not have is no remedy; how much it would take is told beside them.
Files are a remedy where the profile knows how fast they are. While the runtime does not execute them it is said that
such a plan is only to look at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from lazysched.errors import (
    FewerPins,
    InfeasibleError,
    LazyschedError,
    MoreMemory,
    Remedy,
    SmallerBatch,
    SmallerState,
    TimeLimitError,
    UsageError,
)
from lazysched.solver.batches import max_accumulation
from lazysched.solver.bounds import least_missing_gb
from lazysched.solver.infeasible import Question, fitting
from lazysched.solver.input_checks import check_file_links
from lazysched.solver.measured import check_profile, host_memories, usable_micro_batches
from lazysched.solver.memory_remedies import (
    beyond_in_words,
    exceeded,
    files,
    more_in_words,
    more_memory,
    more_of_both,
    sizes_of,
)
from lazysched.solver.pins import Pin
from lazysched.solver.words import join
from lazysched.units import format_bytes


@dataclass(frozen=True)
class Advice:
    """What was worked out.

    Attributes:
        remedies: changes each of which suffices.
        not_worked_out: what the time did not suffice for, in words.
        beyond: memory that would suffice and that the machine does not have.
    """

    remedies: list[Remedy]
    not_worked_out: list[str]
    beyond: list[MoreMemory]


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
    more = "".join(f"; {beyond_in_words(remedy, question)}" for remedy in advice.beyond)
    more += f"; not worked out in the time: {left_out}; a longer --time-limit may name more" if left_out else ""
    if not proven:
        message = f"no plan was found in time within {within} memory, though one may fit"
        return TimeLimitError(f"{message}; sure to fit: {helps}{more}" if found else f"{message}{more}")
    if not more and not found:
        return TimeLimitError("no plan was found, nor what is missing for one; profile a smaller --micro-batch")
    memory = [r for r in (*found, *advice.beyond) if isinstance(r, MoreMemory)]
    alone = [r for r in memory if r.executable and not (r.gpu_bytes and r.host_bytes)]
    missing = {str(tier): size for r in alone for tier, size in sizes_of(r).items() if size}
    return InfeasibleError(f"no plan fits {within} memory{f': {helps}' if found else ''}{more}", missing, found)


def remedies(question: Question) -> Advice:
    """Changes each of which suffices: more memory, a smaller batch, smaller optimizer state, fewer pins.

    Each gets an even share of the time that is left; what did not suffice for one is tried once more with what the
    quick ones left.
    """
    found: dict[str, Remedy] = {}
    beyond: dict[str, MoreMemory] = {}
    waiting = [name for name in _WAYS if name not in _NEEDS or _NEEDS[name](question)]
    for _ in range(2):
        ways, waiting = waiting, []
        for count, name in enumerate(ways):
            if name == BOTH and not found.keys().isdisjoint(EACH):  # it is for where neither helps alone
                continue
            share = question.within(question.watch.remaining_s / (len(ways) - count))
            is_open = name == BOTH and not set(waiting).isdisjoint(EACH)
            remedy = _WAYS[name](share) if share.watch.has_time() and not is_open else None
            if isinstance(remedy, MoreMemory) and exceeded(remedy, question):
                beyond[name] = remedy
            elif remedy is not None:
                found[name] = remedy
            elif is_open or not share.watch.has_time():
                waiting.append(name)
    if len(beyond) > 1:  # what one memory alone would take says more
        beyond.pop(BOTH, None)
    return Advice([found[name] for name in _WAYS if name in found], waiting, list(beyond.values()))


def described(remedy: Remedy, question: Question) -> str:
    """The remedy in words, as ``+3.412 GB gpu (--gpu-memory 9.412GB)``."""
    if isinstance(remedy, SmallerBatch):
        return f"batch {remedy.batch_size} instead of {question.batch_size}"
    if isinstance(remedy, SmallerState):
        return f"optimizer state {remedy.optimizer_state} instead of {question.state_format}"
    if isinstance(remedy, FewerPins):
        return f"drop {' and '.join(f'--pin {text}' for text in remedy.dropped)}"
    return more_in_words(remedy, question)


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


# ---- pins


def _fewer_pins(question: Question) -> FewerPins | None:
    """The first pin without which a plan fits; where none alone is enough, pins of which each is in the way."""

    def fits(pins: tuple[Pin, ...]) -> bool:
        return question.watch.has_time() and fitting(replace(question, pins=pins)).nearest is not None

    pins = question.pins
    for dropped in pins:
        if fits(tuple(pin for pin in pins if pin is not dropped)):
            return FewerPins((dropped.text,))
    if len(pins) < 2 or not fits(()):
        return None
    kept: tuple[Pin, ...] = ()
    for pin in pins:
        kept = (*kept, pin) if fits((*kept, pin)) else kept
    return FewerPins(tuple(pin.text for pin in pins if pin not in kept))


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
    EACH[0]: lambda question: more_memory(question, ["gpu"]),
    EACH[1]: lambda question: more_memory(question, ["host"]),
    BOTH: more_of_both,
    "files": files,
    "a smaller batch": _smaller_batch,
    "a smaller optimizer state": _smaller_state,
    "fewer pins": _fewer_pins,
}
"""What may help, in words and in the order in which it is worked out and told."""
_NEEDS: dict[str, Callable[[Question], bool]] = {
    "files": _has_file_links,
    "a smaller batch": lambda question: question.batch_size > min(usable_micro_batches(question.profile)),
    "a smaller optimizer state": _has_smaller_state,
    "fewer pins": lambda question: bool(question.pins),
}
"""Where something does not always come into question: when it does."""
