"""The command ``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lazysched.errors import UsageError
from lazysched.outputs import require_folder_of, require_no_input, require_page
from lazysched.plan_commands import profile_in
from lazysched.schemas import Plan


def plot(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="What `lazysched solve` wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML page to write.")],
    profile_file: Annotated[
        Path | None,
        typer.Option(
            "--profile", metavar="PROFILE", help="Of another machine, or a plan that carries one. [the one of PLAN]"
        ),
    ] = None,
) -> None:
    """Draw a plan as one page: a step on the engines, memory over time, decisions by stage."""
    require_folder_of(output)
    require_no_input(output, {"PLAN": plan_file, "--profile": profile_file})
    require_page(output)
    plan = Plan.load(plan_file)
    profile = None if profile_file is None else profile_in(profile_file)
    try:
        from lazysched.plan_page import save_plan_page
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise UsageError(
            "plot: matplotlib is not installed; run pip install 'lazysched[plot]', in a clone pip install -e '.[plot]'"
        ) from None
    save_plan_page(output, plan, profile)
    typer.echo(f"wrote {output}")


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(plot)
