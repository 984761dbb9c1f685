"""Peaks of host memory while a run loads, saves and resumes; run as a program, so that nobody else's memory is in them.

Prints one JSON object: window -> bytes held before it, after it and at its peak (``VmHWM``, which is set back before);
and what they are judged by.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lazysched.runtime import checkpoint_folders, run, saving
from lazysched.runtime.loop import History
from lazysched.runtime.machine import peak_rss_bytes, reset_peaks, rss_bytes
from lazysched.runtime.session import Session
from lazysched.runtime.snapshot import snapshot_bytes
from lazysched.runtime.sources import resolve_model
from tests.end_to_end.small_runs import SmallRun

MAX_SHARD_BYTES = 60_000_000
STORE = {"weights", "grads", "state", "accumulator"}
NUM_STEPS, NUM_SAVES = 3, 36
found: dict[str, dict[str, int]] = {}


def begin(name: str) -> None:
    reset_peaks(torch.device("cpu"))
    found[name] = {"before": rss_bytes()}


def end(name: str) -> None:
    found[name] |= {"peak": peak_rss_bytes(), "after": rss_bytes()}


def measured(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def calling(*arguments: Any, **named: Any) -> Any:
        begin(name)
        result = call(*arguments, **named)
        end(name)
        return result

    return calling


def measure_saving_beside() -> None:
    """From before the copy until the checkpoint is there and the copy is gone; the next step runs meanwhile."""
    copy, finish = saving.snapshot, saving.Checkpoints.finish

    def copying(tensors: saving.Tensors) -> saving.Tensors:
        begin("save")
        return copy(tensors)

    def finishing(self: saving.Checkpoints) -> None:
        was_written = self._written is not None
        finish(self)
        if was_written:
            end("save")

    saving.snapshot = copying  # type: ignore[assignment]
    saving.Checkpoints.finish = finishing  # type: ignore[method-assign]


def measure_the_rest(way: str) -> None:
    fill = run.Run._fill

    def filling(self: run.Run, session: Session) -> None:
        tensors, buffers = session.tensors(), session.program.buffers.values()
        found["sizes"] = {
            "store": sum(buffer.num_bytes for buffer in buffers if buffer.kind in STORE),
            "tensor": max(4 * tensor.numel() for tensor in tensors.values()),
            "snapshot": snapshot_bytes(tensors),
            "shard": MAX_SHARD_BYTES,
        }
        measured("fill", fill)(self, session)

    run.Run._fill = filling  # type: ignore[method-assign]
    run.write_folder = measured("result", run.write_folder)
    run.Checkpoints = functools.partial(saving.Checkpoints, max_shard_bytes=MAX_SHARD_BYTES)  # type: ignore
    if "beside" not in way:
        saving.room_bytes = lambda session: 0
        checkpoint_folders.write_checkpoint = measured("save", checkpoint_folders.write_checkpoint)


def measure_each_save(held: list[int]) -> None:
    """What is held before each save, when the one before it is written."""
    check = saving.Checkpoints._check

    def checking(self: saving.Checkpoints, history: History) -> None:
        held.append(rss_bytes())
        check(self, history)

    saving.Checkpoints._check = checking  # type: ignore[method-assign]


def main(model: Path, data: Path, output: Path, way: str) -> None:
    """Train with a checkpoint after the second step, or go on from there; ``soak`` saves after each of many steps."""
    held: list[int] = []
    if way == "gguf":
        model = measured("convert", resolve_model)(str(model), output.parent / "cache").config_dir
    if way.startswith("soak"):
        measure_each_save(held)
    elif way == "beside":
        measure_saving_beside()
    measure_the_rest(way)
    small, num_steps = SmallRun(model, data), NUM_SAVES if way.startswith("soak") else NUM_STEPS
    options: dict[str, Any] = {"save_steps": num_steps - 1}
    if way == "resume":
        options = {"save_steps": num_steps, "resume": True}
    if way.startswith("soak"):
        options = {"save_steps": 1, "save_total_limit": 2}
    small.train(small.plan(), output, num_steps, **options)
    print(json.dumps(found | {"held": held}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
