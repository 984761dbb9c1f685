"""The command line: ``lazysched profile | solve | train | explain | simulate | compare | plot | report | ...``.

Nothing here computes. Each command reads its files first, so that a wrong one is refused at once, and imports what
it runs only then: ``--help`` and ``solve`` never load torch.

Exit codes: 0 done, 1 the run failed or a simulated plan does not fit, 2 wrong usage, 130 interrupted, 141 whoever read
the output went away (files were written before), 143 ended by SIGTERM after saving.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ValidationError
from typer.exceptions import TyperException

from lazysched import data_commands, doctor_command, evaluate_command, plan_commands, plot_command, report_command
from lazysched.__main__ import INTERRUPTED
from lazysched.cli_hardware import measure_machine, show_machine
from lazysched.errors import LazyschedError, UsageError, flag_of, short_repr
from lazysched.foreign_settings import advice
from lazysched.lines import plain_console, warn
from lazysched.outputs import require_folder_of, require_no_input
from lazysched.progress import profile_shown
from lazysched.schemas import Profile
from lazysched.solve_command import solve
from lazysched.train_command import train
from lazysched.train_config import ALIASES, TrainConfig
from lazysched.trainable import trained_share
from lazysched.units import parse_bytes

OUTPUT_CLOSED = 141
"""128 and the number of SIGPIPE, as other programs at the head of a pipe end."""

app = typer.Typer(
    name="lazysched",
    help="Full fine-tuning of a language model on one GPU whose memory is too small for it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # markup would swallow the [defaults] in the help texts
    pretty_exceptions_enable=False,
    # Half of the tools in this field spell flags with underscores; both are taken.
    context_settings={"token_normalize_func": lambda token: token.replace("_", "-")},
)


DeviceName = Literal["auto", "cuda", "cpu"]
DeviceOption = Annotated[DeviceName, typer.Option(help="What computes; auto takes the GPU if there is one.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a known error becomes one line on stderr.

    Args:
        argv: arguments without the program's name; null takes those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = app(args=arguments or ["--help"], prog_name="lazysched", standalone_mode=False)
    except LazyschedError as error:
        return _report(str(error), error.exit_code)
    except TyperException as error:
        if (instead := _instead_of_flag(error)) is not None:
            return _report(f"{error.message}; {instead}", error.exit_code)
        return _report(f"{_with_value(error)}; see --help of the command", error.exit_code)
    except BrokenPipeError:
        return _output_closed()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich ends the process so
            return _output_closed()
        raise
    except OSError as error:  # a name too long, a folder that vanished: the system's own words
        return _report(f"{error.filename or 'system'}: {error.strerror or error}; check the path", 1)
    # typer turns Ctrl-C into the code 130, or into Abort where it asked something.
    except typer.Abort:
        code = INTERRUPTED
    if code == INTERRUPTED:
        return _report("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _report(message: str, exit_code: int) -> int:
    """Show ``message`` on one line, whatever whitespace it holds."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return exit_code


def _with_value(error: TyperException) -> str:
    """What typer says, and the value where it only says what that should be."""
    text, cause = error.format_message().rstrip("."), error.__cause__
    value = cause.errors()[0]["input"] if isinstance(cause, ValidationError) else ""
    return text if str(value) in text else f"{text}, not {short_repr(value)}"


def _instead_of_flag(error: TyperException) -> str | None:
    """What to give in place of an unknown flag of ``train`` that other tools have; None for all other errors."""
    # typer's class of this error is private.
    flag, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if not isinstance(flag, str) or context is None or context.info_name != "train":
        return None
    name = flag.lstrip("-").replace("-", "_")
    return (
        f"write {flag_of(ALIASES[name])}" if name in ALIASES else advice(name, TrainConfig.model_fields, as_flags=True)
    )


def _output_closed() -> int:
    """Nobody reads the output any more: what is still to be flushed at the end of the process goes nowhere."""
    with contextlib.suppress(OSError, ValueError):  # a test's or a notebook's output has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OUTPUT_CLOSED


def _show_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"lazysched {version('lazysched')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def profile(
    context: typer.Context,
    *,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Hugging Face folder or hub name, GGUF file, or a config.json alone."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Profile to write, JSON or YAML.")],
    device: DeviceOption = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="Type of weights and activations while computing.")
    ] = "auto",
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of one row.")] = 1024,
    micro_batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows that go through at once; repeat it for more sizes. [1 2 4]")
    ] = None,
    storage: Annotated[Path | None, typer.Option(help="Folder whose file speed to measure.")] = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="Compile blocks and loss. [on a GPU: --compile]", show_default=False
        ),
    ] = None,
    packing: Annotated[
        bool, typer.Option("--packing", help="Rows hold several samples, which do not see each other.")
    ] = False,
    full_determinism: Annotated[
        bool, typer.Option("--full-determinism", help="On a GPU too, equal runs are to have equal bits.")
    ] = False,
    trainable: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Regular expression: parameters in whose name it is found are trained, all others are frozen; repeat "
            "it for more. [everything]",
        ),
    ] = None,
    pin_limit: Annotated[
        str | None,
        typer.Option(help="Most host memory that can be page-locked, as 16GB. [no limit unless one is met]"),
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Measure nothing; refine --profile by what a run took.")
    ] = None,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", metavar="PROFILE", help="What to refine; needs --from-run.")
    ] = None,
    hardware_only: Annotated[
        bool, typer.Option("--hardware-only", help="Measure no model; write a file for `solve --hardware`.")
    ] = False,
    numa_bind: Annotated[
        bool,
        typer.Option(
            "--numa-bind/--no-numa-bind", help="On several sockets, keep threads to the cores beside the GPU."
        ),
    ] = True,
) -> None:
    """Measure what this machine does with MODEL, or refine a profile by a run: --from-run RUN_DIR --profile PROFILE."""
    require_folder_of(output)
    require_no_input(output, {"MODEL": model, "--profile": profile_file, "--from-run": from_run})
    pin_limit_bytes = None if pin_limit is None else parse_bytes(pin_limit, "--pin-limit")
    if numa_bind and from_run is None and (hardware_only or model is not None):
        from lazysched.runtime.binding import bind_to_gpu

        bind_to_gpu(device, plain_console())
    if hardware_only:
        machine = measure_machine(context, _explicit(device), storage, pin_limit_bytes)
        machine.save(output)
        show_machine(machine, plain_console())
    elif from_run is not None or profile_file is not None:
        _refine_profile(context, from_run, profile_file).save(output)
    elif model is None:
        raise UsageError("MODEL: missing; name a model, or a run with --from-run and --profile")
    else:
        from lazysched.profiles.measure import profile as measure

        with profile_shown(plain_console(stderr=True)) as report:
            measured = measure(
                model, device=_explicit(device), dtype=_explicit(dtype), seq_len=seq_len,
                micro_batches=micro_batch or [1, 2, 4], storage_dir=None if storage is None else str(storage),
                compiled=compiled, packing=packing, full_determinism=full_determinism, pin_limit_bytes=pin_limit_bytes,
                trainable=trainable or None, report=report,
            )  # fmt: skip
        measured.save(output)
        for warning in measured.doubts():
            warn(plain_console(stderr=True), warning)
        if measured.trainable:
            plain_console().print(f"trained: {trained_share(measured.stages)}", highlight=False)
    plain_console().print(f"wrote {output}", highlight=False, markup=False)


def _refine_profile(context: typer.Context, from_run: Path | None, profile_file: Path | None) -> Profile:
    """The profile in ``profile_file`` with what the run in ``from_run`` took; other arguments are refused."""
    if from_run is None:
        raise UsageError("--from-run: missing; --profile names what a run refines, name the run's --output-dir too")
    if profile_file is None:
        raise UsageError("--profile: missing; --from-run refines a profile, name the one that the plan was solved from")
    for name in (
        "model", "device", "dtype", "seq_len", "micro_batch", "storage", "packing", "full_determinism", "pin_limit",
        "trainable",
    ):  # fmt: skip
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            shown = "MODEL" if name == "model" else flag_of(name)
            raise UsageError(f"{shown}: means nothing with --from-run, which measures nothing; leave it out")
    from lazysched.profiles.refine import load_recording, refine

    return refine(Profile.load(profile_file), load_recording(from_run))


app.command()(solve)


app.command()(train)


@app.command()
def quickstart(
    output_dir: Annotated[Path, typer.Option(help="Folder for data, profile, plan and model.")] = Path("quickstart"),
    device: DeviceOption = "auto",
) -> None:
    """Profile, solve and train a small real model on generated word problems, in a few minutes."""
    from lazysched.quickstart import run_quickstart

    run_quickstart(output_dir, device=_explicit(device), console=plain_console())


def _explicit(choice: str) -> str | None:
    """``choice``, or null where the called function decides."""
    return None if choice == "auto" else choice


plan_commands.register(app)
plot_command.register(app)
report_command.register(app)
doctor_command.register(app)
data_commands.register(app)
evaluate_command.register(app)
