"""An explanation in words, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from lazysched.solver.decision_costs import Alternative, StageCosts
from lazysched.solver.explain import Explanation
from lazysched.solver.waits import WaitGroup
from lazysched.solver.what_if import Gain
from lazysched.solver.words import (
    choice_in_words,
    join,
    sizes_in_words,
    stages_in_words,
    times_in_words,
)
from lazysched.solver.wrapping import print_wrapped
from lazysched.units import format_bytes, format_seconds

SMALL_SHARE = 0.005
"""Engines that less of the step follows are not named."""
SMALL_S = 1e-6
SMALL_BYTES = 10**6
"""Differences below these are shown as none."""


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print all sections, each a title and some sentences."""
    sections = (
        ("What binds", _binding(explanation)),
        ("What a little more would buy", _gains(explanation)),
        ("What each decision costs", _decisions(explanation)),
        ("The step as a whole", _step(explanation)),
        ("Where compute waits", _waits(explanation)),
    )
    for title, lines in sections:
        console.print(title, highlight=False, markup=False)
        for line in lines:
            print_wrapped(console, f"  {line}")


def _binding(explanation: Explanation) -> Iterator[str]:
    shares = [(engine, share) for engine, share in explanation.engine_shares.items() if share >= SMALL_SHARE]
    told = [f"{100 * share:.0f} % of the step follows the speed of {engine}" for engine, share in shares[:1]]
    told += [f"{100 * share:.0f} % that of {engine}" for engine, share in shares[1:]]
    yield f"{explanation.binding_engine} binds: {join(told)}." if shares else "No engine binds."
    exposed_s = sum(explanation.exposed_s.values())
    needed_s = explanation.step_s - explanation.recompute_s - exposed_s
    recomputing = _or_none(explanation.recompute_s, "recomputing")
    waiting = _or_none(exposed_s, "waiting")
    on = f" ({times_in_words(explanation.exposed_s)})" if exposed_s > SMALL_S else ""
    yield (
        f"A step takes {format_seconds(explanation.step_s)}: {format_seconds(needed_s)} of computing that this "
        f"micro-batch needs, {recomputing}, {waiting}{on}."
    )
    peaks = [
        f"{tier} {format_bytes(explanation.peak_bytes.get(tier, 0))} of {format_bytes(budget)}"
        for tier, budget in explanation.budget_bytes.items()
        if budget
    ]
    yield f"Memory at most: {', '.join(peaks)}."
    if explanation.over_bytes:
        yield f"This plan does not fit: {sizes_in_words(explanation.over_bytes)} over what there is."
    yield _binding_memory(explanation)
    better = _best_change(explanation)
    if better is not None:
        yield f"One decision otherwise is faster and fits: {_alternative(better)}."


def _or_none(seconds: float, what: str) -> str:
    return f"{format_seconds(seconds)} of {what}" if seconds > SMALL_S else f"no {what}"


def _best_change(explanation: Explanation) -> Alternative | None:
    """The one decision whose change saves most within budgets and pins; None where none saves anything."""
    listed = [a for costs in explanation.stages for a in costs.alternatives] + explanation.step_alternatives
    # Giving up clipping changes what is computed, so it betters no plan.
    wanted = [a for a in listed if a.same_result and not a.against_pins]
    kept = [a for a in wanted if not a.over_bytes and a.step_s < -SMALL_S]
    return min(kept, key=lambda a: round(a.step_s, 9), default=None)


def _binding_memory(explanation: Explanation) -> str:
    if explanation.problem is not None:
        return f"Solving anew found nothing: {explanation.problem}."
    if explanation.bound_s is None:
        return "Whether memory binds was not looked for: nothing was solved."
    tiers = explanation.binding_tiers
    if tiers:
        return f"Memory binds: with more of {join(tiers)} a step is proven to be shorter."
    gap_s = explanation.reference_s - explanation.bound_s
    return f"No memory is proven to bind: plans as fast might exist within the solver's gap, {format_seconds(gap_s)}."


def _gains(explanation: Explanation) -> Iterator[str]:
    if explanation.reference_s < explanation.step_s - SMALL_S:
        faster, slower = format_seconds(explanation.reference_s), format_seconds(explanation.step_s)
        yield f"Solving again finds a faster plan for the same budgets: {faster}, not {slower}. Gains count from it."
    for gain in explanation.gains:
        yield _gain(gain, explanation)


def _gain(gain: Gain, explanation: Explanation) -> str:
    if gain.gain_s <= SMALL_S:
        return f"{gain.words}: nothing"
    text = f"{gain.words}: saves {_saved(gain.gain_s, explanation.reference_s)}"
    if gain.within_gap and explanation.gap is not None:
        text += f", within the solver's gap of {100 * explanation.gap:.1f} %"
    same_s = 0.0 if gain.same_plan_s is None else explanation.step_s - gain.same_plan_s
    if gain.same_plan_s is not None and abs(same_s - gain.gain_s) > SMALL_S:
        text += f"; this very plan {format_seconds(same_s) if same_s > SMALL_S else 'nothing'}"
    return text


def _saved(gain_s: float, step_s: float) -> str:
    return f"{format_seconds(gain_s)} ({100 * gain_s / step_s:.2g} %)"


def _step(explanation: Explanation) -> Iterator[str]:
    yield (
        "Prefetch depth: how many stages ahead weights and saved tensors come to the GPU. D2H lag: how many copies "
        "from the GPU to the host may still run when compute goes on. Each one more takes a slot on the GPU."
    )
    yield from map(_alternative, explanation.step_alternatives)


def _decisions(explanation: Explanation) -> Iterator[str]:
    yield (
        "What a block saves is called by its variant: all, its input alone, or values per token; what is not saved is "
        "computed again in the backward."
    )
    if explanation.pins:
        yield f"Fixed by hand: {', '.join(explanation.pins)}."
    for costs in explanation.stages:
        is_block = costs.stages[0].startswith("block.")
        yield f"{stages_in_words(costs.stages)}: {choice_in_words(costs.choice, is_block, costs.training)}"
        yield f"    {_costs(costs)}"
        for alternative in costs.alternatives:
            yield f"    {_alternative(alternative)}"


def _costs(costs: StageCosts) -> str:
    together = "together: " if len(costs.stages) > 1 else ""
    recomputes = f"recomputing {format_seconds(costs.recompute_s)} a step, " if costs.recompute_s > SMALL_S else ""
    moves = f"moving {sizes_in_words(costs.moved_bytes)} a step, " if costs.moved_bytes else "moving nothing, "
    return f"{together}{recomputes}{moves}holding {sizes_in_words(costs.kept_bytes)}"


def _alternative(alternative: Alternative) -> str:
    where = "" if alternative.where == "step" else f"{alternative.where}: "
    text = f"{where}{alternative.words} would {join(_effects(alternative))}"
    if alternative.over_bytes:
        text += f"; does not fit, {sizes_in_words(alternative.over_bytes)} over"
    if alternative.against_pins:
        text += f"; against {join(alternative.against_pins)}"
    return text


def _effects(alternative: Alternative) -> Iterator[str]:
    changes = {tier: size for tier, size in alternative.peak_bytes.items() if abs(size) >= SMALL_BYTES}
    if abs(alternative.step_s) > SMALL_S:
        yield f"{'save' if alternative.step_s < 0 else 'cost'} {format_seconds(abs(alternative.step_s))}"
    for verb, sign in (("need", 1), ("free", -1)):
        sizes = [f"{format_bytes(abs(size))} of {tier}" for tier, size in changes.items() if size * sign > 0]
        if sizes:
            yield f"{verb} {join(sizes)}"
    if abs(alternative.step_s) <= SMALL_S and not changes:
        yield "change nothing"


def _waits(explanation: Explanation) -> Iterator[str]:
    if not explanation.waits:
        yield "Nowhere."
    for group in explanation.waits:
        yield _wait(group)


def _wait(group: WaitGroup) -> str:
    text = f"{format_seconds(group.seconds)} on {group.engine}: {group.waiting} waits for {group.cause}"
    if group.behind is not None:
        text += f", which was kept waiting by {group.behind}"
    if group.count > 1:
        text += f", {group.count} times"
    if group.worst_stage is not None:
        text += f"; {'most' if group.count > 1 else 'at'} {group.worst_stage}"
        text += f", {format_seconds(group.worst_s)}" if group.count > 1 else ""
    return text
