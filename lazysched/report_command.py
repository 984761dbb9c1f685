"""The command ``report``, and the report that ends a training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lazysched.errors import LazyschedError, UsageError
from lazysched.lines import say
from lazysched.outputs import require_folder_of, require_no_input, require_page
from lazysched.schemas.run import REPORT_FILE


def report(
    folder: Annotated[Path, typer.Argument(metavar="OUTPUT_DIR", help="Of a run, finished or not.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="HTML page to write. [OUTPUT_DIR/report.html]", show_default=False),
    ] = None,
) -> None:
    """Show a run as one page: loss, pace, memory, predicted and measured, a step on the engines, the plan."""
    target = folder / REPORT_FILE if output is None else output
    if output is not None:
        require_folder_of(output)
        require_no_input(output, {"OUTPUT_DIR": folder})
        require_page(output)
    _save(target, folder)
    typer.echo(f"wrote {target}")


def end_report(folder: Path, console: Console) -> None:
    """Write the page into the folder of a run that has just ended, and say where, or why there is none."""
    try:
        _save(folder / REPORT_FILE, folder)
    except LazyschedError as error:
        say(console, f"no report: {error}, then lazysched report {folder}")
        return
    except Exception as error:  # the model is saved: a fault of ours in a picture must not make the run one that failed
        say(console, f"no report: {type(error).__name__}: {error}; the model is saved, please tell us")
        return
    say(console, f"report: {folder / REPORT_FILE}")


def _save(target: Path, folder: Path) -> None:
    try:
        from lazysched.report_page import save_report
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise UsageError("matplotlib is not installed; run pip install 'lazysched[plot]'") from None
    save_report(target, folder)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(report)
