"""Kills a run again and again and lets it go on; run as a program, so that forking meets no threads of pytest.

Children are forked from one process that has run once: importing would take longer than training. Half of them die at a
random moment by the clock, half within a random call that writes, where a file is left half-written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lazysched.runtime import checkpoint, checkpoint_folders, folders, saving, train
from lazysched.runtime.checkpoint_folders import checkpoint_steps
from lazysched.runtime.resuming import Checkpoint
from lazysched.schemas import Plan
from lazysched.step_rows import LOG_FILE, MEASURED, StepRow, rows_of
from tests.end_to_end.small_runs import SmallRun, log_of, weights_of

NUM_STEPS = 12
OPTIONS: dict[str, Any] = {"save_steps": 2, "save_total_limit": 3, "save_state_limit": 2}


class Saboteur:
    """Kills this process in the n-th call that writes; 0 only counts them."""

    def __init__(self, number: int, generator: random.Random) -> None:
        self.num_calls, self._number, self._generator = 0, number, generator
        for owner, name in (
            (checkpoint, "save_file"), (checkpoint, "sync"), (checkpoint_folders, "sync"), (folders, "sync"),
            (Path, "write_text"), (Path, "rename"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir"),
            (shutil, "rmtree"),
        ):  # fmt: skip
            setattr(owner, name, self._around(name, getattr(owner, name)))

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*arguments: Any, **named: Any) -> Any:
            self.num_calls += 1
            dies = self.num_calls == self._number
            if dies and name not in ("save_file", "write_text"):
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **named)
            if dies:
                path = arguments[1] if name == "save_file" else arguments[0]
                if size := path.stat().st_size:  # a file of the kernel has none
                    os.truncate(path, self._generator.randrange(size))
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return calling


def _known(row: StepRow) -> dict[str, Any]:
    """What does not depend on clocks and memory."""
    return {name: value for name, value in asdict(row).items() if name not in MEASURED}


def file_hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


class Driver:
    """The uninterrupted run, and the killed ones beside it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._run = SmallRun.make(folder)
        self._plans = [self._run.plan(), self._run.plan(tier="gpu", blocks="host")]
        self._whole, self._output = folder / "whole", folder / "out"
        self._random = random.Random(seed)
        self._run.train(self._plans[0], folder / "warm", 1)
        start_s = time.perf_counter()
        self._run.train(self._plans[0], self._whole, NUM_STEPS, save_steps=2, save_state_limit=NUM_STEPS)
        self._whole_s = time.perf_counter() - start_s
        self._whole_rows = rows_of((self._whole / LOG_FILE).read_text())
        self.counts = {"by_clock": 0, "while_writing": 0, "finished": 0, "resumed": 0, "skipped": 0}

    def child(self, plan: Plan, number: int, report: Path) -> None:
        """Train to the end, from a checkpoint if a whole one is there; what was chosen is checked by other means."""
        choose = train.choose_checkpoint

        def choosing(output: Path, resume: bool, path: str | None, console: Console) -> Checkpoint | None:
            chosen = choose(output, resume, path, console)
            if chosen is not None:
                whole = self._whole / f"checkpoint-{chosen.state.step}"
                assert file_hashes(chosen.path) == file_hashes(whole), f"{chosen.path} is torn"
                report.write_bytes(b"resumed\n" + b"skipped\n" * console.file.getvalue().count("skipped "))  # type: ignore[attr-defined]
            return chosen

        train.choose_checkpoint = choosing
        if number:
            Saboteur(number, self._random)
        can_resume = any((path / "manifest.json").is_file() for path in checkpoint_steps(self._output).values())
        console = Console(file=io.StringIO(), width=300)
        self._run.train(plan, self._output, NUM_STEPS, console=console, resume=can_resume, **OPTIONS)

    def fork(self, report: Path) -> bool:
        """Start a child and perhaps kill it; whether it was killed."""
        plan, waits = self._random.choice(self._plans), self._random.random() < 0.3
        by_clock = self._random.random() < 0.5
        number = 0 if by_clock else self._random.randrange(1, 120)
        process = os.fork()
        if process == 0:
            try:
                if waits:  # while checkpoints are written; else they come from a thread
                    saving.room_bytes = lambda session: 0
                folders.undo_cut_swap(self._output)  # as ``train`` does first; here it is asked what there is to resume
                self.child(plan, number, report)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if by_clock:
            time.sleep(self._random.uniform(0, self._whole_s))
            os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        assert status in (0, signal.SIGKILL), f"a child failed: {status}"
        kind = "finished" if status == 0 else "by_clock" if by_clock else "while_writing"
        self.counts[kind] += 1
        for word in report.read_text().split() if report.exists() else ():
            self.counts[word] += 1
        report.unlink(missing_ok=True)
        self.check_log()
        return status != 0

    def check_log(self) -> None:
        """Wherever it was cut, the log that is there holds the first steps of the uninterrupted run, each once."""
        log = self._output / LOG_FILE
        if log.exists():
            rows = rows_of(log.read_text())
            assert [_known(row) for row in rows] == [_known(row) for row in self._whole_rows[: len(rows)]]

    def check_end(self) -> None:
        """The finished run is the uninterrupted one."""
        assert weights_of(self._output) == weights_of(self._whole)
        assert log_of(self._output) == log_of(self._whole)
        entries = {entry.name for entry in self._output.parent.iterdir()}
        assert entries == {"model", "data.jsonl", "warm", "whole", "out"}, entries
        assert not [*self._output.glob("tmp-*")]
        shutil.rmtree(self._output)

    def kill(self, num_kills: int) -> None:
        """Kill runs so often, and check each that comes to its end between."""
        report = self._output.with_name("report")
        while self.counts["by_clock"] + self.counts["while_writing"] < num_kills or self._output.exists():
            if not self.fork(report):
                self.check_end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    driver = Driver(Path(sys.argv[1]), int(sys.argv[2]))
    driver.kill(int(sys.argv[3]))
    print(json.dumps(driver.counts))
