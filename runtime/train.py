"""``train``: a plan, a model and a data file become a trained model in a Hugging Face folder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, ParamSpec

import torch
from rich.console import Console

from lazysched.chrome_trace import check_trace_file
from lazysched.errors import UsageError
from lazysched.lines import plain_console, say, warn
from lazysched.runtime import machine
from lazysched.runtime.arguments import check_numbers, check_optimizer, choose_device
from lazysched.runtime.checkpoint import check_output_dir
from lazysched.runtime.chosen_steps import timed_range, traced_range
from lazysched.runtime.finished import FinishedRun, finished_run
from lazysched.runtime.folders import undo_cut_swap
from lazysched.runtime.loop import History
from lazysched.runtime.plan_to_make import PlanToMake
from lazysched.runtime.recorder import Recorder
from lazysched.runtime.reporters import check_reporters
from lazysched.runtime.resuming import Checkpoint, check_same_run, choose_checkpoint, say_other_arguments
from lazysched.runtime.run import Origin, Run
from lazysched.runtime.run_inputs import read_inputs, training_batches
from lazysched.runtime.saving import SavingPolicy
from lazysched.runtime.schedule import LearningRateSchedule, SchedulerType
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.runtime.train_result import TrainResult
from lazysched.runtime.training_state import Value, fixed_fields, plan_sha256
from lazysched.schemas import Plan
from lazysched.train_config import ReporterName

_Arguments = ParamSpec("_Arguments")


def prepare(
    plan: Plan | PlanToMake,
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
    report_to: Sequence[ReporterName] = (),
    eval_steps: int = 0,
    save_steps: int = 500,
    save_total_limit: int | None = None,
    save_state_limit: int = 2,
    resume: bool = False,
    resume_from_checkpoint: str | None = None,
    console: Console | None = None,
) -> Run | FinishedRun:
    """The run that trains as ``plan`` says and writes the model to ``output_dir``; ``train`` takes it to its end.

    Everything is checked here, first what needs no plan; nothing but the plan is made, and no memory taken.

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
        report_to: ``tensorboard``, ``wandb`` or ``trackio``, which see every row; see ``reporters``.
        eval_steps: steps between two looks at the held-out loss, beside those before and after; 0 has none.
        save_steps: steps between two checkpoints, ``checkpoint-N`` in ``output_dir``; 0 saves none but when stopped.
        save_total_limit: how many checkpoints stay; None keeps all.
        save_state_limit: how many of them keep their optimizer state; older ones keep the model.
        resume: go on from the newest valid checkpoint in ``output_dir``, to the bit as if it had never ended; a run
            that is finished stays as it is.
        resume_from_checkpoint: go on from this one.
        console: where progress goes.

    Raises:
        UsageError: an argument, the plan, the model, the data or the checkpoint is wrong; nothing was written.
        RunError: the run failed; nothing but checkpoints and the log was written.
        StoppedError: Ctrl-C or SIGTERM came; the step was finished and a checkpoint saved.
    """
    check_numbers(max_steps, num_train_epochs, learning_rate, warmup_ratio, max_grad_norm, logging_steps)
    check_optimizer(adam_beta1, adam_beta2, adam_epsilon, weight_decay)
    _check_evaluation(eval_steps, eval_data)
    check_reporters(report_to)
    policy = SavingPolicy(save_steps, save_total_limit, save_state_limit)
    console = console or plain_console()
    target = choose_device(device)
    folder = Path(output_dir)
    undo_cut_swap(folder)
    check_output_dir(folder)
    if trace is not None:
        check_trace_file(Path(trace), folder)
    start = choose_checkpoint(folder, resume, resume_from_checkpoint, console)
    inputs = read_inputs(plan, model, data, eval_data, data_format, init, console)
    batches = training_batches(plan, inputs, data, seed, group_by_length, console)
    num_steps = batches.num_steps(num_train_epochs) if max_steps is None else max_steps
    asked: dict[str, Value] = {
        "num_steps": num_steps, "learning_rate": learning_rate, "lr_scheduler_type": lr_scheduler_type,
        "warmup_ratio": warmup_ratio, "weight_decay": weight_decay, "adam_beta1": adam_beta1,
        "adam_beta2": adam_beta2, "adam_epsilon": adam_epsilon,
    }  # fmt: skip
    if start is not None:
        known = fixed_fields(plan, inputs.train, seed, group_by_length)
        _check_start(start, known, data, num_steps, is_all=isinstance(plan, Plan))
        finished = finished_run(folder, start, num_steps, known | asked, is_newest=resume)
        if finished is not None:
            say(console, _nothing_left(finished))
            return finished
    history = History() if start is None else start.history
    traced = traced_range(trace, trace_steps, history.num_done, num_steps)
    if isinstance(plan, PlanToMake):
        plan = plan.make()
    _compare_hardware(plan, target, console)
    clip_norm = plan.update.clip_norm if max_grad_norm is None else (max_grad_norm or None)
    kept = {"plan_sha256": plan_sha256(plan), **asked, "max_grad_norm": clip_norm}
    origin = Origin(fixed_fields(plan, inputs.train, seed, group_by_length), kept, batches, data)
    if start is not None:
        check_same_run(start, origin.fixed, data, is_all=True)
        say_other_arguments(start, kept, console)
    return Run(
        plan=plan, inputs=inputs, init=init, device=target, folder=folder, console=console, start=start, origin=origin,
        settings=AdamWSettings(adam_beta1, adam_beta2, adam_epsilon, weight_decay, seed), clip_norm=clip_norm,
        schedule=LearningRateSchedule(learning_rate, lr_scheduler_type, num_steps, warmup_ratio), history=history,
        recorder=Recorder({*timed_range(history.num_done, num_steps), *traced}, target), policy=policy,
        eval_steps=eval_steps, logging_steps=logging_steps, report_to=report_to,
        trace=None if trace is None else Path(trace), traced=traced,
    )  # fmt: skip


def _to_its_end(prepared: Callable[_Arguments, Run | FinishedRun]) -> Callable[_Arguments, TrainResult]:
    """``prepared``, and the run as well: the same arguments need not be listed twice."""

    @functools.wraps(prepared)
    def train(*arguments: _Arguments.args, **settings: _Arguments.kwargs) -> TrainResult:
        return prepared(*arguments, **settings).to_end()

    train.__name__ = train.__qualname__ = "train"
    return train


train = _to_its_end(prepare)


def _check_evaluation(eval_steps: int, eval_data: str | None) -> None:
    if eval_steps and (eval_steps < 0 or eval_data is None):
        remedy = "give held-out data with --eval-data" if eval_steps > 0 else "give 0 or more"
        raise UsageError(f"eval_steps: {eval_steps}: {remedy}")


def _check_start(start: Checkpoint, known: dict[str, Value], data: str, num_steps: int, *, is_all: bool) -> None:
    """Refuse a checkpoint that this run may not go on from, as far as is known."""
    check_same_run(start, known, data, is_all=is_all)
    if start.state.step > num_steps:
        raise UsageError(
            f"max_steps: {num_steps} is less than the {start.state.step} steps of {start.path}; give at least "
            f"--max-steps {start.state.step}"
        )


def _nothing_left(finished: FinishedRun) -> str:
    return (
        f"{finished.folder}: this run is finished, all {len(finished.rows)} steps are done, and stays as it is; "
        f"to train on, give more --max-steps"
    )


def _compare_hardware(plan: Plan, device: torch.device, console: Console) -> None:
    here = machine.hardware_id(device)
    if here != plan.hardware_id:
        warn(console, f"the plan was solved for {plan.hardware_id}, this is {here}; its predictions may not hold here")
