"""Programs that a run shows its numbers to when it is asked to: TensorBoard, Weights & Biases, trackio.

Nothing is reported by default, so nothing is imported, asked or sent then. Tags are those of transformers' Trainer, and
steps count from 1 as there. A reporter that fails is told of once and left out, and the run goes on.
"""

from __future__ import annotations

import importlib
import netrc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, get_args
from urllib.parse import urlsplit

from lazysched.errors import UsageError
from lazysched.step_rows import StepRow
from lazysched.train_config import ReporterName

PROJECT = "lazysched"
"""Where W&B and trackio file a run, unless ``WANDB_PROJECT`` or ``TRACKIO_PROJECT`` names another project."""
NAMES: tuple[ReporterName, ...] = get_args(ReporterName)


@dataclass(frozen=True)
class Reporter:
    """What takes numbers of a run.

    Attributes:
        told: a line for the user: where they can be seen.
        log: takes tag -> number, and after how many steps.
        close: ends it.
    """

    told: str
    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


def _tensorboard(output_dir: Path, config: Mapping[str, Any], num_done: int) -> Reporter:
    """Event files in ``TENSORBOARD_LOGGING_DIR``, or in the folder ``OUTPUT-tensorboard`` beside the output folder."""
    named = os.environ.get("TENSORBOARD_LOGGING_DIR")
    target = output_dir.resolve()
    folder = Path(named).expanduser() if named else target.with_name(f"{target.name}-tensorboard")
    module: Any = importlib.import_module("torch.utils.tensorboard")
    # What an earlier process showed of later steps is hidden.
    writer = module.SummaryWriter(str(folder), purge_step=num_done + 1 if num_done else None)
    writer.add_text("args", "\n".join(f"    {name}: {value}" for name, value in config.items()))

    def log(values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            writer.add_scalar(tag, value, step)
        writer.flush()

    return Reporter(f"tensorboard: tensorboard --logdir {folder}", log, writer.close)


def _wandb(output_dir: Path, config: Mapping[str, Any], num_done: int) -> Reporter:
    """A run of Weights & Biases; offline where there is no key, unless ``WANDB_MODE`` says what else."""
    wandb: Any = importlib.import_module("wandb")
    mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT), name=os.environ.get("WANDB_NAME", output_dir.name),
        config=dict(config), mode=mode, settings=wandb.Settings(console="off"),
    )  # fmt: skip
    later = f"; upload it later with wandb sync {Path(run.dir).parent}" if mode == "offline" else ""
    return Reporter(f"wandb: {mode}{later}", lambda values, step: run.log(dict(values), step=step), run.finish)


def _trackio(output_dir: Path, config: Mapping[str, Any], num_done: int) -> Reporter:
    """A run of trackio, which keeps it on this machine unless ``TRACKIO_SPACE_ID`` names a place on the hub."""
    trackio: Any = importlib.import_module("trackio")
    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    run = trackio.init(project=project, name=output_dir.name, config=dict(config), embed=False)
    told = f"trackio: trackio show --project {project}"
    return Reporter(told, lambda values, step: run.log(dict(values), step=step), run.finish)


_MAKERS: dict[ReporterName, Callable[[Path, Mapping[str, Any], int], Reporter]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio,
}  # fmt: skip


def _has_wandb_key() -> bool:
    """Whether W&B would find a key without asking: in ``WANDB_API_KEY`` or in the file that ``wandb login`` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        known = netrc.netrc(Path(os.environ.get("NETRC", "~/.netrc")).expanduser())
    except (OSError, netrc.NetrcParseError):
        return False
    return known.authenticators(host) is not None


def check_reporters(names: Sequence[str]) -> None:
    """Refuse, before anything is loaded, what could not be reported to.

    Raises:
        UsageError: an unknown name, or the package behind one is not installed.
    """
    for name in names:
        if name not in NAMES:
            raise UsageError(f"report_to: {name!r} is no reporter; name those you want of {', '.join(NAMES)}")
        if find_spec(name) is None:
            raise UsageError(f"report_to: {name} is not installed; run pip install 'lazysched[{name}]'")


class Reporters:
    """All reporters of a run, as one that cannot fail.

    Args:
        names: those asked for.
        output_dir: of the run, whose name is the run's.
        config: field -> what the run was started with.
        num_done: steps that an earlier process did.
        steps_per_epoch: for the epoch that rows are shown at.
        say: called with one line for each that is open.
        warn: called with one line for each that fails.
    """

    def __init__(
        self, names: Sequence[ReporterName], output_dir: Path, config: Mapping[str, Any], *, num_done: int = 0,
        steps_per_epoch: float = 1.0, say: Callable[[str], None], warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._warn, self._steps_per_epoch = warn, steps_per_epoch
        self._open: dict[ReporterName, Reporter] = {}
        for name in dict.fromkeys(names):
            self._guarded(name, partial(self._start, name, output_dir, config, num_done))
        for reporter in self._open.values():
            say(reporter.told)

    def _start(self, name: ReporterName, output_dir: Path, config: Mapping[str, Any], num_done: int) -> None:
        self._open[name] = _MAKERS[name](output_dir, config, num_done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, row: StepRow) -> None:
        """Show a row."""
        values = {
            "train/loss": row.loss, "train/grad_norm": row.grad_norm, "train/learning_rate": row.learning_rate,
            "train/epoch": (row.step + 1) / self._steps_per_epoch, "train/step_s": row.step_s,
            "train/tokens_per_s": row.tokens_per_s, "train/skipped": float(row.skipped),
        }  # fmt: skip
        if row.host_rss_bytes is not None:
            values["train/host_rss_bytes"] = float(row.host_rss_bytes)
        self._log(values, row.step + 1)
        self.evaluated(row.held_out_loss, row.step + 1)

    def evaluated(self, held_out_loss: float | None, num_done: int) -> None:
        """Show the held-out loss after so many steps; nothing where there is none."""
        if held_out_loss is not None:
            self._log({"eval/loss": held_out_loss}, num_done)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for name, reporter in list(self._open.items()):
            self._guarded(name, partial(reporter.log, values, step))

    def close(self) -> None:
        """End all of them."""
        for name, reporter in list(self._open.items()):
            self._guarded(name, reporter.close)
        self._open.clear()

    def _guarded(self, name: ReporterName, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever a program of others raises: training matters more
            self._open.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            self._warn(f"report_to: {name} failed ({reason}); the run goes on without it")
