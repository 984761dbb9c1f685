"""Names of files and models are shown as they are, whatever rich would make of them."""

from __future__ import annotations

import pytest
from rich.console import Console

from lazysched.lines import say, warn


@pytest.mark.parametrize("name", ["reg:100:", "a:x:b", "[bold]b[/bold]", "12 of 12", "x" * 200])
def test_lines_are_shown_as_they_are(name: str) -> None:
    console = Console(record=True, width=40)
    say(console, name)
    warn(console, name)
    assert console.export_text() == f"{name}\nwarning: {name}\n"
