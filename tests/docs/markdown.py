"""What the documents hold: fenced blocks, the commands in them, prose, headings, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
"""Documents whose commands are run."""
LINKED = sorted({*RUN, *ROOT.glob("*.md")})
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Fenced text of one language, at ``place`` as ``README.md:12``."""

    place: str
    language: str
    text: str


def blocks(document: Path) -> list[Block]:
    """In order."""
    text = document.read_text(encoding="utf-8")
    return [
        Block(f"{document.name}:{text.count(chr(10), 0, found.start()) + 1}", found[1], found[2])
        for found in FENCED.finditer(text)
    ]


def commands(block: Block) -> Iterator[list[str]]:
    """Words of every command of a ``bash`` block; comments are left out."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def prose(document: Path) -> str:
    """All but the fenced blocks, with as many lines as before."""
    text = document.read_text(encoding="utf-8")
    return FENCED.sub(lambda found: "\n" * found[0].count("\n"), text)


def code_spans(document: Path) -> list[str]:
    """What stands between single backquotes, in one line each."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(document))]


def links(document: Path) -> list[str]:
    """Targets of links and pictures; code is left out."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]+`", "", prose(document)))


def anchors(document: Path) -> set[str]:
    """Headings as the addresses that GitHub gives them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
