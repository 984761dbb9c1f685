"""Web pages that need nothing else: tables, and matplotlib's pictures embedded as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lazysched.errors import RunError

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1200px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; overflow-wrap: anywhere; } h2 { font-size: 1.15em; margin: 1.8em 0 .4em; }
.note { color: #666; margin: .2em 0 .8em; overflow-wrap: anywhere; } figure { margin: 0; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 760px; height: auto; }
table { border-collapse: collapse; } td, th { padding: .15em 1.2em .15em 0; text-align: left; vertical-align: top; }
th { font-weight: 600; }
td:last-child, th:last-child { padding-right: 0; }
.facts th { font-weight: 400; color: #666; } .facts td { overflow-wrap: anywhere; }
.facts th { min-width: 5.5em; }
.scroll { overflow-x: auto; } .scroll td, .scroll th { white-space: nowrap; }
"""
"""Pictures and wide tables scroll by themselves on a narrow screen, so that their text stays readable."""


def page(title: str, parts: Iterable[str], head: str = "<!DOCTYPE html>") -> str:
    """A page of ``parts``, which are HTML; ``title`` is text."""
    return (
        f'{head}\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def facts(rows: Mapping[str, str]) -> str:
    """A table of names and what is to be said of each."""
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f'<table class="facts">{cells}</table>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls where it is too wide."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def picture(height_inches: float, *draws: Callable[[Axes], None]) -> str:
    """What each of ``draws`` draws, side by side, as an SVG element."""
    figure = Figure(figsize=(13, height_inches), layout="constrained")
    for axes, draw in zip(figure.subplots(1, len(draws), squeeze=False)[0], draws, strict=True):
        draw(axes)
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "lazysched"}):  # the same numbers give the same page
        figure.savefig(buffer, format="svg", dpi=200, metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg )", "", buffer.getvalue(), flags=re.DOTALL)
    return f"<figure>{svg}</figure>"


def save_page(path: Path, text: str) -> None:
    """Write a page.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); name a file you may write") from None
