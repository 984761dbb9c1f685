"""The commands ``data prepare`` and ``data preview``: tokenise ahead, and see what would be trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lazysched.lines import plain_console
from lazysched.units import parse_slice

if TYPE_CHECKING:
    from lazysched.runtime.data import Dataset

DATA_HELP = "JSON, JSONL, CSV or Parquet file, FOLDER:NAME of a dataset_info.json, or a hub name."
DataOption = Annotated[str, typer.Option(help=DATA_HELP)]
ModelOption = Annotated[str, typer.Option(help="Folder, hub name or GGUF file; only its tokenizer is used.")]
SeqLenOption = Annotated[int, typer.Option(min=1, help="Tokens of a row at most, as profiled.")]
FormatOption = Annotated[
    str | None, typer.Option(help="Format of the rows, where their columns fit more than one. [by the columns]")
]
CacheOption = Annotated[
    Path | None, typer.Option(help="Folder for tokens. [$LAZYSCHED_TOKENS, else the user's cache, where train looks]")
]

app = typer.Typer(rich_markup_mode=None, help="Look at training data and tokenise it ahead.")


@app.command()
def prepare(
    data: DataOption,
    model: ModelOption,
    seq_len: SeqLenOption = 1024,
    data_format: FormatOption = None,
    cache_dir: CacheOption = None,
) -> None:
    """Tokenise DATA for MODEL, so that training begins at once, and say where the tokens are."""
    dataset, _ = _load(data, model, seq_len, data_format, cache_dir)
    _print(plain_console(), dataset, data)


@app.command()
def preview(
    data: DataOption,
    model: ModelOption,
    seq_len: SeqLenOption = 1024,
    num_rows: Annotated[int, typer.Option(min=0, help="The first so many rows.")] = 3,
    rows: Annotated[
        str | None,
        typer.Option(metavar="FROM:TO", help="Which rows, counted from 1, TO left out. [the first NUM_ROWS]"),
    ] = None,
    data_format: FormatOption = None,
    cache_dir: CacheOption = None,
) -> None:
    """Print tokens of some rows of DATA, a line a run: + those that are trained, - the others; and counts of all."""
    asked = None if rows is None else parse_slice(rows, "--rows")
    dataset, tokenizer = _load(data, model, seq_len, data_format, cache_dir)
    from lazysched.runtime.data.preview import preview_rows, print_preview

    console = plain_console()
    if asked is not None or num_rows:
        print_preview(dataset, preview_rows(dataset, asked, num_rows), tokenizer, console)
    _print(console, dataset, data)


def _load(data: str, model: str, seq_len: int, data_format: str | None, cache_dir: Path | None) -> tuple[Dataset, Any]:
    from lazysched.runtime.data import Dataset
    from lazysched.runtime.data.sources import resolve_data
    from lazysched.runtime.data.tokenizer import load_tokenizer
    from lazysched.runtime.sources import resolve_model

    resolve_data(data, data_format)  # a wrong name is refused before a model is fetched
    tokenizer = load_tokenizer(resolve_model(model))
    return Dataset.load(data, tokenizer, seq_len, data_format=data_format, cache_dir=cache_dir), tokenizer


def _print(console: Console, dataset: Dataset, data: str) -> None:
    from lazysched.runtime.data.preview import length_line

    for line in (f"{data}: {dataset.report.summary()}", length_line(dataset), f"tokens: {dataset.folder}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def register(parent: typer.Typer) -> None:
    """Add the commands to ``parent``."""
    parent.add_typer(app, name="data")
