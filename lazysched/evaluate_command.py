"""The command ``evaluate``: exact match of generated answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lazysched import data_commands
from lazysched.lines import plain_console, warn
from lazysched.outputs import require_folder_of, require_no_input


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(evaluate)


def evaluate(
    model: Annotated[str, typer.Option(help="Folder or hub name of a model with weights.")],
    data: data_commands.DataOption,
    data_format: data_commands.FormatOption = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="The first so many rows. [all]")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that are answered at once.")] = 8,
    device: Annotated[
        Literal["auto", "cuda", "cpu"], typer.Option(help="What computes; auto takes the GPU if there is one.")
    ] = "auto",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSONL file for all answers.")] = None,
) -> None:
    """Let MODEL answer the questions of DATA and count answers whose last number is the reference's (GSM8K's rule)."""
    if output is not None:
        require_folder_of(output)
        require_no_input(output, {"--data": data, "--model": model})
    from lazysched.runtime.exact_match import exact_match

    console, progress = plain_console(), plain_console(stderr=True)

    def report(done: int, right: int) -> None:
        progress.print(f"{done} rows answered, {right} right", highlight=False)

    found = exact_match(
        model, data, data_format=data_format, max_rows=max_rows, max_new_tokens=max_new_tokens, batch_size=batch_size,
        device=None if device == "auto" else device, report=report,
    )  # fmt: skip
    if output is not None:
        found.save(output)  # before anything is said: whoever reads the output may go away
    total = len(found.answers)
    share = f" ({found.num_right / total:.1%})" if total else ""
    console.print(f"exact match: {found.num_right} of {total}{share}", highlight=False)
    if found.num_cut:
        warn(console, f"{found.num_cut} of {total} answers were cut at --max-new-tokens {max_new_tokens}; give more")
    if output is not None:
        console.print(f"wrote {output}", highlight=False, markup=False)
