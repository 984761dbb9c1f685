"""Checkpoints while a run trains: when one is due, what goes into it, and what a full disk does to the run: nothing."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lazysched.errors import LazyschedError, RunError, UsageError
from lazysched.lines import warn
from lazysched.runtime import checkpoint_folders
from lazysched.runtime.checkpoint import MAX_SHARD_BYTES, write_model, write_shards
from lazysched.runtime.folders import STATE_FILE
from lazysched.runtime.loop import History
from lazysched.runtime.session import Session
from lazysched.runtime.training_state import TrainingState
from lazysched.step_rows import LOG_FILE
from lazysched.units import format_bytes


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
    """Saves the checkpoints of one run.

    Args:
        session: of the run, drained whenever something is saved.
        folder: where they go; its parent exists.
        source_dir: where tokenizer, chat template and generation_config.json come from.
        policy: which stay.
        state_of: history -> what the checkpoint says of the run.
        console: where a failure is told.
        last: the checkpoint that the run goes on from.
        max_shard_bytes: of a file; so much host memory is taken where tensors lie on a GPU.
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
        self._last_step: int | None = None

    @property
    def model_bytes(self) -> int:
        """Bytes of the weights in a checkpoint, or in the result."""
        return self._session.model.dtype.itemsize * sum(math.prod(s) for _, s in self._session.weight_names())

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors in a checkpoint."""
        return self.model_bytes + sum(size for _, size in self._session.state_names())

    def save(self, history: History) -> None:
        """Save a checkpoint, then prune old ones; a failure is told in one line and changes nothing else.

        Does nothing where this step is saved already.
        """
        step, policy = history.num_done, self._policy
        if step == self._last_step:
            return
        try:
            self._check(history)
            self.last = checkpoint_folders.write_checkpoint(self._folder, step, lambda to: self._fill(to, history))
            self._last_step = step
        except (OSError, LazyschedError) as error:
            kept = f"{self.last} is kept" if self.last else "there is no earlier one"
            warn(self._console, f"checkpoint-{step}: not saved ({_reason(error)}); {kept}, and the run goes on")
            return
        try:
            checkpoint_folders.prune(self._folder, step, policy.save_total_limit, policy.save_state_limit)
        except (OSError, LazyschedError) as error:
            warn(self._console, f"checkpoints before {self.last}: not pruned ({_reason(error)}); the run goes on")

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

    def _fill(self, folder: Path, history: History) -> None:
        session = self._session
        _write(folder / STATE_FILE, self._state_of(history).model_dump_json(indent=1) + "\n")
        _write(folder / LOG_FILE, history.jsonl())
        _write(folder / "plan.json", session.plan.model_dump_json(indent=1))
        write_model(
            folder, session.config, session.weight_names(), session.weight, session.model.dtype, self._source_dir,
            self._max_shard_bytes,
        )  # fmt: skip
        write_shards(
            folder, checkpoint_folders.STATE_PREFIX, session.state_names(), session.state, self._max_shard_bytes
        )


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return " ".join((text or str(error)).split())


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
