"""What the documents name exists: files, headings, options, commands, settings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.markdown import LINKED, ROOT, RUN, anchors, code_spans, links, prose
from tests.docs.options import COMMANDS, OPTION, check_options

NOT_OURS = {
    "--ulimit", "--case",
}  # fmt: skip
"""Options of docker and of the benchmarks."""


documents = pytest.mark.parametrize("document", RUN, ids=lambda path: path.name)


@pytest.mark.parametrize("document", LINKED, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        if link.startswith(("https://", "http://")):
            continue
        name, _, heading = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{document.name}: {link}: no such file"
        assert target.is_relative_to(ROOT), f"{document.name}: {link} is outside of the checkout"
        assert not heading or heading in anchors(target), f"{document.name}: {link}: no such heading"


@documents
def test_options_in_prose_exist(document: Path) -> None:
    known = set().union(*COMMANDS.values()) | NOT_OURS
    for number, line in enumerate(prose(document).splitlines(), 1):
        unknown = set(OPTION.findall(line)) - known
        assert not unknown, f"{document.name}:{number}: {unknown}: no option"


@documents
def test_commands_in_prose_have_these_options(document: Path) -> None:
    for span in code_spans(document):
        if span.startswith("lazysched "):
            check_options(span, document.name)


def test_every_document_is_linked_from_the_readme() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md") if "://" not in link}
    assert set((ROOT / "docs").glob("*.md")) <= linked


def test_messages_in_the_tables_of_symptoms_are_those_of_the_program() -> None:
    """Between the dots of ``no plan fits …: +…`` stands what some string of the sources holds."""
    known = "\n".join(_strings())
    for row in re.findall(r"^\| (.+?) \|", prose(ROOT / "docs" / "troubleshooting.md"), re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", row):
            parts = [part.strip(" ,:") for part in message.split("…")]
            missing = [part for part in parts if len(part) > 3 and part not in known]
            assert not missing, f"{message}: nothing says {missing}"


def _strings() -> Iterator[str]:
    """Every string of the sources, those in parts put together as Python does."""
    for room in ("lazysched", "runtime", "solver", "profiles"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
