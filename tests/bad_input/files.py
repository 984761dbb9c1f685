"""A whole set of good input, made once, and copies of it that tests may spoil."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazysched.cli import main
from lazysched.profiles.library_files import load_hardware
from tests.end_to_end.tiny_folder import make_data, make_model


@dataclass(frozen=True)
class Files:
    """A model with its profile and plan, data that fit, and a run of three steps that saved after two."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def profile(self) -> Path:
        return self.root / "profile.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def data(self) -> Path:
        return self.root / "data.jsonl"

    @property
    def sums(self) -> Path:
        """Questions whose answers are numbers."""
        return self.root / "sums.jsonl"

    @property
    def hardware(self) -> Path:
        return self.root / "machine.yaml"

    @property
    def run(self) -> Path:
        """Output folder of the run; its checkpoint is ``checkpoint-2``."""
        return self.root / "run"

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoint-2"

    @property
    def output(self) -> Path:
        """Nothing lies there."""
        return self.root / "out"

    @property
    def settings(self) -> Path:
        """A configuration file of ``train``; nothing lies there."""
        return self.root / "settings.yaml"

    def names(self) -> dict[str, str]:
        """What commands are written with."""
        found = {
            "model": self.model, "profile": self.profile, "plan": self.plan, "data": self.data, "sums": self.sums,
            "run": self.run,
            "hardware": self.hardware, "checkpoint": self.checkpoint, "out": self.output, "settings": self.settings,
            "root": self.root,
        }  # fmt: skip
        return {name: str(path) for name, path in found.items()}

    def copied_to(self, folder: Path) -> Files:
        """The same in ``folder``."""
        shutil.copytree(self.root, folder, dirs_exist_ok=True)
        return Files(folder)


def prepare(folder: Path) -> Files:
    """Make everything in ``folder``, through the commands."""
    files = Files(folder)
    make_model(files.model)
    make_data(files.data)
    files.sums.write_text(json.dumps({"question": "what is 1 plus 1", "answer": "#### 2"}) + "\n")
    load_hardware("rtx4090").save(files.hardware)
    commands = [
        "profile {model} --device cpu --seq-len 24 --micro-batch 2 -o {profile}",
        "solve {profile} --batch-size 4 -o {plan}",
        "train --plan {plan} --model {model} --data {data} --output-dir {run} --device cpu --max-steps 3"
        " --save-steps 2",
    ]
    for command in commands:
        assert main([part.format_map(files.names()) for part in command.split()]) == 0
    return files


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let ``change`` work on the JSON object in a file."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
