"""The frontier of memory and time: the fastest plan at each of many budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from lazysched.errors import UsageError
from lazysched.schemas import Plan, Profile, Tier
from lazysched.solver.many import Answer, Request, answer_until_interrupted
from lazysched.solver.solution import report_with, sought_gap
from lazysched.solver.what_if import engine_shares
from lazysched.units import parse_bytes

SWEPT: dict[str, Tier] = {"gpu-memory": "gpu", "host-memory": "host", "nvme": "nvme"}
MAX_POINTS = 200


@dataclass(frozen=True)
class Sweep:
    """A range of budgets of one tier.

    Attributes:
        flag: the option of ``solve`` that is swept, without its dashes.
        budgets: bytes, ascending.
    """

    flag: str
    budgets: tuple[int, ...]

    @property
    def tier(self) -> Tier:
        """Whose budget is swept."""
        return SWEPT[self.flag]


@dataclass(frozen=True)
class Point:
    """One budget of a sweep.

    Attributes:
        budget_bytes: of the swept tier.
        plan: the fastest plan known within it, without its profile; None where there is none.
        binds: engine, and tier whose memory keeps the step from being shorter, as far as known, with a question mark
            where that is not proven; empty without a plan.
        missing_bytes: by which the swept budget would have to grow; None with a plan, or where growing it alone cannot
            help or was not worked out.
        status: ``optimal``, ``feasible``, ``infeasible``, ``time limit``, which is neither a plan nor a proof that
            there is none, or ``interrupted``, which may have a plan.
        recipes_s: fixed recipe that fits -> step in seconds.
    """

    budget_bytes: int
    plan: Plan | None
    binds: str
    missing_bytes: int | None
    status: str
    recipes_s: dict[str, float] = field(default_factory=dict)


def parse_sweep(text: str) -> Sweep:
    """The sweep of ``gpu-memory=8GB:80GB:8GB``: from, to (included) and step.

    Raises:
        UsageError: another form, an unknown resource, an empty range, or too many points.
    """
    flag, equals, span = text.partition("=")
    flag = flag.strip().replace("_", "-")
    parts = span.split(":")
    if not equals or len(parts) != 3:
        raise UsageError(f"--sweep: {text!r} is no sweep; write for example gpu-memory=8GB:80GB:8GB")
    if flag not in SWEPT:
        raise UsageError(f"--sweep: {flag!r} cannot be swept; use one of {', '.join(SWEPT)}")
    start, stop, step = (parse_bytes(part, "--sweep") for part in parts)
    if step <= 0:
        raise UsageError(f"--sweep: {text!r} has a step of {step}; give a positive size")
    if start <= 0 and SWEPT[flag] != "nvme":  # that can be done without
        raise UsageError(f"--sweep: {text!r} starts at {start}, which is no budget; start at a positive size")
    if start > stop:
        raise UsageError(f"--sweep: {text!r} starts above its end; write the smaller size first")
    count = (stop - start) // step + 1
    if count > MAX_POINTS:
        raise UsageError(f"--sweep: {text!r} has {count} points, at most {MAX_POINTS} are solved; give a larger step")
    return Sweep(flag, tuple(range(start, stop + 1, step)))


def run_sweep(
    profile: Profile,
    sweep: Sweep,
    settings: Mapping[str, Any],
    report: Callable[[int], None] | None = None,
) -> list[Point]:
    """Solve for every budget, on all cores.

    A plan that fits a budget fits larger ones: a point never has a slower plan or recipe than one before it, and what
    is proven for a larger budget is proven for it too.

    Args:
        profile: measurements.
        sweep: the budgets.
        settings: keyword arguments of ``solve``; the swept budget is put in.
        report: called with the number of points done.

    Raises:
        UsageError: a setting is wrong, or the profile lacks a figure.
        KeyboardInterrupt: Ctrl-C came before any budget was solved for; after that the others are ``interrupted``.
    """
    name = f"{sweep.flag.replace('-', '_')}_bytes"
    requests = [Request(profile, {**settings, name: budget}) for budget in sweep.budgets]
    answers = answer_until_interrupted(requests, report)
    plans = _fastest(answers, sweep, sought_gap(settings.get("gap")))
    recipes = accumulate((answer.recipes_s for answer in answers), _fastest_recipes)
    return [_point(profile, sweep, index, answers[index:], plans, recipes_s) for index, recipes_s in enumerate(recipes)]


def _fastest(answers: Sequence[Answer], sweep: Sweep, gap: float) -> list[Plan | None]:
    """For each budget the fastest plan of it and all smaller ones, with the highest bound of it and all larger ones."""
    of_larger = accumulate((_bound_s(answer) for answer in reversed(answers)), max)
    bounds = list(of_larger)[::-1]
    plans: list[Plan | None] = []
    best: Plan | None = None
    for found, budget, bound_s in zip(answers, sweep.budgets, bounds, strict=True):
        if best is None or (found.plan is not None and step_of(found.plan) < step_of(best)):
            best = found.plan
        plans.append(best and _held_against(best, found.plan or best, sweep.tier, budget, bound_s, gap))
    return plans


def _bound_s(answer: Answer) -> float:
    """No plan within the answer's budget is faster; 0 where nothing is known."""
    return 0.0 if answer.plan is None or answer.plan.solver is None else answer.plan.solver.bound_s


def _held_against(plan: Plan, solved: Plan, tier: Tier, budget: int, bound_s: float, gap: float) -> Plan:
    """``plan`` as that of another budget; ``solved`` is what its own solve found."""
    assert solved.solver is not None
    report = report_with(solved.solver, step_of(plan), bound_s, gap)
    return plan.model_copy(update={"budget_bytes": {**plan.budget_bytes, tier: budget}, "solver": report})


def _fastest_recipes(smaller: dict[str, float], own: dict[str, float]) -> dict[str, float]:
    return {name: min(steps[name] for steps in (smaller, own) if name in steps) for name in {**smaller, **own}}


def _point(
    profile: Profile, sweep: Sweep, index: int, from_here: Sequence[Answer], plans: Sequence[Plan | None],
    recipes_s: dict[str, float],
) -> Point:  # fmt: skip
    plan, budget, interrupted = plans[index], sweep.budgets[index], from_here[0].interrupted
    if plan is None:
        infeasible = any(answer.infeasible for answer in from_here)
        status = "infeasible" if infeasible else "interrupted" if interrupted else "time limit"
        return Point(budget, None, "", from_here[0].missing_bytes.get(sweep.tier), status, recipes_s)
    assert plan.solver is not None
    binds = _binds(profile, sweep, plan, plans[index + 1 :])
    return Point(budget, plan, binds, None, "interrupted" if interrupted else plan.solver.status, recipes_s)


def _binds(profile: Profile, sweep: Sweep, plan: Plan, larger: Sequence[Plan | None]) -> str:
    """The engine that most of the step follows, and the swept memory where a larger budget is faster.

    With a question mark where that is not proven: a plan as fast may exist within this budget.
    """
    assert plan.solver is not None
    engine = next(iter(engine_shares(plan, profile, step_of(plan))))
    best_s = min((step_of(other) for other in larger if other is not None), default=step_of(plan))
    if best_s >= step_of(plan):
        return engine
    return f"{engine}, {sweep.tier}{'' if best_s < plan.solver.bound_s else '?'}"


def step_of(plan: Plan) -> float:
    """Seconds of a step as predicted."""
    assert plan.predicted is not None
    return plan.predicted.step_s
