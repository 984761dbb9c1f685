"""``train``: a plan, a model and a data file become a trained model in a Hugging Face folder."""

from __future__ import annotations

import math
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from lazysched.chrome_trace import check_trace_file, save_chrome_trace
from lazysched.errors import RunError, UsageError
from lazysched.runtime import data as data_module
from lazysched.runtime import machine
from lazysched.runtime.checkpoint import TensorReader, check_output_dir, write_folder
from lazysched.runtime.data.tokenizer import load_tokenizer
from lazysched.runtime.loop import WARM_UP_STEPS, History, StepRow, TrainingLoop, mean_loss
from lazysched.runtime.progress import ProgressReport
from lazysched.runtime.recorder import Recorder, make_recording
from lazysched.runtime.schedule import LearningRateSchedule, SchedulerType
from lazysched.runtime.session import Session
from lazysched.runtime.sources import ModelSource, resolve_model
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Engine, Plan
from lazysched.schemas.recording import RECORDING_FILE
from lazysched.timeline import Interval, TimedSteps, timed_steps
from lazysched.units import format_bytes, format_slice

LOG_FILE = "train_log.jsonl"
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
    """tier -> bytes; on a CPU both tiers are one memory, named ``gpu+host``."""
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
        console: where progress goes.

    Raises:
        UsageError: an argument, the plan, the model or the data is wrong; nothing was written.
        RunError: the run failed; nothing was written.
    """
    _check_numbers(max_steps, num_train_epochs, learning_rate, warmup_ratio, max_grad_norm, logging_steps)
    _check_optimizer(adam_beta1, adam_beta2, adam_epsilon, weight_decay)
    console = console or Console()
    target = _device(device)
    folder = Path(output_dir)
    check_output_dir(folder)
    if trace is not None:
        check_trace_file(Path(trace), folder)
    inputs = _read_inputs(plan, model, data, eval_data, data_format, init, console)
    _compare_hardware(plan, target, console)
    settings = AdamWSettings(adam_beta1, adam_beta2, adam_epsilon, weight_decay, seed)
    clip_norm = plan.update.clip_norm if max_grad_norm is None else (max_grad_norm or None)
    batches = _batches(plan, inputs, data, seed, group_by_length, console)
    num_steps = batches.num_steps(num_train_epochs) if max_steps is None else max_steps
    schedule = LearningRateSchedule(learning_rate, lr_scheduler_type, num_steps, warmup_ratio)
    traced = _traced_steps(trace, trace_steps, num_steps)
    recorder = Recorder({*range(num_steps)[TIMED_STEPS], *traced}, target)
    memory = _Memory(target, plan)
    try:
        with _open(plan, inputs.source, target, settings, clip_norm) as session:
            _fill(session, inputs.source, init, seed)
            before = _held_out_loss(session, inputs)
            predicted = plan.predicted.step_s if plan.predicted else None
            with ProgressReport(console, num_steps, predicted, logging_steps) as report:
                history = TrainingLoop(session.executor, batches.batch, schedule, report, recorder).run()
            after = _held_out_loss(session, inputs)
            measured, program, intervals = memory.peaks(session), session.program, recorder.intervals()
            counted = [interval for interval in intervals if _counts(history.rows[interval.step])]
            _export(session, inputs.source, folder, history, counted)
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:  # the allocator's, and the driver's own
        if "out of memory" not in str(error):
            raise
        raise _out_of_memory(plan, error) from None
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


def _traced_steps(trace: str | None, trace_steps: slice | None, num_steps: int) -> range:
    """Steps that go into the trace; none where there is no trace."""
    if trace is None:
        if trace_steps is not None:
            raise UsageError(f"trace_steps: {format_slice(trace_steps)} without a trace; name its file with --trace")
        return range(0)
    asked = trace_steps or TIMED_STEPS
    chosen = range(num_steps)[asked]
    if not chosen:
        raise UsageError(
            f"trace_steps: {format_slice(asked)} holds none of the run's {num_steps} steps, which count from 0; "
            f"give others with --trace-steps"
        )
    return chosen


def _counts(row: StepRow) -> bool:
    """Whether a step says what steps take: warm-up compiles, and a skipped step updates nothing."""
    return row.step >= WARM_UP_STEPS and not row.skipped


def _check_numbers(
    max_steps: int | None,
    epochs: float,
    learning_rate: float,
    warmup_ratio: float,
    max_grad_norm: float | None,
    logging: int,
) -> None:
    wrong = {
        "max_steps": max_steps is not None and max_steps < 1,
        "num_train_epochs": not (math.isfinite(epochs) and epochs > 0),
        "learning_rate": not (math.isfinite(learning_rate) and learning_rate >= 0),
        "warmup_ratio": not 0 <= warmup_ratio <= 1,
        "max_grad_norm": max_grad_norm is not None and not max_grad_norm >= 0,
        "logging_steps": logging < 1,
    }
    values = dict(zip(wrong, (max_steps, epochs, learning_rate, warmup_ratio, max_grad_norm, logging), strict=True))
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        allowed = {"warmup_ratio": "between 0 and 1", "learning_rate": "0 or more", "max_grad_norm": "0 or more"}.get(
            name, "above 0"
        )
        raise UsageError(f"{name}: {values[name]} is out of range; give a number {allowed}")


def _check_optimizer(beta1: float, beta2: float, epsilon: float, weight_decay: float) -> None:
    for name, beta in (("adam_beta1", beta1), ("adam_beta2", beta2)):
        if not 0 <= beta < 1:
            raise UsageError(f"{name}: {beta} is out of range; give a number from 0 to below 1")
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise UsageError(f"adam_epsilon: {epsilon} is out of range; give a number above 0")
    if not (math.isfinite(weight_decay) and weight_decay >= 0):
        raise UsageError(f"weight_decay: {weight_decay} is out of range; give 0 or more")


def _device(name: str | None) -> torch.device:
    if name not in (None, "auto", "cuda", "cpu"):
        raise UsageError(f"device: {name!r} is not known; use cuda or cpu")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError("device: cuda is not available here; use --device cpu or install a CUDA build of torch")
    return torch.device("cpu" if name == "cpu" or not available else "cuda")


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
    return _Inputs(source, datasets[0], datasets[1] if eval_data else None, tokenizer.pad_token_id)


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


def _fill(session: Session, source: ModelSource, init: str, seed: int) -> None:
    if init == "random":
        session.initialise(seed)
        return
    with TensorReader(source.weight_files) as reader:
        session.load(reader.read_into, reader.dtype)


def _held_out_loss(session: Session, inputs: _Inputs) -> float | None:
    if inputs.held_out is None:
        return None
    plan = session.plan
    batches = data_module.evaluation_batches(
        inputs.held_out, plan.batch_size, plan.seq_len, inputs.pad_id, packing=plan.packing
    )
    return mean_loss(session.executor, batches)


def _export(session: Session, source: ModelSource, folder: Path, history: History, intervals: list[Interval]) -> None:
    session.executor.drain()
    extra_files = {LOG_FILE: history.jsonl(), "plan.json": session.plan.model_dump_json(indent=1)}
    if intervals:
        recording = make_recording(session.plan, machine.hardware_id(session.device), session.program, intervals)
        extra_files[RECORDING_FILE] = recording.model_dump_json(indent=1)
    write_folder(
        folder, source.config, session.weight_names(), session.weight, session.model.dtype,
        source_dir=source.config_dir, extra_files=extra_files,
    )  # fmt: skip


class _Memory:
    """Peaks of a run against the plan's, from before the run's memory is taken."""

    def __init__(self, device: torch.device, plan: Plan) -> None:
        self._device, self._plan = device, plan
        machine.reset_peaks(device)
        self._rss_before = machine.rss_bytes()

    def peaks(self, session: Session) -> dict[str, int]:
        """Most bytes so far, by tier."""
        if self._device.type == "cuda":
            return {
                "gpu": torch.cuda.max_memory_reserved() + machine.context_bytes(self._device),
                "host": session.buffers.arena.total_bytes,
            }
        return {"gpu+host": max(0, machine.peak_rss_bytes() - self._rss_before)}

    def predicted(self) -> dict[str, int]:
        """What the plan predicts of the same tiers."""
        if self._plan.predicted is None:
            return {}
        peaks = self._plan.predicted.peak_bytes
        both = {"gpu": peaks.get("gpu", 0), "host": peaks.get("host", 0)}
        return both if self._device.type == "cuda" else {"gpu+host": sum(both.values())}


def _out_of_memory(plan: Plan, error: Exception) -> RunError:
    """What was planned, what was found and what to do; lets go what the failed step still held.

    Torch's allocator keeps what it reserved after the session was closed, so its numbers are those of the failure.
    """
    traceback.clear_frames(error.__traceback__)
    total_bytes, free_bytes = machine.device_memory(_device(None))
    reserved_bytes = torch.cuda.memory_reserved()
    peak_bytes = plan.predicted.peak_bytes.get("gpu") if plan.predicted else None
    planned = "an unknown peak" if peak_bytes is None else f"a peak of {format_bytes(peak_bytes)}"
    if "gpu" in plan.budget_bytes:
        planned += f" within {format_bytes(plan.budget_bytes['gpu'])}"
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    return RunError(
        f"GPU memory: planned {planned}; found {format_bytes(reserved_bytes)} reserved, of which at most "
        f"{format_bytes(torch.cuda.max_memory_allocated())} in use, "
        f"{format_bytes(max(0, total_bytes - free_bytes - reserved_bytes))} taken by the driver and other processes, "
        f"and {format_bytes(free_bytes)} free when {asked[1] if asked else 'memory'} more was asked for; "
        f"solve again with a smaller --gpu-memory or --batch-size"
    )
