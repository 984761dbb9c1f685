"""Commands that look at plans: ``explain``, ``simulate``, ``compare``; and solving for many budgets or batches.

As in ``lazysched.cli``, files are read first and what computes is imported only then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lazysched.errors import UsageError, short_repr
from lazysched.file_options import say_if_not_executable
from lazysched.lines import plain_console, say
from lazysched.outputs import require_folder_of, require_no_input
from lazysched.schemas import Plan, Profile
from lazysched.schemas.base import is_a, read_data

if TYPE_CHECKING:
    from lazysched.solver.batch_size import BestBatch, TriedBatch
    from lazysched.solver.sweep import Sweep

PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="What `lazysched solve` wrote.")]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="PROFILE", help="Of another machine, or a plan that carries one. [the one of PLAN]"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of words.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    for command in (explain, simulate, compare):
        app.command()(command)


def explain(
    plan: PlanArgument,
    profile_file: ProfileOption = None,
    time_limit: Annotated[
        float, typer.Option(min=0, help="Seconds for each solve with a little more of something; 0 solves nothing.")
    ] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Say what binds, what a little more would buy, what each decision costs, and where compute waits."""
    schedule, measured = _plan_and_profile(plan, profile_file)
    from lazysched.solver.explain import explain as explain_plan
    from lazysched.solver.explain_report import print_explanation

    with plain_console(stderr=True).status("solving with a little more of each"):
        explanation = explain_plan(schedule, measured, time_limit_s=time_limit)
    if as_json:
        typer.echo(explanation.model_dump_json(indent=1))
    else:
        print_explanation(explanation, plain_console())


def simulate(
    plan: PlanArgument,
    profile_file: ProfileOption = None,
    trace: Annotated[
        Path | None, typer.Option(help="File for the timeline; opens in Perfetto and chrome://tracing.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict time and memory of PLAN as it stands, edited by hand or not; exit code 1 where it does not fit."""
    schedule, measured = _plan_and_profile(plan, profile_file)
    if trace is not None:
        require_folder_of(trace, "--trace")
        require_no_input(trace, {"PLAN": plan, "--profile": profile_file}, "--trace")
    from lazysched.chrome_trace import save_chrome_trace
    from lazysched.solver.decision_costs import base_of
    from lazysched.solver.simulate_report import print_simulation, simulation

    base = base_of(schedule, measured)
    found = simulation(schedule, measured, base.timeline)
    if trace is not None:
        save_chrome_trace(trace, base.program, base.timeline.intervals)
    if as_json:
        typer.echo(found.model_dump_json(indent=1))
    else:
        console = plain_console()
        print_simulation(found, console, other_profile=measured != schedule.profile)
        if trace is not None:
            console.print(f"wrote {trace}", highlight=False, markup=False)
    if found.over_bytes:
        raise typer.Exit(1)


def compare(
    plan_a: Annotated[Path, typer.Argument(metavar="PLAN_A", help="What `lazysched solve` wrote.")],
    plan_b: Annotated[Path, typer.Argument(metavar="PLAN_B", help="Another one, set against it.")],
    as_json: JsonOption = False,
) -> None:
    """Set decisions and predictions of two plans for one model side by side."""
    plans = [Plan.load(path) for path in (plan_a, plan_b)]
    from lazysched.solver.compare import compare as compare_plans
    from lazysched.solver.compare import print_comparison

    found = compare_plans(*plans)
    if as_json:
        typer.echo(found.model_dump_json(indent=1))
    else:
        names = (plan_a.name, plan_b.name) if plan_a.name != plan_b.name else (str(plan_a), str(plan_b))
        print_comparison(found, names, plain_console())


def _plan_and_profile(plan_file: Path, profile_file: Path | None) -> tuple[Plan, Profile]:
    plan = Plan.load(plan_file)
    profile = plan.profile if profile_file is None else profile_in(profile_file)
    if profile is None:
        raise UsageError(f"{plan_file}: profile: null, as in a plan written by hand; name one with --profile")
    return plan, profile


def profile_in(path: Path) -> Profile:
    """The profile in a file, or the one that the plan there carries.

    Raises:
        UsageError: the file holds neither.
    """
    data = read_data(path)
    if not is_a("Plan", data):
        return Profile.check(data, str(path))
    profile = Plan.check(data, str(path)).profile
    if profile is None:
        raise UsageError(f"--profile: {path}: is a plan without a profile, as written by hand; name a profile")
    return profile


# ---- solving many times


def parse_batch_size(text: str) -> int | None:
    """Rows of a step; None for ``auto``.

    Raises:
        UsageError: neither a positive number nor ``auto``.
    """
    if text == "auto":
        return None
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
        raise UsageError(f"--batch-size: {short_repr(text)} is no number of rows; give 1 or more, or auto")
    return int(text)


def parse_sweep_option(text: str | None, rows: int | None, given: Mapping[str, str | None]) -> Sweep | None:
    """The sweep that ``--sweep`` asks for; None without one.

    Args:
        text: as written.
        rows: of a step; None for ``auto``.
        given: option that can be swept, without its dashes -> what it was set to.

    Raises:
        UsageError: it cannot be read, or another option contradicts it.
    """
    if text is None:
        return None
    from lazysched.solver.sweep import parse_sweep

    sweep = parse_sweep(text)
    if rows is None:
        raise UsageError("--batch-size: auto means nothing with --sweep; give a number of rows")
    if given[sweep.flag] is not None:
        raise UsageError(f"--{sweep.flag}: means nothing where --sweep sets it; leave one of them out")
    return sweep


def table_file(output: Path) -> Path:
    """Where the table of a sweep is written, beside ``output`` or, where that is a CSV, in its place."""
    return output.with_suffix(".csv")


def solve_sweep(profile: Profile, sweep: Sweep, settings: Mapping[str, Any], output: Path, console: Console) -> None:
    """Solve for every budget, show the frontier, write the CSV and, unless ``output`` is one, the fastest plan."""
    from lazysched.solver.frontier import best_of, frontier_table, save_frontier
    from lazysched.solver.sweep import run_sweep

    count = len(sweep.budgets)
    with plain_console(stderr=True).status(f"solving for {count} budgets") as status:
        points = run_sweep(
            profile, sweep, settings, lambda done: status.update(f"solved for {done} of {count} budgets")
        )
    table = table_file(output)
    save_frontier(table, points)
    written, plan = [table], None
    try:
        if output != table:
            plan = best_of(points)
            plan.model_copy(update={"profile": profile}).save(output)
            written.append(output)
    finally:  # where nothing fits, the table says so
        console.print(frontier_table(sweep, points))
    if plan is not None:
        say_if_not_executable(plan, console)
    console.print(f"wrote {', '.join(map(str, written))}", highlight=False, markup=False)


def solve_batches(profile: Profile, settings: Mapping[str, Any], console: Console) -> BestBatch:
    """Look for the batch of the largest throughput and say on ``console`` what was tried."""
    from lazysched.solver.batch_size import largest_throughput

    def tell(tried: TriedBatch) -> None:
        found = tried.problem
        if tried.tokens_per_s is not None and tried.most_tokens_per_s is not None:
            gap = 1 - tried.tokens_per_s / tried.most_tokens_per_s
            found = f"{tried.tokens_per_s:,.0f} tokens/s, within {100 * gap:.1f} % of the bound"
        console.print(f"batch of {tried.batch_size}: {found}", highlight=False, markup=False, soft_wrap=True)

    return largest_throughput(profile, settings, tell)


def say_batch(best: BestBatch, console: Console) -> None:
    """Say which batch is taken, and why no larger one was tried."""
    from lazysched.solver.batch_size import MIN_GAIN

    rows = best.solution.plan.batch_size
    least = f", the smallest batch within {100 * MIN_GAIN:.0f} % of the most tokens a second"
    say(console, f"batch: {rows} {'row' if rows == 1 else 'rows'}{least if len(best.tried) > 1 else ''}")
    say(console, f"stopped at a batch of {best.tried[-1].batch_size}: {best.stopped}")
