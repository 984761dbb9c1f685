"""Tables that show a solution to a person."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from lazysched.schemas import Plan, Profile, Stage, StagePlan, Tier
from lazysched.solver.pin_checks import remarks
from lazysched.solver.simulate import Timeline
from lazysched.solver.solution import Solution
from lazysched.solver.words import state_in_words
from lazysched.trainable import Training, trained_share, training_of
from lazysched.units import format_bytes, format_seconds


def print_solution(solution: Solution, profile: Profile, console: Console) -> None:
    """Print the plan by runs of equal stages, its prediction, and the recipes beside it.

    Args:
        solution: what ``solve`` returned.
        profile: the profile it was solved for.
        console: where to print.
    """
    plan, timeline = solution.plan, solution.timeline
    if profile.device == "cpu":
        console.print("no GPU: the tiers gpu and host are the same memory here, each is given half of it")
    if plan.host_memory == "pageable" and profile.pin_limit_bytes is not None:
        limit = format_bytes(profile.pin_limit_bytes)
        console.print(f"host memory: pageable, because only {limit} can be page-locked", highlight=False)
    if plan.trainable:
        console.print(f"trained: {trained_share(profile.stages)}", highlight=False)
    console.print(_stages_table(plan, profile.stages))
    for remark in remarks(plan, profile.stages):
        console.print(remark, highlight=False, markup=False)
    console.print(_prediction_table(plan, timeline, profile.pin_limit_bytes))
    console.print(_recipes_table(solution))
    report = plan.solver
    assert report is not None
    if solution.interrupted:
        console.print("interrupted: this is the best plan that was found until then")
    console.print(
        f"{report.status}: within {100 * report.gap:.1f} % of the lower bound {format_seconds(report.bound_s)}, "
        f"{sum(t.step_s is not None for t in solution.tried)} of {len(solution.tried)} combinations searched "
        f"in {format_seconds(report.time_s)}"
        + ("; the profile holds estimates, measure before you trust the times" if profile.estimated else ""),
        highlight=False,
    )


def _stages_table(plan: Plan, stages: Sequence[Stage]) -> Table:
    by_tokens = any(choice.save[:1].isdigit() for choice in plan.stages.values())
    meaning = "saved for backward: values per token; the rest is computed again" if by_tokens else None
    table = Table(title="Plan", title_justify="left", caption=meaning, caption_justify="left")
    for column in ("stages", "weights", "optimizer state", "saved for backward", "kept on"):
        table.add_column(column, overflow="fold", no_wrap=column != "saved for backward")
    training = training_of(stages)
    for choice, run in groupby(plan.stages.items(), key=lambda item: _key(item[0], item[1], training[item[0]])):
        names = [name for name, _ in run]
        label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1].removeprefix('block.')} ({len(names)})"
        table.add_row(label, *choice[1:])
    return table


def _key(name: str, choice: StagePlan, training: Training) -> tuple[str, ...]:
    """What is equal within a run of stages; only blocks form runs."""
    kind = "block" if name.startswith("block.") else name
    weights = {"gpu": "resident", "host": "streamed", "nvme": "from nvme"}[choice.weights]
    state = state_in_words(choice, training)
    if kind != "block":
        return kind, weights, state, "", ""
    if training == "no backward":
        return kind, weights, state, "nothing", ""
    tiers = sorted({choice.input_tier, *choice.saved_tiers.values()})
    return kind, weights, state, choice.save, "+".join(tiers)


def _prediction_table(plan: Plan, timeline: Timeline, pin_limit_bytes: int | None) -> Table:
    tokens = plan.batch_size * plan.seq_len
    table = Table(title="Prediction", title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    rows = "row" if plan.micro_batch == 1 else "rows"
    shape = f"{plan.micro_batch} {rows} x {plan.accumulation}, prefetch depth {plan.prefetch_depth}"
    table.add_row("micro-batch", shape)
    table.add_row("step", f"{format_seconds(timeline.step_s)}, {tokens / timeline.step_s:,.0f} tokens/s")
    waits = [f"{engine} {format_seconds(seconds)}" for engine, seconds in timeline.exposed_s.items() if seconds > 0]
    table.add_row("compute waits for", ", ".join(waits) or "nothing")
    for engine, size in timeline.moved_bytes.items():
        table.add_row(f"{engine} per step", format_bytes(size))
    for tier, budget in plan.budget_bytes.items():
        if budget:
            peak = timeline.peak_bytes[tier]
            table.add_row(f"{tier} peak", f"{format_bytes(peak)} of {format_bytes(budget)}")
    if pin_limit_bytes is not None:
        table.add_row("page-locked", f"{format_bytes(timeline.pinned_bytes)} of {format_bytes(pin_limit_bytes)}")
    return table


def _recipes_table(solution: Solution) -> Table:
    """Recipes that fit, at 80 columns a line or two each; those that do not are named below."""
    plan = solution.plan
    fitting = [(r.name, r.plan, r.timeline) for r in solution.recipes if r.plan is not None and r.timeline is not None]
    rows = [("this plan", plan, solution.timeline), *fitting]
    others = "; ".join(recipe.name for recipe in solution.recipes if recipe.plan is None)
    why = "do not fit, or not with the pins" if plan.pins else "do not fit"
    table = Table(
        title="Fixed recipes within the same budgets, with their peaks of memory", title_justify="left",
        caption=f"{why}: {others}" if others else None, caption_justify="left",
    )  # fmt: skip
    tiers: list[Tier] = [
        tier for tier in plan.budget_bytes if any(timeline.peak_bytes[tier] for _, _, timeline in rows)
    ]
    differing = len({by_recipe.micro_batch for _, by_recipe, _ in rows}) > 1  # otherwise the prediction has it
    table.add_column("recipe", overflow="fold")
    for column in (*(["rows"] if differing else []), "step", *tiers, "slower"):
        table.add_column(column, no_wrap=True)
    for name, by_recipe, timeline in rows:
        sizes = [str(by_recipe.micro_batch)] if differing else []
        peaks = (format_bytes(timeline.peak_bytes[tier]) for tier in tiers)
        slower = f"{100 * (timeline.step_s / solution.timeline.step_s - 1):.1f} %" if by_recipe is not plan else ""
        table.add_row(name, *sizes, format_seconds(timeline.step_s), *peaks, slower)
    return table
