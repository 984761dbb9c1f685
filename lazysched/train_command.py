"""The command ``train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from lazysched import data_commands
from lazysched.errors import UsageError
from lazysched.lines import plain_console, say, warn
from lazysched.outputs import require_no_input
from lazysched.own_plan import plan_path, plan_to_make
from lazysched.report_command import end_report
from lazysched.schemas import Plan
from lazysched.train_config import TrainConfig, resolve
from lazysched.trainable import trained_share
from lazysched.units import format_bytes, format_seconds

if TYPE_CHECKING:  # it loads torch
    from lazysched.runtime.run import Run


def train(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="YAML file of settings; flags win over it.", show_default=False),
    ] = None,
    *,
    plan: Annotated[
        str | None, typer.Option(help="What `lazysched solve` wrote. [profile the model and solve]", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "--model-name-or-path", help="The model that was profiled.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", "--dataset", help=data_commands.DATA_HELP)] = None,
    output_dir: Annotated[
        str | None, typer.Option(help="Folder for the trained model; one of an earlier run is replaced.")
    ] = None,
    eval_data: Annotated[str | None, typer.Option(help="Held-out rows; loss before and after.")] = None,
    data_format: data_commands.FormatOption = None,
    group_by_length: Annotated[bool, typer.Option(help="Rows of a batch have similar lengths.")] = False,
    init: Annotated[Literal["pretrained", "random"], typer.Option(help="Where the weights start.")] = "pretrained",
    device: Annotated[
        Literal["auto", "cuda", "cpu"], typer.Option(help="What computes; auto takes the GPU if there is one.")
    ] = "auto",
    max_steps: Annotated[int | None, typer.Option(min=1, help="Steps; overrides the epochs.")] = None,
    num_train_epochs: Annotated[float, typer.Option(min=0, help="Passes over the data.")] = 1.0,
    learning_rate: Annotated[float, typer.Option(min=0, help="Peak of the schedule.")] = 2e-5,
    lr_scheduler_type: Annotated[
        Literal["linear", "cosine", "constant"], typer.Option(help="What follows the warm-up.")
    ] = "linear",
    warmup_ratio: Annotated[float, typer.Option(min=0, max=1, help="Share of the steps that warm up.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(min=0, help="Of matrices; biases and norms do not decay.")] = 0.0,
    max_grad_norm: Annotated[float | None, typer.Option(min=0, help="Norm to clip to. [the plan's]")] = None,
    adam_beta1: Annotated[float, typer.Option(min=0, max=1, help="Share of the first moment that stays.")] = 0.9,
    adam_beta2: Annotated[float, typer.Option(min=0, max=1, help="Share of the second moment that stays.")] = 0.999,
    adam_epsilon: Annotated[float, typer.Option(min=0, help="Added to the root of the second moment.")] = 1e-8,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of the data, random weights and rounding.")] = 42,
    logging_steps: Annotated[int, typer.Option(min=1, help="Steps between two lines of the log.")] = 1,
    trace: Annotated[
        str | None, typer.Option(help="File for a timeline of some steps; opens in Perfetto and chrome://tracing.")
    ] = None,
    trace_steps: Annotated[
        str | None, typer.Option(metavar="FROM:TO", help="Which steps, counted from 0, TO left out. [2:5]")
    ] = None,
    report_to: Annotated[
        list[str] | None,
        typer.Option(help="tensorboard, wandb or trackio; repeat it for several. [none]", show_default=False),
    ] = None,
    eval_steps: Annotated[
        int, typer.Option(min=0, help="Steps between two looks at the held-out loss; 0: before and after alone.")
    ] = 0,
    save_steps: Annotated[int, typer.Option(min=0, help="Steps between two checkpoints; 0 saves none.")] = 500,
    save_total_limit: Annotated[int | None, typer.Option(min=1, help="Checkpoints that stay. [all]")] = None,
    save_state_limit: Annotated[
        int, typer.Option(min=1, help="Checkpoints that keep optimizer state; older ones keep the model.")
    ] = 2,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest valid checkpoint.")] = False,
    resume_from_checkpoint: Annotated[str | None, typer.Option(help="Go on from this one.")] = None,
    per_device_train_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="With the next, rows of a step; the plan splits them. [8]"),
    ] = None,
    gradient_accumulation_steps: Annotated[int, typer.Option(min=1, help="See the one before.")] = 1,
    max_length: Annotated[int | None, typer.Option(min=1, help="Tokens of a row, checked against the plan.")] = None,
    packing: Annotated[
        bool | None, typer.Option("--packing/--no-packing", help="Checked against the plan.", show_default=False)
    ] = None,
    full_determinism: Annotated[
        bool | None,
        typer.Option(
            "--full-determinism/--no-full-determinism",
            help="On a GPU too, equal runs have equal bits. Checked against the plan.",
            show_default=False,
        ),
    ] = None,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--no-bf16", help="Checked against the plan.", show_default=False)
    ] = None,
    trainable: Annotated[
        list[str] | None,
        typer.Option(
            "--trainable",
            "--unfrozen-parameters",
            metavar="PATTERN",
            help="Regular expression: parameters in whose name it is found are trained, all others are frozen; repeat "
            "it for more. Checked against the plan. [everything, or the plan's]",
        ),
    ] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Without a plan, most GPU memory. [what is free]")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Without a plan, most host memory. [what is free]")] = None,
    numa_bind: Annotated[
        bool,
        typer.Option(
            "--numa-bind/--no-numa-bind", help="On several sockets, keep threads to the cores beside the GPU."
        ),
    ] = True,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Solve if there is no plan, check, print settings and memory, train nothing.",
        ),
    ] = False,
) -> None:
    """Train MODEL as the plan says and write a Hugging Face folder."""
    given = [name for name in TrainConfig.model_fields if _is_given(context, name)]
    settings = resolve(config, context.params, given)
    from lazysched.runtime.reporters import check_reporters

    check_reporters(settings.report_to)
    _refuse_inputs(config, settings)
    arguments, console = settings.run_arguments(), plain_console()
    planned = plan_to_make(settings, console) if settings.plan is None else _given_plan(settings, console)
    from lazysched.runtime.binding import bind_to_gpu
    from lazysched.runtime.finished import FinishedRun
    from lazysched.runtime.report import comparison_table
    from lazysched.runtime.train import prepare

    bind_to_gpu(settings.device, console, wanted=settings.numa_bind)
    run = prepare(planned, **arguments, console=console)
    if isinstance(run, FinishedRun):
        return
    if dry_run:
        _show(settings, run, console)
        return
    if run.plan.trainable:
        say(console, f"trained: {_trained(run.plan)}")
    result = run.to_end()
    console.print(comparison_table(result, "training"))
    say(console, f"trained model: {result.output_dir}")
    end_report(result.output_dir, console)


def _given_plan(settings: TrainConfig, console: Console) -> Plan:
    """The plan that the settings name, once they are those that it was solved for."""
    assert settings.plan is not None
    plan = Plan.load(settings.plan)
    settings.check_plan(plan)
    if settings.per_device_train_batch_size is not None:
        split = f"a step of {plan.batch_size} rows goes in {plan.accumulation} times {plan.micro_batch}"
        say(console, f"{split}, as the plan says")
    plan = _with_own_prediction(plan, console)
    _warn_beyond_budget(plan, console)
    return plan


def _warn_beyond_budget(plan: Plan, console: Console) -> None:
    """An edit by hand may need more than the plan was solved for; a GPU's allocator will keep to the budget."""
    for tier, peak_bytes in (plan.predicted.peak_bytes if plan.predicted else {}).items():
        budget_bytes = plan.budget_bytes.get(tier, 0)
        if peak_bytes > budget_bytes:
            needed, has = format_bytes(peak_bytes), format_bytes(budget_bytes)
            remedy = "raise that if there is so much, or solve anew"
            warn(console, f"the plan needs {needed} of {tier}, its budget_bytes has {has}; {remedy}")


def _show(settings: TrainConfig, run: Run, console: Console) -> None:
    """What would run."""
    console.print(settings.as_yaml(), highlight=False, markup=False, soft_wrap=True, end="")
    console.print(_memory_table(run.plan))
    say(console, f"steps: {run.num_steps} of {run.plan.batch_size} rows, {run.num_epochs:.3g} epochs")
    say(console, f"trained: {_trained(run.plan)}")


def _refuse_inputs(config: Path | None, settings: TrainConfig) -> None:
    """Refuse outputs that would replace what is read; what else lies in the output folder is looked at by the run."""
    fields = ("plan", "model", "data", "eval_data")
    inputs = {"CONFIG": config, **{name: getattr(settings, name) for name in fields}}
    if settings.trace is not None and not Path(settings.trace).is_dir():
        require_no_input(Path(settings.trace), inputs, "trace")
    if settings.plan is None:
        require_no_input(plan_path(settings), inputs, "output_dir")
    if Path(settings.output_dir).is_dir():
        require_no_input(Path(settings.output_dir), inputs, "output_dir")


def _with_own_prediction(plan: Plan, console: Console) -> Plan:
    """``plan``, simulated anew where what it predicts is of another: of itself before it was edited by hand."""
    if plan.profile is None or plan.predicted is None:
        return plan
    from lazysched.solver import simulate_plan
    from lazysched.solver.simulate_report import stale_fields

    try:
        timeline = simulate_plan(plan)
    except UsageError:  # what its profile lacks may not keep it from running; the run says what does
        return plan.model_copy(update={"predicted": None})
    stale = stale_fields(plan.predicted, timeline)
    if not stale:
        return plan
    step = format_seconds(timeline.step_s)
    say(
        console,
        f"the plan was edited since it was simulated ({', '.join(stale)} differ): now it predicts {step} a step",
    )
    return plan.model_copy(update={"predicted": timeline.prediction()})


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _trained(plan: Plan) -> str:
    """What the plan trains, with numbers where it carries its profile."""
    patterns = ", ".join(plan.trainable) or "everything"
    return patterns if plan.profile is None else f"{patterns}: {trained_share(plan.profile.stages)}"


def _memory_table(plan: Plan) -> Table:
    """What the plan predicts of each tier, beside its budget."""
    table = Table("memory", "predicted", "budget")
    peaks = plan.predicted.peak_bytes if plan.predicted else {}
    for tier, budget_bytes in plan.budget_bytes.items():
        if budget_bytes or peaks.get(tier):
            predicted = format_bytes(peaks[tier]) if tier in peaks else "not predicted"
            table.add_row(tier, predicted, format_bytes(budget_bytes))
    return table
