"""Going on from a checkpoint: which one, whether this run may, and its tensors, to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lazysched.errors import UNREADABLE_JSON, UsageError
from lazysched.lines import say
from lazysched.runtime.checkpoint_folders import STATE_PREFIX, check_checkpoint, checkpoint_steps
from lazysched.runtime.folders import STATE_FILE
from lazysched.runtime.loop import History
from lazysched.runtime.session import Session
from lazysched.runtime.tensor_reader import TensorReader, open_safetensors
from lazysched.runtime.training_state import MANIFEST_FILE, Manifest, TrainingState, Value, differences
from lazysched.step_rows import LOG_FILE, rows_of

ANY_ORDER_TOLD = (
    "attention adds in any order on this GPU, so the run goes on within rounding; profile with --full-determinism for "
    "the bits of a run never interrupted"
)


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint that keeps its optimizer state."""

    path: Path
    manifest: Manifest
    state: TrainingState
    history: History
    """Rows of the steps up to it."""


def choose_checkpoint(
    output_dir: Path, resume: bool, resume_from_checkpoint: str | None, console: Console
) -> Checkpoint | None:
    """The checkpoint to go on from; None for a new run.

    Args:
        output_dir: where the newest valid one is looked for, if ``resume`` asks for it.
        resume: take that one.
        resume_from_checkpoint: take this one, a folder, or its name in ``output_dir``.
        console: where it is told which one, and which were skipped and why.

    Raises:
        UsageError: both are asked for, there is none, it is not valid, or a new run would mix its checkpoints with
            those of an earlier one.
    """
    if resume and resume_from_checkpoint is not None:
        raise UsageError(
            f"resume_from_checkpoint: {resume_from_checkpoint} beside resume, which takes the newest; give one of them"
        )
    if resume_from_checkpoint is not None:
        chosen = _load(_named(output_dir, resume_from_checkpoint))
    elif resume:
        chosen = _newest(output_dir, console)
    else:
        _refuse_old_checkpoints(output_dir)
        return None
    say(console, f"resuming from {chosen.path} after step {chosen.state.step}")
    return chosen


def _refuse_old_checkpoints(output_dir: Path) -> None:
    # One that was cut is no obstacle: it is replaced or pruned.
    names = [path.name for path in checkpoint_steps(output_dir).values() if (path / MANIFEST_FILE).is_file()]
    if names:
        raise UsageError(
            f"output_dir: {output_dir} holds {names[0]} of an earlier run; go on from it with --resume, or name "
            f"another folder"
        )


def _named(output_dir: Path, name: str) -> Path:
    """The one of that name alone in ``output_dir``, else the folder."""
    if not name:
        raise UsageError(
            "resume_from_checkpoint: names nothing; give a checkpoint's folder, or --resume for the newest"
        )
    alone = name.rstrip("/")
    inside = output_dir / alone
    return inside if "/" not in alone and inside.is_dir() else Path(name)


def _newest(output_dir: Path, console: Console) -> Checkpoint:
    problems: list[str] = []
    for path in checkpoint_steps(output_dir).values():
        try:
            return _load(path)
        except UsageError as error:
            problems.append(f" ({error})")
            say(console, f"skipped {error}")
    remedy = "remove what is there and leave --resume out" if problems else "leave --resume out"
    raise UsageError(f"resume: {output_dir} holds no valid checkpoint{''.join(problems[:1])}; {remedy} to begin anew")


def _load(path: Path) -> Checkpoint:
    manifest = check_checkpoint(path)
    state = TrainingState.load(path / STATE_FILE)
    try:
        text = (path / LOG_FILE).read_text(encoding="utf-8") if LOG_FILE in manifest.files else ""
        rows = rows_of(text)
    except UNREADABLE_JSON as error:
        raise UsageError(f"{path / LOG_FILE}: holds a row that is no step ({error}); use another checkpoint") from None
    if len(rows) != state.step:
        raise UsageError(f"{path / LOG_FILE}: has {len(rows)} rows of {state.step} steps; use another checkpoint")
    return Checkpoint(path, manifest, state, History(rows, num_restored=len(rows)))


def check_same_run(checkpoint: Checkpoint, fixed: Mapping[str, Value], data_name: str, *, is_all: bool) -> None:
    """Refuse to go on with other data, seed, batch or model.

    Args:
        checkpoint: to go on from.
        fixed: field -> what it is now.
        data_name: what the user calls the data.
        is_all: whether ``fixed`` has all there is, so that one that it lacks is a difference.

    Raises:
        UsageError: the first field that must be the same and is not.
    """
    before = {name: value for name, value in checkpoint.state.fixed.items() if is_all or name in fixed}
    for field, was, now in differences(before, fixed):
        both = f"{now}, and {checkpoint.path} was made with {was}"
        found = _other_data(checkpoint, data_name) if field == "data" else both
        raise UsageError(f"{field}: {found}; {_remedy(field, was)}, or begin anew without --resume")


def _other_data(checkpoint: Checkpoint, data_name: str) -> str:
    """What tells the data from those of before, whose contents are others."""
    before = checkpoint.state.data_name
    if before is None or before == data_name:
        return f"{data_name} has other rows, or other tokens, than when {checkpoint.path} was made"
    return f"{data_name}, and {checkpoint.path} was made with {before}, which has other rows or tokens"


def say_other_arguments(checkpoint: Checkpoint, arguments: Mapping[str, Value], console: Console) -> None:
    """Say what may be another than it was, and is."""
    for field, before, now in differences(checkpoint.state.arguments, arguments):
        say(console, f"{field}: {_shown(now)}, in the checkpoint {_shown(before)}")


def _shown(value: Value) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)


def _remedy(field: str, before: Value) -> str:
    if field == "data":
        return "give the --data and the --model of before"
    if field == "seed":
        return f"give --seed {before}"
    if field == "model_id":
        return "give the --model and the --plan of before"
    return "give a plan that was solved with the same, as the checkpoint's plan.json"


def restore(session: Session, checkpoint: Checkpoint) -> None:
    """Fill weights and optimizer state wherever the plan has them; needs a slice of a tensor beside the store.

    Raises:
        UsageError: a tensor is missing or of another shape or dtype.
    """
    files: dict[str, Path] = {}
    for name in checkpoint.manifest.files:
        if name.endswith(".safetensors") and name.startswith(("model", STATE_PREFIX)):
            path = checkpoint.path / name
            files |= dict.fromkeys(open_safetensors(path).keys(), path)
    with TensorReader(files) as reader:
        session.restore(reader.read_exactly, checkpoint.state.num_updates)
