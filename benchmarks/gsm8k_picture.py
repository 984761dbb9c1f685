"""What gsm8k.py makes of its rows: the summary over seeds, a table, and the picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

Figures = dict[str, tuple[float | None, str]]
"""metric -> value, None where nothing was measured, and unit."""
CASES = ("streamed", "resident")
LABELS = {"streamed": "streamed under 2 GB, 8-bit state", "resident": "resident, fp32 state"}
COLOURS = {"streamed": "tab:orange", "resident": "tab:blue"}
SEEDS_NEEDED = 3
MOST_DIFFERENCE = 0.005
"""Of the held-out loss, streamed against resident."""
SMOOTHED_STEPS = 10


def compared_seeds(figures: Mapping[str, Figures], metric: str = "held_out_loss") -> list[int]:
    """Seeds for which both cases have ``metric``."""
    seeds = [
        {int(name.removeprefix(f"{case}_seed_")) for name, of_run in figures.items() if _is_of(case, name)
         and value_of(of_run, metric) is not None}
        for case in CASES
    ]  # fmt: skip
    return sorted(set.intersection(*seeds))


def value_of(of_run: Figures, metric: str) -> float | None:
    """A figure of one run; None where it was not measured."""
    return of_run.get(metric, (None, ""))[0]


def relative_difference(figures: Mapping[str, Figures], seed: int) -> float:
    """Held-out loss of one seed, streamed against resident."""
    streamed, resident = (_of(figures, case, seed, "held_out_loss") for case in CASES)
    return streamed / resident - 1


def summary(figures: Mapping[str, Figures]) -> Figures:
    """What all seeds say together; None until both cases have three of them."""
    by_seed = {seed: relative_difference(figures, seed) for seed in compared_seeds(figures)}
    differences = [abs(difference) for difference in by_seed.values()]
    largest = max(differences) if len(differences) >= SEEDS_NEEDED else None
    # Not "largest > 0.005": a loss that is not a number is not within anything.
    within = None if largest is None else float(all(value <= MOST_DIFFERENCE for value in differences))
    found: Figures = {f"relative_difference_seed_{seed}": (value, "1") for seed, value in by_seed.items()}
    found |= {"largest_relative_difference": (largest, "1"), "within_half_a_percent": (within, "1")}
    answered = compared_seeds(figures, "exact_match")
    for case in CASES:
        shares = [_of(figures, case, seed, "exact_match") for seed in answered]
        mean = sum(shares) / len(shares) if len(shares) >= SEEDS_NEEDED else None
        found[f"exact_match_{case}"] = (mean, "1")
    return found


def show(figures: Mapping[str, Figures]) -> None:
    """Print the figures of each run, and whether the losses agree."""
    table = Table("run", "held-out loss before", "after", "exact match", "step", "GPU peak", title="GSM8K")
    for name, of_run in figures.items():
        table.add_row(
            name.replace("_seed_", ", seed "), _text(of_run, "held_out_loss_before", ".5f"),
            _text(of_run, "held_out_loss", ".5f"), _text(of_run, "exact_match", ".2%"),
            _text(of_run, "step_s", ".3f", " s"), _text(of_run, "peak_gpu_bytes", ".3g", " B"),
        )  # fmt: skip
    console, found = Console(width=110), summary(figures)
    console.print(table)
    for seed in compared_seeds(figures):
        console.print(f"seed {seed}: streamed against resident {relative_difference(figures, seed):+.3%}")
    within = value_of(found, "within_half_a_percent")
    answer = "not measured with three seeds" if within is None else "yes" if within else "NO"
    console.print(f"held-out losses within {MOST_DIFFERENCE:.1%} of each other: {answer}", highlight=False)


def draw(steps: pd.DataFrame, figures: Mapping[str, Figures], path: Path) -> None:
    """Loss curves of all runs, held-out loss and exact match of each; png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(14.5, 4.5), layout="constrained", width_ratios=(2, 1, 1)
    )
    _draw_curves(left, steps)
    _draw_runs(
        middle,
        figures,
        "held_out_loss",
        f"held-out loss, bars: ±{MOST_DIFFERENCE:.1%}",
        "loss per trained token (nats)",
    )
    _draw_runs(right, figures, "exact_match", "exact match, with 95% intervals", "right answers (%)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_curves(axes: Any, steps: pd.DataFrame) -> None:
    for case, width, alpha in (("resident", 2.4, 0.5), ("streamed", 1.2, 1.0)):
        of_case = steps[steps["case"] == case]
        for index, (_, of_run) in enumerate(of_case.groupby("seed")):
            smooth = of_run.set_index("step")["loss"].rolling(SMOOTHED_STEPS, min_periods=1).mean()
            label = LABELS[case] if index == 0 else None
            axes.plot(smooth, color=COLOURS[case], lw=width, alpha=alpha, label=label)
    seeds = ", ".join(map(str, sorted(steps["seed"].unique())))
    axes.set(title=f"training loss, mean of {SMOOTHED_STEPS} steps; seeds {seeds}", xlabel="step")
    axes.set_ylabel("loss per trained token (nats)")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_runs(axes: Any, figures: Mapping[str, Figures], metric: str, title: str, unit: str) -> None:
    """One point a run, seeds along the axis."""
    scale = 100 if metric == "exact_match" else 1
    seeds = set[int]()
    for case, shift in zip(CASES, (0.08, -0.08), strict=True):
        points = {
            int(name.removeprefix(f"{case}_seed_")): of_run for name, of_run in figures.items()
            if _is_of(case, name) and value_of(of_run, metric) is not None
        }  # fmt: skip
        seeds |= set(points)
        values = [scale * (value_of(of_run, metric) or 0.0) for of_run in points.values()]
        errors = [scale * _uncertainty(of_run, metric) for of_run in points.values()]
        if metric == "held_out_loss" and case == "streamed":
            errors = [0.0] * len(points)  # it is to lie within the other's bars
        places = [seed + shift for seed in points]
        axes.errorbar(places, values, errors, fmt="o", capsize=4, color=COLOURS[case])
    if not seeds:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
    axes.set(title=title, xlabel="seed", ylabel=unit, xticks=sorted(seeds))
    axes.margins(x=0.3)
    if seeds:
        axes.set_xlim(min(seeds) - 0.5, max(seeds) + 0.5)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(alpha=0.3)


def _uncertainty(of_run: Figures, metric: str) -> float:
    """Half of what a bar spans: of a loss what it may differ by, of a share what 19 of 20 samples would lie within."""
    value, rows = value_of(of_run, metric) or 0.0, value_of(of_run, "exact_match_rows") or 1.0
    return MOST_DIFFERENCE * value if metric == "held_out_loss" else 1.96 * math.sqrt(value * (1 - value) / rows)


def _is_of(case: str, name: str) -> bool:
    return name.startswith(f"{case}_seed_")


def _of(figures: Mapping[str, Figures], case: str, seed: int, metric: str) -> float:
    value = value_of(figures[f"{case}_seed_{seed}"], metric)
    assert value is not None
    return value


def _text(of_run: Figures, metric: str, spec: str, unit: str = "") -> str:
    value = value_of(of_run, metric)
    return "not measured" if value is None else format(value, spec) + unit
