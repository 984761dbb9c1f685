"""Two plans side by side: the decisions that differ, and what both predict."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from rich.console import Console
from rich.table import Table

from lazysched.errors import UsageError
from lazysched.schemas import Engine, Plan, Prediction, Schema, StagePlan, Tier
from lazysched.solver.simulate_report import up_to_date
from lazysched.solver.words import saves_in_words, stages_in_words, state_in_words, weights_in_words
from lazysched.solver.wrapping import print_wrapped
from lazysched.trainable import Training, training_of
from lazysched.units import format_bytes, format_seconds

APART = {
    "version", "model_id", "world_size", "argument_bytes", "update", "pins", "stages", "variants", "budget_bytes",
    "context_bytes", "workspace_bytes", "predicted", "solver", "profile",
}  # fmt: skip
"""Fields of a plan that are no decisions, or are set side by side in a form of their own."""
SETTINGS = [name for name in Plan.model_fields if name not in APART]
NO_FIGURE = "-"
NO_TIME_S = 1e-9
"""Waits and differences below it are rounding."""


class Difference(Schema):
    """One thing that two plans decide differently."""

    where: str
    """A field of the plan, or the stages that differ in this way."""
    field: str
    """``weights``, ``optimizer state`` or ``saves`` of these stages; empty for a field of the plan."""
    a: str
    b: str


class Figure(Schema):
    """One predicted figure of both plans; null where a plan has no prediction."""

    name: str
    a: float | None
    b: float | None


class Comparison(Schema):
    """What ``compare`` found."""

    settings: list[Difference]
    """Of the plans as a whole."""
    stages: list[Difference]
    """Of stages, those that differ alike joined."""
    equal_settings: list[str]
    num_stages: int
    num_equal_stages: int
    figures: list[Figure]
    """Seconds, tokens per second and bytes; ``name`` says which."""


def compare(plan_a: Plan, plan_b: Plan) -> Comparison:
    """Set ``plan_b`` against ``plan_a``; predictions are those of the plans as they stand.

    Raises:
        UsageError: the plans are for different models.
    """
    _refuse_other_model(plan_a, plan_b)
    stages = _stage_differences(plan_a, plan_b)
    settings, equal = _setting_differences(plan_a, plan_b)
    return Comparison(
        settings=settings,
        stages=stages,
        equal_settings=equal,
        num_stages=len(plan_a.stages),
        num_equal_stages=sum(plan_a.stages[name] == plan_b.stages[name] for name in plan_a.stages),
        figures=_figures(plan_a, plan_b),
    )


def _refuse_other_model(plan_a: Plan, plan_b: Plan) -> None:
    if plan_a.model_id != plan_b.model_id:
        raise UsageError(
            f"plans: model_id: {plan_a.model_id} and {plan_b.model_id} are different models; compare plans of one model"
        )
    odd = sorted(set(plan_a.stages) ^ set(plan_b.stages))
    if odd:
        raise UsageError(f"plans: stages: {odd[0]!r} is in one of them only; compare plans of one model")


def _setting_differences(plan_a: Plan, plan_b: Plan) -> tuple[list[Difference], list[str]]:
    pairs = {name: (str(getattr(plan_a, name)), str(getattr(plan_b, name))) for name in SETTINGS}
    pairs["update"] = _update(plan_a), _update(plan_b)
    pairs["trainable"] = _trained(plan_a), _trained(plan_b)
    pairs["pins"] = _pins(plan_a), _pins(plan_b)
    for tier in plan_a.budget_bytes | plan_b.budget_bytes:
        sizes = [format_bytes(plan.budget_bytes.get(tier, 0)) for plan in (plan_a, plan_b)]
        pairs[f"{tier} budget"] = sizes[0], sizes[1]
    different = [Difference(where=name, field="", a=a, b=b) for name, (a, b) in pairs.items() if a != b]
    return different, [name for name, (a, b) in pairs.items() if a == b]


def _update(plan: Plan) -> str:
    update = plan.update
    clipping = "no clipping" if update.clip_norm is None else f"clipping to {update.clip_norm:g}"
    return f"{update.mode}, {clipping}, {'with' if update.check_finite else 'no'} check for finite gradients"


def _trained(plan: Plan) -> str:
    return ", ".join(plan.trainable) or "everything"


def _pins(plan: Plan) -> str:
    return ", ".join(plan.pins) or "none"


def _stage_differences(plan_a: Plan, plan_b: Plan) -> list[Difference]:
    fields: tuple[tuple[str, Callable[[StagePlan, Training], str]], ...] = (
        ("weights", lambda choice, _: weights_in_words(choice)),
        ("optimizer state", state_in_words),
        ("saves", saves_in_words),
    )
    both = [(plan, training_of(plan.profile.stages) if plan.profile else {}) for plan in (plan_a, plan_b)]
    result = []
    for name, words in fields:
        changed = [
            (stage, *(words(plan.stages[stage], training.get(stage, "trained")) for plan, training in both))
            for stage in plan_a.stages
            if stage.startswith("block.") or name != "saves"
        ]
        runs: dict[tuple[str, ...], list[str]] = {}
        for pair, run in groupby(changed, key=lambda item: item[1:]):
            if pair[0] != pair[1]:
                runs.setdefault(pair, []).extend(stage for stage, *_ in run)
        result += [Difference(where=stages_in_words(run), field=name, a=a, b=b) for (a, b), run in runs.items()]
    return result


def _figures(plan_a: Plan, plan_b: Plan) -> list[Figure]:
    predicted = up_to_date(plan_a), up_to_date(plan_b)
    both = [p for p in predicted if p is not None]
    engines: dict[Engine, None] = dict.fromkeys(e for p in both for e, s in p.exposed_s.items() if s > NO_TIME_S)
    links: dict[Engine, None] = dict.fromkeys(e for p in both for e in p.moved_bytes)
    tiers: dict[Tier, None] = dict.fromkeys(t for p in both for t, size in p.peak_bytes.items() if size)
    rows: list[tuple[str, Callable[[Prediction, Plan], float]]] = [
        ("step_s", lambda p, _: p.step_s),
        ("tokens_per_s", lambda p, plan: plan.batch_size * plan.seq_len / p.step_s),
        *((f"waits_for_{e}_s", lambda p, _, e=e: p.exposed_s.get(e, 0.0)) for e in engines),
        *((f"{e}_bytes", lambda p, _, e=e: p.moved_bytes.get(e, 0)) for e in links),
        *((f"{t}_peak_bytes", lambda p, _, t=t: p.peak_bytes.get(t, 0)) for t in tiers),
    ]
    return [
        Figure(name=name, **{
            side: None if p is None else read(p, plan)
            for side, p, plan in zip("ab", predicted, (plan_a, plan_b), strict=True)
        })
        for name, read in rows
    ]  # fmt: skip


def print_comparison(found: Comparison, names: tuple[str, str], console: Console) -> None:
    """Print what differs, what both predict, and a line on what is equal.

    Args:
        found: what ``compare`` returned.
        names: of the plans, in the heads of the columns.
        console: where to print.
    """
    if found.settings or found.stages:
        table = Table(title="Decisions that differ", title_justify="left")
        for column in ("what", *names):
            table.add_column(column, overflow="fold")
        for difference in (*found.settings, *found.stages):
            table.add_row(f"{difference.where} {difference.field}".strip(), difference.a, difference.b)
        console.print(table)
    table = Table(title="Predictions", title_justify="left")
    for column in ("", *names, "difference"):
        table.add_column(column, overflow="fold")
    for figure in found.figures:
        table.add_row(*_row(figure))
    console.print(table)
    settings = "all settings" if not found.settings else f"settings {', '.join(found.equal_settings)}"
    print_wrapped(console, f"equal: {found.num_equal_stages} of {found.num_stages} stages; {settings}")


def _row(figure: Figure) -> tuple[str, ...]:
    name, a, b = figure.name, figure.a, figure.b
    label = name.replace("_per_s", "/s").removesuffix("_s").removesuffix("_bytes").replace("_", " ")
    show = _shower(name)
    shown = [NO_FIGURE if value is None else show(value) for value in (a, b)]
    if a is None or b is None or _is_rounding(name, b - a):
        return label, *shown, ""
    change = f" ({100 * (b / a - 1):+.1f} %)" if a else ""
    return label, *shown, f"{'+' if b > a else '-'}{show(abs(b - a))}{change}"


def _is_rounding(name: str, value: float) -> bool:
    """Whether a figure, or the difference of two, is nothing but rounding."""
    return abs(value) <= (NO_TIME_S if name.endswith("_s") and not name.endswith("_per_s") else 0.0)


def _shower(name: str) -> Callable[[float], str]:
    if name.endswith("_per_s"):
        return lambda value: f"{value:,.0f}"
    if name.endswith("_s"):
        return lambda value: format_seconds(0.0 if _is_rounding(name, value) else value)
    return format_bytes
