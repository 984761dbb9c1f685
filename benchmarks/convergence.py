"""Whether training with 8-bit optimizer state ends where fp32 state ends: the whole SmolLM2-135M on GSM8K.

    python benchmarks/convergence.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data train.jsonl --eval-data test.jsonl
    python benchmarks/convergence.py --smoke --results FOLDER --model MODEL --data train.jsonl --eval-data test.jsonl

Both formats train through profile, solve and train with bf16 weights, from the same weights on the same rows for each
seed: ``fp32`` has fp32 masters and moments, ``hybrid8`` 24-bit masters and 8-bit moments. A seed gives the order of the
rows and the rounding. convergence.csv has every step, convergence.png the curves, convergence.json the held-out losses.
Attention's backward on a GPU adds in any order, so that a run there repeats only up to rounding.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from rows import RESULTS, make_row, save_rows

from lazysched.profiles.measure import profile
from lazysched.runtime.machine import hardware_id
from lazysched.runtime.train import train
from lazysched.runtime.train_result import TrainResult
from lazysched.schemas import Plan, StateFormat
from lazysched.solver import solve
from lazysched.step_rows import LOG_FILE, rows_of
from lazysched.units import format_bytes

FORMATS: tuple[StateFormat, ...] = get_args(StateFormat)
SMOOTHED_STEPS = 10
"""Steps over which the picture averages: single batches differ by more than the formats do."""
LEARNING_RATE, WARMUP_RATIO = 1e-4, 0.05
Figures = dict[str, tuple[float, str]]


@dataclass(frozen=True)
class Case:
    """Sizes of a run."""

    device: str
    batch_size: int
    seq_len: int
    num_steps: int


WHOLE, SMOKE = Case("cuda", 16, 512, 200), Case("cpu", 2, 24, 6)


def main() -> None:
    """Train with both formats and every seed; save steps, curves and held-out losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file or folder")
    parser.add_argument("--data", required=True, help="rows to train on")
    parser.add_argument("--eval-data", required=True, help="held-out rows")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--smoke", action="store_true", help="a few short steps on a CPU")
    parser.add_argument("--results", type=Path, default=None, help="folder of the three files")
    arguments = parser.parse_args()
    if arguments.smoke and arguments.results is None:
        parser.error("--smoke: give --results a folder too, or it would overwrite what was measured")
    case = SMOKE if arguments.smoke else WHOLE
    folder = arguments.results or RESULTS
    steps, figures = run(case, arguments.steps or case.num_steps, arguments)
    steps.to_csv(folder / "convergence.csv", index=False)
    draw(steps, figures, folder / "convergence.png")
    show(figures)
    print("wrote", save_rows("convergence", result_rows(figures, case, arguments), folder=folder))


def run(case: Case, num_steps: int, arguments: argparse.Namespace) -> tuple[pd.DataFrame, dict[str, Figures]]:
    """Steps of all runs (columns seed, state_format, step, loss, grad_norm), and figures by case."""
    frames: list[pd.DataFrame] = []
    figures: dict[str, Figures] = {}
    plans = solved_plans(case, arguments.model)
    for seed in arguments.seeds:
        results: dict[str, TrainResult] = {}
        for state_format, plan in plans.items():
            with tempfile.TemporaryDirectory() as folder:
                results[state_format] = train(
                    plan, model=arguments.model, data=arguments.data, eval_data=arguments.eval_data, output_dir=folder,
                    device=case.device, max_steps=num_steps, learning_rate=LEARNING_RATE, lr_scheduler_type="cosine",
                    warmup_ratio=WARMUP_RATIO, seed=seed, logging_steps=50,
                )  # fmt: skip
                frames.append(read_steps(Path(folder) / LOG_FILE, seed, state_format))
        figures[f"seed_{seed}"] = figures_of(results)
    differences = [abs(of_seed["relative_difference"][0]) for of_seed in figures.values()]
    figures["all_seeds"] = {"largest_relative_difference": (max(differences), "1")}
    return pd.concat(frames), figures


def solved_plans(case: Case, model: str) -> dict[StateFormat, Plan]:
    """A plan for each format of optimizer state, from one profile."""
    measured = profile(
        model, device=case.device, dtype="bfloat16", seq_len=case.seq_len, micro_batches=(case.batch_size,)
    )
    plans = {name: solve(measured, batch_size=case.batch_size, optimizer_state=name).plan for name in FORMATS}
    for name, plan in plans.items():
        assert plan.predicted is not None
        peaks = ", ".join(f"{tier} {format_bytes(peak)}" for tier, peak in plan.predicted.peak_bytes.items())
        print(f"{name}: predicted step {plan.predicted.step_s:.3f} s, {peaks}", flush=True)
    return plans


def read_steps(log: Path, seed: int, state_format: StateFormat) -> pd.DataFrame:
    """Loss and gradient norm of each step of one run."""
    steps = pd.DataFrame(rows_of(log.read_text(encoding="utf-8")))
    return steps[["step", "loss", "grad_norm"]].assign(seed=seed, state_format=state_format)[
        ["seed", "state_format", "step", "loss", "grad_norm"]
    ]


def figures_of(results: Mapping[str, TrainResult]) -> Figures:
    """Held-out losses of one seed, hybrid8 against fp32, and times of a step.

    Before training they differ a little: weights rounded to 24 bits first may lie a bf16 step from those rounded once.
    """
    figures: Figures = {}
    for name, result in results.items():
        assert result.held_out_loss_before is not None
        assert result.held_out_loss_after is not None
        figures[f"held_out_loss_before_{name}"] = (result.held_out_loss_before, "nats/token")
        figures[f"held_out_loss_{name}"] = (result.held_out_loss_after, "nats/token")
        figures[f"skipped_steps_{name}"] = (float(result.num_skipped), "1")
        if result.measured_step_s is not None:
            figures[f"step_s_{name}"] = (result.measured_step_s, "s")
    difference = figures["held_out_loss_hybrid8"][0] / figures["held_out_loss_fp32"][0] - 1
    return figures | {"relative_difference": (difference, "1")}


def result_rows(figures: Mapping[str, Figures], case: Case, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Rows for convergence.json; the command names files without their folders."""
    files = {"--model": arguments.model, "--data": arguments.data, "--eval-data": arguments.eval_data}
    options = [f"{option} {Path(file).name}" for option, file in files.items()]
    options += ["--seeds", *map(str, arguments.seeds)]
    options += ["--steps", str(arguments.steps)] if arguments.steps else []
    options += ["--smoke"] if arguments.smoke else []
    command, machine = " ".join(["python benchmarks/convergence.py", *options]), hardware_id(torch.device(case.device))
    return [
        make_row(name, metric, value, unit, machine, command)
        for name, of_case in figures.items()
        for metric, (value, unit) in of_case.items()
    ]


def show(figures: Mapping[str, Figures]) -> None:
    """Print the held-out losses."""
    table = Table("seed", "before", "fp32", "hybrid8", "difference", title="held-out loss")
    for name, of_seed in figures.items():
        if "relative_difference" in of_seed:
            keys = ("held_out_loss_before_fp32", "held_out_loss_fp32", "held_out_loss_hybrid8")
            losses = [f"{of_seed[key][0]:.5f}" for key in keys]
            table.add_row(name.removeprefix("seed_"), *losses, f"{of_seed['relative_difference'][0]:+.3%}")
    Console(width=100).print(table)


def draw(steps: pd.DataFrame, figures: Mapping[str, Figures], path: Path) -> None:
    """Curves of both formats, and how far they are apart, one line a seed; png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = steps.pivot(index="step", columns=["state_format", "seed"], values="loss")
    smooth = losses.rolling(SMOOTHED_STEPS, min_periods=1).mean()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    styles = {"fp32": ("tab:blue", "-", 2.4, 0.55), "hybrid8": ("tab:orange", "--", 1.3, 1.0)}
    for name, (colour, line, width, alpha) in styles.items():
        for index, seed in enumerate(smooth[name]):
            label = name if index == 0 else None
            left.plot(smooth[name][seed], color=colour, ls=line, lw=width, alpha=alpha, label=label)
    for seed in smooth["fp32"]:
        held_out = figures[f"seed_{seed}"]["relative_difference"][0]
        difference = 100 * (smooth["hybrid8"][seed] / smooth["fp32"][seed] - 1)
        right.plot(difference, lw=1.3, label=f"seed {seed}; held-out at the end: {held_out:+.3%}")
    right.axhline(0, color="black", lw=0.8)
    left.set(title=f"training loss, mean of {SMOOTHED_STEPS} steps", ylabel="loss per trained token (nats)")
    right.set(title="hybrid8 against fp32, same rows", ylabel="difference of the loss (%)")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
