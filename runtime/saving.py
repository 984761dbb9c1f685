"""Checkpoints while a run trains: when one is due, what goes into it, and what a full disk does to the run: nothing."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from rich.console import Console

from lazysched.errors import LazyschedError, RunError, UsageError
from lazysched.lines import say, warn
from lazysched.runtime import checkpoint_folders
from lazysched.runtime.checkpoint import MAX_SHARD_BYTES, write_model, write_shards
from lazysched.runtime.folders import STATE_FILE
from lazysched.runtime.loop import History
from lazysched.runtime.session import Session
from lazysched.runtime.snapshot import room_bytes, snapshot, snapshot_bytes
from lazysched.runtime.training_state import TrainingState
from lazysched.step_rows import LOG_FILE
from lazysched.units import format_bytes

WRITER_NICENESS = 10
"""Of the thread that writes beside training: about a tenth of a core that others want too."""
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SavingPolicy:
    """When checkpoints are saved and how many stay.

    Attributes:
        save_steps: steps between two; 0 saves none but when the run is stopped.
        save_total_limit: how many stay; None keeps all.
        save_state_limit: how many keep their optimizer state; older ones keep the model.

    Raises:
        UsageError: a number is out of range.
    """

    save_steps: int = 500
    save_total_limit: int | None = None
    save_state_limit: int = 2

    def __post_init__(self) -> None:
        if self.save_steps < 0:
            raise UsageError(f"save_steps: {self.save_steps} is out of range; give 0 or more")
        for name, value in (("save_total_limit", self.save_total_limit), ("save_state_limit", self.save_state_limit)):
            if value is not None and value < 1:
                raise UsageError(f"{name}: {value} is out of range; give a number above 0")

    def is_due(self, num_done: int) -> bool:
        """Whether a checkpoint is to be saved after so many steps."""
        return self.save_steps > 0 and num_done % self.save_steps == 0


class Checkpoints:
    """Saves the checkpoints of one run, beside training where host memory has room for a copy of what they hold.

    One is written at a time: the next, and the end of the context, wait for it.

    Args:
        session: of the run, drained whenever something is saved.
        folder: where they go; its parent exists.
        source_dir: where tokenizer, chat template and generation_config.json come from.
        policy: which stay.
        state_of: history -> what the checkpoint says of the run.
        console: where a failure is told.
        last: the checkpoint that the run goes on from.
        max_shard_bytes: of a file; without a copy, so much host memory is taken where tensors lie on a GPU.
    """

    def __init__(
        self,
        session: Session,
        folder: Path,
        source_dir: Path,
        policy: SavingPolicy,
        state_of: Callable[[History], TrainingState],
        console: Console,
        *,
        last: Path | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self._session, self._folder, self._source_dir, self._policy = session, folder, source_dir, policy
        self._state_of, self._console, self._max_shard_bytes = state_of, console, max_shard_bytes
        self.last = last
        """The newest valid checkpoint of the run."""
        self.snapshot_bytes = 0
        """Host memory that a copy took."""
        self._last_step: int | None = None
        self._writer = ThreadPoolExecutor(1, "lazysched-save", initializer=_give_way)
        self._written: Future[None] | None = None
        self._ends_at_once = threading.Event()
        self._says_it_waits = False

    @property
    def model_bytes(self) -> int:
        """Bytes of the weights in a checkpoint, or in the result."""
        return self._session.model.dtype.itemsize * sum(math.prod(s) for _, s in self._session.weight_names())

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors in a checkpoint."""
        return self.model_bytes + sum(size for _, size in self._session.state_names())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for what is being written; after Ctrl-C give it up instead, with nothing of it left."""
        if kind is not None and not issubclass(kind, Exception):
            self._ends_at_once.set()
        try:
            self.finish()
        except _GivenUpError:
            pass
        finally:
            self._writer.shutdown()

    def say_how(self) -> None:
        """Tell whether training will go on while checkpoints are written."""
        lacking = self._lacking()
        self._says_it_waits = lacking is not None
        how = "copied in memory and written while training goes on"
        say(
            self._console,
            f"checkpoints: {format_bytes(self.num_bytes)} each, "
            f"{how if lacking is None else f'training waits while one is written ({lacking})'}",
        )

    def save(self, history: History) -> None:
        """Save a checkpoint, then prune old ones; a failure is told in one line and changes nothing else.

        Does nothing where this step is saved already. Where there is no room for a copy, it is written on return.
        """
        write = self._prepared(history)
        if write is None:
            return
        tensors = self._session.tensors()
        copies = self._copied(history.num_done, tensors)
        if copies is None:
            write(tensors)
        else:
            self._written = self._writer.submit(_write_from, copies, write)

    def save_now(self, history: History) -> None:
        """The same, written on return and without a copy: for when training ends here."""
        write = self._prepared(history)
        if write is not None:
            write(self._session.tensors())

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _copied(self, step: int, tensors: Tensors) -> dict[str, torch.Tensor] | None:
        """Copies of ``tensors``; None where there is no room for them, which is told if it was not yet."""
        lacking = self._lacking()
        if lacking is None:
            try:
                copies = snapshot(tensors)
                self.snapshot_bytes = snapshot_bytes(tensors)
                return copies
            except RunError as error:  # the system may count memory otherwise
                lacking = _reason(error)
        if not self._says_it_waits:
            say(self._console, f"checkpoint-{step}: training waits while it is written ({lacking})")
        self._says_it_waits = True
        return None

    def _lacking(self) -> str | None:
        """Why nothing can be copied; None where it can."""
        needed_bytes, has_bytes = snapshot_bytes(self._session.tensors()), room_bytes(self._session)
        if needed_bytes <= has_bytes:
            return None
        return f"a copy needs {format_bytes(needed_bytes)} of host memory, {format_bytes(has_bytes)} are left for it"

    def _prepared(self, history: History) -> Callable[[Tensors], None] | None:
        """What writes the checkpoint of now, given its tensors; None where there is none to write."""
        self.finish()
        if history.num_done == self._last_step:
            return None
        try:
            self._check(history)
        except (OSError, LazyschedError) as error:
            self._warn_unsaved(history.num_done, error)
            return None
        return partial(self._write, history.num_done, self._texts(history))

    def _write(self, step: int, texts: Mapping[str, str], tensors: Tensors) -> None:
        policy, fill = self._policy, partial(self._fill, texts, tensors)
        try:
            self.last = checkpoint_folders.write_checkpoint(self._folder, step, fill, self._go_on)
            self._last_step = step
        except (OSError, LazyschedError) as error:
            self._warn_unsaved(step, error)
            return
        try:
            checkpoint_folders.prune(self._folder, step, policy.save_total_limit, policy.save_state_limit)
        except (OSError, LazyschedError) as error:
            warn(self._console, f"checkpoints before {self.last}: not pruned ({_reason(error)}); the run goes on")

    def _go_on(self) -> None:
        if self._ends_at_once.is_set():
            raise _GivenUpError

    def _warn_unsaved(self, step: int, error: Exception) -> None:
        kept = f"{self.last} is kept" if self.last else "there is no earlier one"
        warn(self._console, f"checkpoint-{step}: not saved ({_reason(error)}); {kept}, and the run goes on")

    def _check(self, history: History) -> None:
        row = history.rows[-1]
        if not (row.skipped or math.isfinite(row.grad_norm)):
            raise RunError(f"the gradient norm was {row.grad_norm}, so weights may not be finite")
        where = self._folder if self._folder.exists() else self._folder.parent
        free_bytes = shutil.disk_usage(where).free
        if free_bytes < self.num_bytes:
            raise RunError(
                f"{format_bytes(self.num_bytes)} will be written and {format_bytes(free_bytes)} are free; free disk "
                f"space or give --save-total-limit"
            )

    def _texts(self, history: History) -> dict[str, str]:
        """File -> what the run says of itself now, in the order of writing."""
        return {
            STATE_FILE: self._state_of(history).model_dump_json(indent=1) + "\n",
            LOG_FILE: history.jsonl(),
            "plan.json": self._session.plan.model_dump_json(indent=1),
        }

    def _fill(self, texts: Mapping[str, str], tensors: Tensors, folder: Path) -> None:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")

        def fetch(name: str) -> torch.Tensor:
            self._go_on()
            return tensors[name].cpu()

        session, max_bytes = self._session, self._max_shard_bytes
        write_model(
            folder, session.config, session.weight_names(), fetch, session.model.dtype, self._source_dir, max_bytes
        )
        write_shards(folder, checkpoint_folders.STATE_PREFIX, session.state_names(), fetch, max_bytes)


class _GivenUpError(Exception):
    """A checkpoint was not written to its end, because the run was interrupted."""


def _write_from(copies: dict[str, torch.Tensor], write: Callable[[Tensors], None]) -> None:
    """Write, and let go of the copies before anybody hears that it is done: the next ones need their room."""
    try:
        write(copies)
    finally:
        copies.clear()


def _give_way() -> None:
    """Let a thread that only writes and hashes leave the cores to updates and launches, where there are too few."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return " ".join((text or str(error)).split())
