"""The command ``doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lazysched.errors import UsageError
from lazysched.lines import plain_console


def doctor(
    folder: Annotated[
        Path, typer.Option("--dir", metavar="FOLDER", help="Where training would write; its disk is looked at.")
    ] = Path("."),
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A model's folder, whose tokenizer is looked at too.")
    ] = None,
    device: Annotated[
        Literal["auto", "cuda", "cpu"],
        typer.Option(help="What shall compute; with auto a machine without any GPU is no problem, with cuda it is."),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    allow_unknown: Annotated[
        bool, typer.Option("--allow-unknown", help="Exit with 0 where something could not be looked at.")
    ] = False,
) -> None:
    """Look at what training needs of this machine, and say what to mend. Exit code: 0 all ok, 1 not, 2 wrong usage."""
    if not folder.is_dir():
        raise UsageError(f"--dir: {folder} is no folder; make it, or name another")
    if model is not None and not (model / "config.json").is_file():
        raise UsageError(f"--model: {model} holds no config.json; name the folder of a model")
    from lazysched.doctor.examine import examine
    from lazysched.doctor.report import print_report
    from lazysched.doctor.scene import Scene

    with plain_console(stderr=True).status("looking at this machine"):
        report = examine(Scene(folder, model, device))
    if as_json:
        typer.echo(report.model_dump_json(indent=1))
    else:
        print_report(report, plain_console())
    raise typer.Exit(report.exit_code(allow_unknown=allow_unknown))


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(doctor)
