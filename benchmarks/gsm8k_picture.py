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
REFERENCES = {"resident": "", "resident_float32": "_float32"}
"""Cases that the streamed one is compared with, and the end of the names of what is found."""
CASES = ("streamed", *REFERENCES)
LABELS = {
    "streamed": "streamed under 2 GB, 8-bit state", "resident": "resident, fp32 state",
    "resident_float32": "resident, all in fp32",
}  # fmt: skip
COLOURS = {"streamed": "tab:orange", "resident": "tab:blue", "resident_float32": "tab:green"}
SEEDS_NEEDED = 3
MOST_DIFFERENCE = 0.005
"""Of the held-out loss, streamed against resident."""
SMOOTHED_STEPS = 10


def seeds_with(figures: Mapping[str, Figures], case: str, metric: str) -> list[int]:
    """Seeds of a case that have ``metric``."""
    return sorted(
        int(name.removeprefix(f"{case}_seed_")) for name, of_run in figures.items()
        if name.startswith(f"{case}_seed_") and value_of(of_run, metric) is not None
    )  # fmt: skip


def value_of(of_run: Figures, metric: str) -> float | None:
    """A figure of one run; None where it was not measured."""
    return of_run.get(metric, (None, ""))[0]


def relative_differences(figures: Mapping[str, Figures], reference: str) -> dict[int, float]:
    """Held-out loss of each seed that both have, streamed against ``reference``."""
    metric = "held_out_loss"
    seeds = set(seeds_with(figures, "streamed", metric)) & set(seeds_with(figures, reference, metric))
    return {
        seed: _of(figures, "streamed", seed, metric) / _of(figures, reference, seed, metric) - 1
        for seed in sorted(seeds)
    }


def summary(figures: Mapping[str, Figures]) -> Figures:
    """What all seeds say together; None until there are three of them."""
    found: Figures = {}
    for reference, end in REFERENCES.items():
        found |= _compared(relative_differences(figures, reference), end)
    for case in CASES:
        shares = [_of(figures, case, seed, "exact_match") for seed in seeds_with(figures, case, "exact_match")]
        mean = sum(shares) / len(shares) if len(shares) >= SEEDS_NEEDED else None
        found[f"exact_match_{case}"] = (mean, "1")
    return found


def _compared(by_seed: Mapping[int, float], end: str) -> Figures:
    """What differences to one reference say."""
    differences = [abs(difference) for difference in by_seed.values()]
    largest = max(differences) if len(differences) >= SEEDS_NEEDED else None
    # Not "largest > 0.005": a loss that is not a number is not within anything.
    within = None if largest is None else float(all(value <= MOST_DIFFERENCE for value in differences))
    found: Figures = {f"relative_difference_seed_{seed}{end}": (value, "1") for seed, value in by_seed.items()}
    return found | {
        f"largest_relative_difference{end}": (largest, "1"), f"within_half_a_percent{end}": (within, "1"),
    }  # fmt: skip


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
    for reference, end in REFERENCES.items():
        for seed, difference in relative_differences(figures, reference).items():
            console.print(f"seed {seed}: streamed against {reference} {difference:+.3%}")
        within = value_of(found, f"within_half_a_percent{end}")
        answer = "not measured with three seeds" if within is None else "yes" if within else "NO"
        console.print(
            f"held-out losses within {MOST_DIFFERENCE:.1%} of those of {reference}: {answer}", highlight=False
        )


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
    for case, width, alpha in (("resident_float32", 3.2, 0.4), ("resident", 2.2, 0.5), ("streamed", 1.2, 1.0)):
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
    for case, shift in zip(CASES, (0.16, 0.0, -0.16), strict=True):
        points = {seed: figures[f"{case}_seed_{seed}"] for seed in seeds_with(figures, case, metric)}
        seeds |= set(points)
        values = [scale * (value_of(of_run, metric) or 0.0) for of_run in points.values()]
        errors = [scale * _uncertainty(of_run, metric) for of_run in points.values()]
        if metric == "held_out_loss" and case == "streamed":
            errors = [0.0] * len(points)  # it is to lie within the others' bars
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


def _of(figures: Mapping[str, Figures], case: str, seed: int, metric: str) -> float:
    value = value_of(figures[f"{case}_seed_{seed}"], metric)
    assert value is not None
    return value


def _text(of_run: Figures, metric: str, spec: str, unit: str = "") -> str:
    value = value_of(of_run, metric)
    return "not measured" if value is None else format(value, spec) + unit
