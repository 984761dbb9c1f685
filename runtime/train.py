"""``train``: a plan, a model and a data file become a trained model in a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from lazysched.chrome_trace import check_trace_file, save_chrome_trace
from lazysched.errors import LazyschedError, RunError, StoppedError, UsageError
from lazysched.runtime import data as data_module
from lazysched.runtime import machine
from lazysched.runtime.arguments import check_numbers, check_optimizer, choose_device
from lazysched.runtime.checkpoint import check_output_dir, write_folder
from lazysched.runtime.data.tokenizer import load_tokenizer
from lazysched.runtime.folders import undo_cut_swap
from lazysched.runtime.loop import LOG_FILE, WARM_UP_STEPS, Breaks, History, TrainingLoop, mean_loss
from lazysched.runtime.progress import ProgressReport
from lazysched.runtime.recorder import Recorder, make_recording
from lazysched.runtime.resuming import Checkpoint, check_same_run, choose_checkpoint, restore
from lazysched.runtime.run_memory import RunMemory, out_of_memory
from lazysched.runtime.saving import Checkpoints, SavingPolicy
from lazysched.runtime.schedule import LearningRateSchedule, SchedulerType
from lazysched.runtime.session import Session
from lazysched.runtime.sources import ModelSource, resolve_model
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.runtime.stopping import StopSignals
from lazysched.runtime.tensor_reader import TensorReader
from lazysched.runtime.training_state import TrainingState, Value, fixed_fields, plan_sha256
from lazysched.schemas import Engine, Plan
from lazysched.schemas.recording import RECORDING_FILE
from lazysched.timeline import Interval, TimedSteps, timed_steps
from lazysched.units import format_slice

TIMED_STEPS = slice(WARM_UP_STEPS, WARM_UP_STEPS + 3)
"""Steps whose operations are timed in every run; the first of them only shows where the next one begins."""


@dataclass(frozen=True)
class TrainResult:
    """What a run measured, beside what its plan predicted."""

    output_dir: Path
    losses: list[float]
    num_skipped: int
    """Steps that changed nothing because their gradient was not finite."""
    measured_step_s: float | None
    """Median after warm-up; None for a run of fewer steps than that."""
    predicted_step_s: float | None
    timed: TimedSteps | None
    """Exposed and idle time and bytes moved in a step; None where too few steps were timed."""
    predicted_exposed_s: dict[Engine, float]
    """engine -> time in which ``compute`` waits for it, per step; empty where the plan predicts nothing."""
    predicted_moved_bytes: dict[Engine, int]
    """engine -> bytes per step."""
    peak_bytes: dict[str, int]
    """tier -> bytes; on a CPU both tiers are one memory, named ``gpu+host``. ``snapshot``, where there was one: host
    memory of the copy that checkpoints are written from, which no plan predicts."""
    predicted_peak_bytes: dict[str, int]
    held_out_loss_before: float | None
    held_out_loss_after: float | None


@dataclass(frozen=True)
class _Inputs:
    """Everything that is checked before memory is taken."""

    source: ModelSource
    train: data_module.Dataset
    held_out: data_module.Dataset | None
    pad_id: int | None


def train(
    plan: Plan,
    *,
    model: str,
    data: str,
    output_dir: str,
    eval_data: str | None = None,
    data_format: str | None = None,
    group_by_length: bool = False,
    init: Literal["pretrained", "random"] = "pretrained",
    device: str | None = None,
    max_steps: int | None = None,
    num_train_epochs: float = 1.0,
    learning_rate: float = 2e-5,
    lr_scheduler_type: SchedulerType = "linear",
    warmup_ratio: float = 0.0,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    adam_epsilon: float = 1e-8,
    seed: int = 42,
    logging_steps: int = 1,
    trace: str | None = None,
    trace_steps: slice | None = None,
    eval_steps: int = 0,
    save_steps: int = 500,
    save_total_limit: int | None = None,
    save_state_limit: int = 2,
    resume: bool = False,
    resume_from_checkpoint: str | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Train as ``plan`` says and write the model to ``output_dir``, with what its operations took.

    Args:
        plan: solved for this model; another machine than the plan's only draws a warning.
        model: Hugging Face folder, hub name, GGUF file, or a config.json with ``init="random"``.
        data: JSON, JSONL, CSV or Parquet file, datasets of a ``dataset_info.json``, or a hub name; see
            ``resolve_data``.
        output_dir: new or empty, or written by an earlier run.
        eval_data: held-out data, named as ``data`` is; their loss is taken before and after.
        data_format: of both, where their columns fit more than one.
        group_by_length: rows of a batch have similar lengths; see ``Batches``.
        init: ``random`` draws the weights.
        device: ``cuda`` or ``cpu``; None takes the GPU where there is one.
        max_steps: number of steps; None trains ``num_train_epochs`` epochs.
        num_train_epochs: passes over the data where ``max_steps`` is None.
        learning_rate: peak of the schedule.
        lr_scheduler_type: what follows the warm-up.
        warmup_ratio: share of the run that warms up.
        weight_decay: of matrices; biases and norms do not decay.
        max_grad_norm: global norm to clip to, 0 gives clipping up; None takes the plan's. A plan that updates before
            the norm is known (``update.check_finite`` false) cannot clip.
        adam_beta1: decay of the first moment.
        adam_beta2: decay of the second moment.
        adam_epsilon: added to the root of the second moment; at least 1e-30 with 8-bit optimizer state.
        seed: of the data's order, of random weights and of the rounding of 8-bit optimizer state.
        logging_steps: steps between plain lines where there is no terminal.
        trace: file for a timeline of some steps in Chrome's trace format.
        trace_steps: which steps, counted from 0; None takes ``TIMED_STEPS``.
        eval_steps: steps between two looks at the held-out loss, beside those before and after; 0 has none.
        save_steps: steps between two checkpoints, ``checkpoint-N`` in ``output_dir``; 0 saves none but when stopped.
        save_total_limit: how many checkpoints stay; None keeps all.
        save_state_limit: how many of them keep their optimizer state; older ones keep the model.
        resume: go on from the newest valid checkpoint in ``output_dir``, to the bit as if it had never ended.
        resume_from_checkpoint: go on from this one.
        console: where progress goes.

    Raises:
        UsageError: an argument, the plan, the model, the data or the checkpoint is wrong; nothing was written.
        RunError: the run failed; nothing but checkpoints was written.
        StoppedError: Ctrl-C or SIGTERM came; the step was finished and a checkpoint saved.
    """
    check_numbers(max_steps, num_train_epochs, learning_rate, warmup_ratio, max_grad_norm, logging_steps)
    check_optimizer(adam_beta1, adam_beta2, adam_epsilon, weight_decay)
    if eval_steps and (eval_steps < 0 or eval_data is None):
        remedy = "give held-out data with --eval-data" if eval_steps > 0 else "give 0 or more"
        raise UsageError(f"eval_steps: {eval_steps}: {remedy}")
    policy = SavingPolicy(save_steps, save_total_limit, save_state_limit)
    console = console or Console()
    target = choose_device(device)
    folder = Path(output_dir)
    undo_cut_swap(folder)
    check_output_dir(folder)
    if trace is not None:
        check_trace_file(Path(trace), folder)
    start = choose_checkpoint(folder, resume, resume_from_checkpoint, console)
    inputs = _read_inputs(plan, model, data, eval_data, data_format, init, console)
    _compare_hardware(plan, target, console)
    settings = AdamWSettings(adam_beta1, adam_beta2, adam_epsilon, weight_decay, seed)
    clip_norm = plan.update.clip_norm if max_grad_norm is None else (max_grad_norm or None)
    batches = _batches(plan, inputs, data, seed, group_by_length, console)
    num_steps = batches.num_steps(num_train_epochs) if max_steps is None else max_steps
    schedule = LearningRateSchedule(learning_rate, lr_scheduler_type, num_steps, warmup_ratio)
    kept: dict[str, Value] = {
        "plan_sha256": plan_sha256(plan), "num_steps": num_steps, "learning_rate": learning_rate,
        "lr_scheduler_type": lr_scheduler_type, "warmup_ratio": warmup_ratio, "weight_decay": weight_decay,
        "max_grad_norm": clip_norm, "adam_beta1": adam_beta1, "adam_beta2": adam_beta2, "adam_epsilon": adam_epsilon,
    }  # fmt: skip
    origin = _Origin(fixed_fields(plan, inputs.train, seed, group_by_length), kept, batches)
    history = History() if start is None else _history_of(start, origin, num_steps, console)
    traced = _traced_steps(trace, trace_steps, history.num_done, num_steps)
    recorder = Recorder({*_timed_steps(history.num_done, num_steps), *traced}, target)
    memory = RunMemory(target, plan)
    try:
        with _open(plan, inputs.source, target, settings, clip_norm) as session:
            checkpoints = Checkpoints(
                session, folder, inputs.source.config_dir, policy, lambda rows: origin.state(rows, session), console,
                last=None if start is None else start.path,
            )  # fmt: skip
            saves = any(policy.is_due(step) for step in range(history.num_done + 1, num_steps + 1))
            check_output_dir(folder, checkpoints.num_bytes if saves else checkpoints.model_bytes)
            _fill(session, inputs.source, init, seed, start)
            before = _held_out_loss(session, inputs)
            predicted = plan.predicted.step_s if plan.predicted else None
            progress = ProgressReport(console, num_steps, predicted, logging_steps, history.num_done)
            if saves:
                checkpoints.say_how()
            with progress as report, StopSignals(report.tell) as stop, checkpoints:
                breaks = Breaks(
                    policy.is_due, checkpoints.save, stop, lambda done: eval_steps > 0 and done % eval_steps == 0,
                    lambda done: _evaluated(session, inputs, done, report.tell),
                )  # fmt: skip
                loop = TrainingLoop(session.executor, batches.batch, schedule, report, recorder, history, breaks)
                history = loop.run()
                checkpoints.finish()
                if stop():
                    checkpoints.save_now(history)
                    raise _stopped(stop, history, checkpoints)
            after = _held_out_loss(session, inputs)
            measured = memory.peaks(session, checkpoints.snapshot_bytes)
            program, intervals = session.program, recorder.intervals()
            counted = [interval for interval in intervals if history.counts(interval.step)]
            _export(session, inputs.source, folder, history, counted, checkpoints)
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:  # the allocator's, and the driver's own
        if "out of memory" not in str(error):
            raise
        raise out_of_memory(plan, error) from None
    if trace is not None:
        save_chrome_trace(Path(trace), program, [interval for interval in intervals if interval.step in traced])
    return TrainResult(
        output_dir=folder, losses=history.losses, num_skipped=history.num_skipped, measured_step_s=history.step_s,
        predicted_step_s=predicted, timed=timed_steps(program, counted, in_line=target.type != "cuda"),
        predicted_exposed_s=plan.predicted.exposed_s if plan.predicted else {},
        predicted_moved_bytes=plan.predicted.moved_bytes if plan.predicted else {},
        peak_bytes=measured, predicted_peak_bytes=memory.predicted(), held_out_loss_before=before,
        held_out_loss_after=after,
    )  # fmt: skip


@dataclass(frozen=True)
class _Origin:
    """What a checkpoint says of the run that made it."""

    fixed: dict[str, Value]
    arguments: dict[str, Value]
    batches: data_module.Batches

    def state(self, history: History, session: Session) -> TrainingState:
        """Where the run stands after the rows of ``history``."""
        epoch, position = divmod(history.num_done * session.plan.batch_size, self.batches.num_rows)
        return TrainingState(
            step=history.num_done, num_updates=session.num_updates, epoch=epoch, position=position,
            fixed=self.fixed, arguments=self.arguments,
        )  # fmt: skip


def _history_of(start: Checkpoint, origin: _Origin, num_steps: int, console: Console) -> History:
    """Rows of the steps before, once the run may go on from them."""
    check_same_run(start, origin.fixed, origin.arguments, console)
    if start.state.step > num_steps:
        raise UsageError(
            f"max_steps: {num_steps} is less than the {start.state.step} steps of {start.path}; give at least "
            f"--max-steps {start.state.step}"
        )
    return start.history


def _stopped(stop: StopSignals, history: History, checkpoints: Checkpoints) -> StoppedError:
    where = f"go on from {checkpoints.last} with --resume" if checkpoints.last else "no checkpoint was saved"
    return StoppedError(f"{stop.name}: stopped after step {history.num_done}; {where}", stop.exit_code)


def _timed_steps(num_done: int, num_steps: int) -> range:
    """Those of ``TIMED_STEPS``, counted from where the run begins or goes on."""
    return range(num_done, num_steps)[TIMED_STEPS]


def _traced_steps(trace: str | None, trace_steps: slice | None, num_done: int, num_steps: int) -> range:
    """Steps that go into the trace; none where there is no trace."""
    if trace is None:
        if trace_steps is not None:
            raise UsageError(f"trace_steps: {format_slice(trace_steps)} without a trace; name its file with --trace")
        return range(0)
    chosen = _timed_steps(num_done, num_steps) if trace_steps is None else range(num_steps)[trace_steps]
    if not any(step >= num_done for step in chosen):
        steps = f"{num_steps} steps" if num_done == 0 else f"steps {num_done} to {num_steps - 1}"
        raise UsageError(
            f"trace_steps: {format_slice(trace_steps or TIMED_STEPS)} holds none of the run's {steps}, which count "
            f"from 0; give others with --trace-steps"
        )
    return chosen


def _read_inputs(
    plan: Plan, model: str, data: str, eval_data: str | None, data_format: str | None, init: str, console: Console
) -> _Inputs:
    source = resolve_model(model)
    if init == "pretrained" and not source.has_weights:
        raise UsageError(f"model: {model} has no weights; use --init random or name a folder with safetensors files")
    tokenizer = load_tokenizer(source)
    num_tokens = getattr(source.config, "vocab_size", None)
    if num_tokens is None:
        raise UsageError(f"model: {source.config.model_type!r} has no vocab_size; use a decoder-only language model")
    files = [data] if eval_data is None else [data, eval_data]
    datasets = [data_module.Dataset.load(file, tokenizer, plan.seq_len, data_format=data_format) for file in files]
    for file, dataset in zip(files, datasets, strict=True):
        console.print(f"{file}: {dataset.report.summary()}", highlight=False, markup=False, soft_wrap=True)
        data_module.check_vocabulary(dataset, num_tokens)
    pad_id = tokenizer.pad_token_id
    if pad_id is not None and pad_id >= num_tokens:
        pad_id = None  # a pad that was added later may have no row in the embedding; any other fills rows up as well
    return _Inputs(source, datasets[0], datasets[1] if eval_data else None, pad_id)


def _batches(
    plan: Plan, inputs: _Inputs, data: str, seed: int, group_by_length: bool, console: Console
) -> data_module.Batches:
    batches = data_module.Batches(
        inputs.train, plan.batch_size, plan.seq_len, seed, inputs.pad_id, packing=plan.packing,
        group_by_length=group_by_length,
    )  # fmt: skip
    if plan.packing:
        packed = f"{data}: packed into {batches.num_rows} rows of {plan.seq_len} tokens"
        console.print(packed, highlight=False, markup=False, soft_wrap=True)
    return batches


def _compare_hardware(plan: Plan, device: torch.device, console: Console) -> None:
    here = machine.hardware_id(device)
    if here != plan.hardware_id:
        console.print(
            f"warning: the plan was solved for {plan.hardware_id}, this is {here}; its predictions may not hold here",
            style="yellow", soft_wrap=True, markup=False,
        )  # fmt: skip


def _open(
    plan: Plan, source: ModelSource, device: torch.device, settings: AdamWSettings, clip_norm: float | None
) -> Session:
    machine.configure_allocator(device)
    host_limit_bytes = machine.host_memory()[1]
    if "host" in plan.budget_bytes:
        host_limit_bytes = min(host_limit_bytes, plan.budget_bytes["host"])
    return Session(
        plan, source.config, device, settings=settings, max_grad_norm=clip_norm, host_limit_bytes=host_limit_bytes
    )


def _fill(session: Session, source: ModelSource, init: str, seed: int, start: Checkpoint | None) -> None:
    if start is not None:
        restore(session, start)
        return
    if init == "random":
        session.initialise(seed)
        return
    with TensorReader(source.weight_files) as reader:
        session.load(reader.read_into, reader.dtype)


def _evaluated(session: Session, inputs: _Inputs, num_done: int, tell: Callable[[str], None]) -> float | None:
    """Held-out loss after ``num_done`` steps, shown as a line."""
    loss = _held_out_loss(session, inputs)
    tell(f"step {num_done}: held-out loss {'not taken' if loss is None else format(loss, '.4f')}")
    return loss


def _held_out_loss(session: Session, inputs: _Inputs) -> float | None:
    if inputs.held_out is None:
        return None
    plan = session.plan
    batches = data_module.evaluation_batches(
        inputs.held_out, plan.batch_size, plan.seq_len, inputs.pad_id, packing=plan.packing
    )
    return mean_loss(session.executor, batches)


def _export(
    session: Session, source: ModelSource, folder: Path, history: History, intervals: list[Interval],
    checkpoints: Checkpoints,
) -> None:  # fmt: skip
    session.executor.drain()
    extra_files = {LOG_FILE: history.jsonl(), "plan.json": session.plan.model_dump_json(indent=1)}
    if intervals:
        recording = make_recording(session.plan, machine.hardware_id(session.device), session.program, intervals)
        extra_files[RECORDING_FILE] = recording.model_dump_json(indent=1)
    try:
        write_folder(
            folder, source.config, session.weight_names(), session.weight, session.model.dtype,
            source_dir=source.config_dir, extra_files=extra_files,
        )  # fmt: skip
    except LazyschedError as error:
        kept = f"; {checkpoints.last} is kept, go on from it with --resume" if checkpoints.last else ""
        raise RunError(f"{error}{kept}") from error
