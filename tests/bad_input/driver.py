"""One row of bad input, and what must hold of every row: exit code, one line, its words, nothing left behind."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from lazysched.cli import main
from tests.bad_input.files import Files

TRAIN = "train --plan {plan} --model {model} --data {data} --output-dir {out} --device cpu --max-steps 2"
PROFILE = "profile {model} --device cpu --seq-len 8 --micro-batch 1 -o {root}/new.json"
SOLVE = "solve {profile} --batch-size 4 -o {root}/new.json"
ESTIMATE = "solve --hardware {hardware} --model {model}/config.json --batch-size 8 -o {root}/new.json"
PREPARE = "data prepare --data {data} --model {model} --seq-len 24"
EVALUATE = "evaluate --model {model} --data {sums} --device cpu --max-new-tokens 2 --max-rows 2"
RESUME = "train --plan {plan} --model {model} --data {data} --output-dir {run} --device cpu --max-steps 4 --resume"


def _nothing(_files: Files) -> None:
    pass


@dataclass(frozen=True)
class Bad:
    """A row: what is made, the command, and what is expected.

    Attributes:
        name: of the test.
        command: with ``{model}`` and the like, see ``Files.names``.
        words: the message holds each of them, the places of files written as in ``command``.
        spoil: works on copies of good input.
        code: exit code.
        shown: what stdout begins with; most rows fail before anything is shown.
    """

    name: str
    command: str
    words: tuple[str, ...]
    spoil: Callable[[Files], object] = _nothing
    code: int = 2
    shown: str | None = None


def parametrized(rows: Sequence[Bad]) -> pytest.MarkDecorator:
    """The test runs once for each row, under the row's name."""
    names = [row.name for row in rows]
    assert len(set(names)) == len(names), "two rows have one name"
    return pytest.mark.parametrize("row", rows, ids=names)


def run(command: str, files: Files) -> int:
    """The command in this process, with the places of ``files``."""
    return main([part.format_map(files.names()) for part in shlex.split(command)])


def listing(folder: Path) -> dict[str, str]:
    """Everything in a folder -> hash of its bytes, where a link leads, or nothing for a folder."""
    return {str(path.relative_to(folder)): _content(path) for path in sorted(folder.rglob("*"))}


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"-> {path.readlink()}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def check(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> str:
    """Run a row and hold it against what it expects; returns the message."""
    row.spoil(files)
    before = listing(files.root)
    capfd.readouterr()  # what transformers shows while it writes a model
    code = run(row.command, files)
    shown, errors = capfd.readouterr()
    message = one_line(errors)
    assert code == row.code, message
    missing = [word for word in _placed(row.words, files) if word not in message]
    assert not missing, f"{missing} is missing in: {message}"
    expected = _placed([row.shown or ""], files)[0]
    assert shown.startswith(expected) if expected else shown == "", shown
    assert listing(files.root) == before
    return message


def _placed(words: Iterable[str], files: Files) -> list[str]:
    return [_replaced(word, files.names()) for word in words]


def _replaced(word: str, names: dict[str, str]) -> str:
    for name, place in names.items():
        word = word.replace(f"{{{name}}}", place)
    return word


def one_line(errors: str) -> str:
    """What stands on stderr: exactly one line, no traceback, and a remedy after the last semicolon or colon."""
    lines = errors.strip().splitlines()
    assert len(lines) == 1, errors
    assert lines[0].startswith("error: ")
    assert "Traceback" not in lines[0]
    return lines[0]
