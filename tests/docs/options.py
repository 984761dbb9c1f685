"""What options every command has."""

from __future__ import annotations

import re
from typing import Any

import typer.main

from lazysched.cli import app

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def options_by_command(command: Any, name: str = "lazysched") -> dict[str, set[str]]:
    """``lazysched data preview`` -> its options, for every command."""
    own = {option for item in command.params for option in (*item.opts, *item.secondary_opts)} | {"--help"}
    found = {name: own}
    for word, sub in getattr(command, "commands", {}).items():
        found |= options_by_command(sub, f"{name} {word}")
    return found


COMMANDS = options_by_command(typer.main.get_command(app))


def check_options(command: str, where: str) -> None:
    """That a command of ours exists and has the options that stand behind it."""
    words = command.split()
    name = next((key for n in (3, 2) if (key := " ".join(words[:n])) in COMMANDS), None)
    assert name is not None, f"{where}: {command}: no command"
    unknown = set(OPTION.findall(command)) - COMMANDS[name]
    assert not unknown, f"{where}: {command}: {name} has no {unknown}"
