"""The command ``solve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lazysched import file_options, plan_commands
from lazysched.cli_hardware import profile_to_solve, say_if_beyond_the_machine
from lazysched.lines import plain_console
from lazysched.outputs import require_folder_of, require_no_input
from lazysched.progress import search_shown
from lazysched.units import parse_bytes


def solve(
    profile_file: Annotated[
        Path | None, typer.Argument(metavar="PROFILE", help="What `lazysched profile` wrote.", show_default=False)
    ] = None,
    *,
    batch_size: Annotated[
        str,
        typer.Option(metavar="ROWS", help="Rows of one step; auto: the fewest within 1 % of the most tokens/s."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Plan to write.")],
    hardware: Annotated[
        str | None, typer.Option(help="Estimate instead: a machine of the library, as rtx4090, or a hardware file.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The config.json of the model to estimate for.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of one row in an estimate. [1024]")] = None,
    micro_batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Rows that go through at once; repeat it for more. [those of PROFILE; 1 2 4 8]"),
    ] = None,
    trainable: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="What is trained in an estimate; as in `lazysched profile`. [everything]"),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Most GPU memory, as 24GB. [what was free, beside a GPU less 0.5 GB]")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Most host memory, as 100GB. [what was free, beside a GPU less 8 GB]")
    ] = None,
    nvme: Annotated[str | None, typer.Option(help="Most bytes of files, as 200GB. [none]")] = None,
    nvme_dir: Annotated[Path | None, typer.Option(help="Folder for them; has to have room for --nvme.")] = None,
    not_executable: Annotated[
        bool,
        typer.Option(
            "--not-executable", help="Also plans that the runtime cannot run yet, to look at; train refuses them."
        ),
    ] = False,
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="DECISION", help="Fix a decision, as block[0:4].weights=gpu; repeat it for more."),
    ] = None,
    max_grad_norm: Annotated[float, typer.Option(min=0, help="Gradient norm to clip to; 0 gives clipping up.")] = 1.0,
    finite_check: Annotated[
        bool,
        typer.Option(
            "--finite-check/--no-finite-check",
            help="Skip steps whose gradient is not finite; without check and clipping, updates start in the backward.",
        ),
    ] = True,
    optimizer_state: Annotated[
        Literal["hybrid8", "fp32"], typer.Option(help="8-bit optimizer state, or the exact fp32 reference.")
    ] = "hybrid8",
    time_limit: Annotated[float, typer.Option(min=0, help="Seconds after which the best plan so far is taken.")] = 30.0,
    gap: Annotated[
        float | None,
        typer.Option(
            min=0,
            show_default="0.01, given up where it takes long",
            help="Distance to the bound that counts as optimal; the time limit is used up to prove it.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the solver.")] = 0,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="RESOURCE=FROM:TO:STEP",
            help="Solve for many budgets, as gpu-memory=8GB:80GB:8GB; writes a CSV beside the fastest plan, "
            "or only the CSV that --output names.",
        ),
    ] = None,
) -> None:
    """Find the fastest plan that fits the memory, for PROFILE, or by an estimate: --hardware NAME --model CONFIG."""
    require_folder_of(output)
    for written in (output, *([] if sweep is None else [plan_commands.table_file(output)])):
        require_no_input(written, {"PROFILE": profile_file, "--model": model, "--hardware": hardware})
    rows = plan_commands.parse_batch_size(batch_size)
    given = {"gpu-memory": gpu_memory, "host-memory": host_memory, "nvme": nvme}
    budgets = plan_commands.parse_sweep_option(sweep, rows, given)
    files = file_options.file_settings(nvme, nvme_dir, not_executable, budgets)
    measured = profile_to_solve(profile_file, hardware, model, seq_len, micro_batch, trainable)
    gpu_memory_bytes = None if gpu_memory is None else parse_bytes(gpu_memory, "--gpu-memory")
    host_memory_bytes = None if host_memory is None else parse_bytes(host_memory, "--host-memory")
    say_if_beyond_the_machine(measured, gpu_memory_bytes, host_memory_bytes)
    settings: dict[str, Any] = {
        "gpu_memory_bytes": gpu_memory_bytes, "host_memory_bytes": host_memory_bytes, **files,
        "pins": pin or [], "max_grad_norm": max_grad_norm or None, "check_finite": finite_check,
        "optimizer_state": optimizer_state, "time_limit_s": time_limit, "gap": gap, "seed": seed,
    }  # fmt: skip
    settings = file_options.without_unexecuted_files(settings)
    console = plain_console()
    if budgets is not None:
        plan_commands.solve_sweep(measured, budgets, {"batch_size": rows, **settings}, output, console)
        return
    from lazysched.solver import solve as find_plan
    from lazysched.solver.report import print_solution

    progress, best = plain_console(stderr=True), None
    with search_shown(time_limit, progress, "a batch" if rows is None else "") as report:
        if rows is None:
            best = plan_commands.solve_batches(measured, {**settings, "report": report}, progress)
            solution = best.solution
        else:
            solution = find_plan(measured, batch_size=rows, report=report, **settings)
    solution.plan.save(output)  # before anything is said: whoever reads the output may go away
    if best is not None:
        plan_commands.say_batch(best, console)
    print_solution(solution, measured, console)
    file_options.say_if_not_executable(solution.plan, console)
    console.print(f"wrote {output}", highlight=False, markup=False)
