"""A run whose arguments are checked: from an empty session to the folder that it writes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console

from lazysched.chrome_trace import save_chrome_trace
from lazysched.errors import LazyschedError, RunError, StoppedError
from lazysched.lines import say, warn
from lazysched.runtime import data as data_module
from lazysched.runtime import machine
from lazysched.runtime.checkpoint import check_output_dir, write_folder
from lazysched.runtime.held_rows import not_finite, steps_and_data
from lazysched.runtime.live_log import LiveLog
from lazysched.runtime.loop import Breaks, History, TrainingLoop
from lazysched.runtime.progress import ProgressReport
from lazysched.runtime.recorder import Recorder, make_recording
from lazysched.runtime.reporters import Reporters
from lazysched.runtime.resuming import ANY_ORDER_TOLD, Checkpoint, restore
from lazysched.runtime.run_inputs import RunInputs, held_out_loss
from lazysched.runtime.run_memory import RunMemory, out_of_memory
from lazysched.runtime.saving import Checkpoints, SavingPolicy
from lazysched.runtime.schedule import LearningRateSchedule
from lazysched.runtime.self_test import check_updates
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.runtime.stopping import StopSignals
from lazysched.runtime.tensor_reader import TensorReader
from lazysched.runtime.train_result import TrainResult
from lazysched.runtime.training_state import TrainingState, Value
from lazysched.schemas import Plan, Program
from lazysched.schemas.recording import RECORDING_FILE
from lazysched.schemas.run import RUN_FILE
from lazysched.schemas.run import Run as RunRecord
from lazysched.step_rows import LOG_FILE, StepRow
from lazysched.timeline import Interval, last_two_steps, timed_steps
from lazysched.train_config import ReporterName


@dataclass(frozen=True)
class Origin:
    """What a checkpoint says of the run that made it."""

    fixed: dict[str, Value]
    arguments: dict[str, Value]
    batches: data_module.Batches
    data_name: str

    def state(self, history: History, session: Session) -> TrainingState:
        """Where the run stands after the rows of ``history``."""
        epoch, position = divmod(history.num_done * session.plan.batch_size, self.batches.num_rows)
        return TrainingState(
            step=history.num_done, num_updates=session.num_updates, epoch=epoch, position=position,
            fixed=self.fixed, arguments=self.arguments, data_name=self.data_name,
        )  # fmt: skip


@dataclass(kw_only=True)
class Run:
    """One run; arguments of ``train`` have its names.

    Attributes:
        start: the checkpoint that it goes on from.
        history: rows of the steps so far.
        recorder: times the operations of some steps.
        trace: file for the timeline of the steps ``traced``; None: none is written.
        program: a step, once the run has ended.
        intervals: what the recorder timed, once the run has ended.
    """

    plan: Plan
    inputs: RunInputs
    init: str
    device: torch.device
    folder: Path
    console: Console
    start: Checkpoint | None
    origin: Origin
    settings: AdamWSettings
    clip_norm: float | None
    schedule: LearningRateSchedule
    history: History
    recorder: Recorder
    policy: SavingPolicy
    eval_steps: int
    logging_steps: int
    report_to: Sequence[ReporterName]
    trace: Path | None
    traced: range
    program: Program = field(init=False)
    intervals: list[Interval] = field(init=False)

    @property
    def num_steps(self) -> int:
        """Of the whole run."""
        return self.schedule.num_steps

    @property
    def num_epochs(self) -> float:
        """Passes over the data in these."""
        return self.num_steps * self.plan.batch_size / self.origin.batches.num_rows

    def to_end(self) -> TrainResult:
        """Train and write the result; errors as those of ``train``."""
        memory = RunMemory(self.device, self.plan)
        try:
            with self._open() as session:
                checkpoints = self._checkpoints(session)
                self._fill(session)
                with self._reporters() as reporters, self._naming_what_is_kept(checkpoints):
                    before, after = self._train_and_evaluate(session, checkpoints, reporters)
                self.program, self.intervals = session.program, self.recorder.intervals()
                result = self._result(
                    memory.peaks(session, checkpoints.snapshot_bytes), memory.predicted(), before, after
                )
                self._export(session, checkpoints, result)
                self._tell_not_finite()
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:  # the allocator's, and the driver's own
            if "out of memory" not in str(error):
                raise
            raise out_of_memory(self.plan, error) from None
        if self.trace is not None:
            chosen = [interval for interval in self.intervals if interval.step in self.traced]
            save_chrome_trace(self.trace, self.program, chosen)
        return result

    def _open(self) -> Session:
        machine.configure_allocator(self.device)
        check_updates(self.plan, self.device)
        host_limit_bytes = machine.host_memory()[1]
        if "host" in self.plan.budget_bytes:
            host_limit_bytes = min(host_limit_bytes, self.plan.budget_bytes["host"])
        return Session(
            self.plan, self.inputs.source.config, self.device, settings=self.settings, max_grad_norm=self.clip_norm,
            host_limit_bytes=host_limit_bytes,
        )  # fmt: skip

    def _checkpoints(self, session: Session) -> Checkpoints:
        """What will save, once there is room for what it will save first."""
        checkpoints = Checkpoints(
            session, self.folder, self.inputs.source.config_dir, self.policy,
            lambda rows: self.origin.state(rows, session), self.console,
            last=None if self.start is None else self.start.path,
        )  # fmt: skip
        check_output_dir(self.folder, checkpoints.num_bytes if self._saves else checkpoints.model_bytes)
        return checkpoints

    @property
    def _saves(self) -> bool:
        """Whether a checkpoint comes before the end."""
        return any(self.policy.is_due(done) for done in range(self.history.num_done + 1, self.schedule.num_steps + 1))

    def _fill(self, session: Session) -> None:
        if self.start is not None:
            restore(session, self.start)
            if session.device.type == "cuda" and not self.plan.full_determinism:
                say(self.console, ANY_ORDER_TOLD)
            return
        if self.init == "random":
            session.initialise(self.settings.seed)
            return
        with TensorReader(self.inputs.source.weight_files) as reader:
            session.load(reader.read_into, reader.dtype)

    @property
    def _settings(self) -> dict[str, Value]:
        return self.origin.fixed | self.origin.arguments

    def _reporters(self) -> Reporters:
        return Reporters(
            self.report_to, self.folder, self._settings, num_done=self.history.num_done,
            steps_per_epoch=self.origin.batches.num_rows / self.plan.batch_size,
            say=partial(say, self.console), warn=partial(warn, self.console),
        )  # fmt: skip

    def _train_and_evaluate(
        self, session: Session, checkpoints: Checkpoints, reporters: Reporters
    ) -> tuple[float | None, float | None]:
        """Train between two looks at the held-out loss, and return those."""
        before = held_out_loss(session, self.inputs)
        reporters.evaluated(before, self.history.num_done)
        self._train(session, checkpoints, reporters)
        is_new = self.history.num_done > self.history.num_restored
        after = self.history.rows[-1].held_out_loss if is_new else None
        if after is None:
            after = held_out_loss(session, self.inputs)
            reporters.evaluated(after, self.history.num_done)
        return before, after

    def _train(self, session: Session, checkpoints: Checkpoints, reporters: Reporters) -> None:
        """All steps that are left.

        Raises:
            StoppedError: a signal came; a checkpoint was saved.
        """
        predicted_step_s = self.plan.predicted.step_s if self.plan.predicted else None
        progress = ProgressReport(
            self.console, self.schedule.num_steps, predicted_step_s, self.logging_steps, self.history.num_done
        )
        if self._saves:
            checkpoints.say_how()
        with progress as report, StopSignals(report.tell) as stop, checkpoints:
            breaks = Breaks(
                self.policy.is_due, checkpoints.save, stop,
                lambda done: self.eval_steps > 0 and done % self.eval_steps == 0,
                lambda done: self._evaluated(session, done, report),
            )  # fmt: skip
            log = LiveLog(self.folder, self.history.rows, partial(warn, self.console))

            def complete(row: StepRow) -> None:
                log(row)
                reporters(row)

            self.history = TrainingLoop(
                session.executor, self.origin.batches.batch, self.schedule, report, self.recorder, self.history,
                breaks, log=complete, predicted_step_s=predicted_step_s, held=self.origin.batches.held,
                data_name=self.inputs.data_name,
            ).run()  # fmt: skip
            checkpoints.finish()
            if stop():
                checkpoints.save_now(self.history)
                raise self._stopped(stop, checkpoints)

    def _evaluated(self, session: Session, num_done: int, report: ProgressReport) -> float | None:
        """Held-out loss after ``num_done`` steps, shown as a line."""
        loss = held_out_loss(session, self.inputs)
        report.tell(f"step {num_done}: held-out loss {'not taken' if loss is None else format(loss, '.4f')}")
        return loss

    @contextlib.contextmanager
    def _naming_what_is_kept(self, checkpoints: Checkpoints) -> Iterator[None]:
        """Who ends a run at once is told what it can go on from."""
        try:
            yield
        except KeyboardInterrupt:
            if checkpoints.last:
                say(self.console, f"{checkpoints.last} is kept; go on from it with --resume")
            raise

    def _stopped(self, stop: StopSignals, checkpoints: Checkpoints) -> StoppedError:
        where = f"go on from {checkpoints.last} with --resume" if checkpoints.last else "no checkpoint was saved"
        return StoppedError(f"{stop.name}: stopped after step {self.history.num_done}; {where}", stop.exit_code)

    @property
    def _counted(self) -> list[Interval]:
        """Those of steps that say what steps take."""
        return [interval for interval in self.intervals if self.history.counts(interval.step)]

    def _export(self, session: Session, checkpoints: Checkpoints, result: TrainResult) -> None:
        session.executor.drain()
        source = self.inputs.source
        try:
            write_folder(
                self.folder, source.config, session.weight_names(), session.weight, session.model.dtype,
                source_dir=source.config_dir, extra_files=self._extra_files(result),
            )  # fmt: skip
        except LazyschedError as error:
            kept = f"; {checkpoints.last} is kept, go on from it with --resume" if checkpoints.last else ""
            raise RunError(f"{error}{kept}") from error

    def _tell_not_finite(self) -> None:
        """Say which data to look at where steps changed nothing, or went wrong."""
        rows = not_finite(self.history.rows)
        if rows:
            steps, data = steps_and_data(rows, self.inputs.data_name)
            log = self.folder / LOG_FILE
            warn(
                self.console, f"{steps}: the gradient was not finite; look at {data} (each step's: data_rows in {log})"
            )

    def _extra_files(self, result: TrainResult) -> dict[str, str]:
        """What goes beside the model: name -> text."""
        here, log = machine.hardware_id(self.device), self.history.jsonl()
        record = RunRecord(
            model=self.inputs.model_name, data=self.inputs.data_name, eval_data=self.inputs.eval_name, hardware_id=here,
            settings=self._settings, log_sha256=hashlib.sha256(log.encode()).hexdigest(),
            num_restored=self.history.num_restored,
            measured_step_s=result.measured_step_s, timed=result.timed, timeline=last_two_steps(self._counted),
            peak_bytes=result.peak_bytes, predicted_peak_bytes=result.predicted_peak_bytes,
            held_out_loss_before=result.held_out_loss_before, held_out_loss_after=result.held_out_loss_after,
            versions={name: _version(name) for name in ("lazysched", "torch", "transformers")},
        )  # fmt: skip
        files = {
            LOG_FILE: log, "plan.json": self.plan.model_dump_json(indent=1),
            RUN_FILE: record.model_dump_json() + "\n",
        }  # fmt: skip
        if self._counted:
            recording = make_recording(self.plan, here, self.program, self._counted)
            files[RECORDING_FILE] = recording.model_dump_json(indent=1)
        return files

    def _result(
        self, peak_bytes: dict[str, int], predicted_peak_bytes: dict[str, int], before: float | None,
        after: float | None,
    ) -> TrainResult:  # fmt: skip
        predicted = self.plan.predicted
        return TrainResult(
            output_dir=self.folder, losses=self.history.losses, num_skipped=self.history.num_skipped,
            measured_step_s=self.history.step_s, predicted_step_s=predicted.step_s if predicted else None,
            timed=timed_steps(self.program, self._counted, in_line=self.device.type != "cuda"),
            predicted_exposed_s=predicted.exposed_s if predicted else {},
            predicted_moved_bytes=predicted.moved_bytes if predicted else {},
            peak_bytes=peak_bytes, predicted_peak_bytes=predicted_peak_bytes, held_out_loss_before=before,
            held_out_loss_after=after,
        )  # fmt: skip


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # it runs from its sources
        return "not installed"
