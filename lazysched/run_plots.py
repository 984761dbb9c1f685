"""Pictures of a run, drawn by matplotlib on axes that are given, from the rows of its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lazysched.step_rows import StepRow
from lazysched.units import scale_of

MOST_POINTS = 1500
"""More steps than that are drawn as means of as many in a row as it takes."""
LINE, SECOND, SKIPPED = "#4e79a7", "#f28e2b", "#e15759"


def log_frame(rows: Sequence[StepRow]) -> pd.DataFrame:
    """The rows as a table: index ``step``, counted from 1; what is not finite is missing there."""
    frame = pd.DataFrame([asdict(row) | {"tokens_per_s": row.tokens_per_s} for row in rows])
    frame = frame.set_index(frame.step.to_numpy() + 1).drop(columns=["step", "data_rows"])
    numbers = frame.columns[frame.columns != "skipped"]
    return frame.assign(**{name: frame[name].astype(float).replace([np.inf, -np.inf], np.nan) for name in numbers})


def draw_loss(
    axes: Axes, log: pd.DataFrame, before: float | None = None, after: float | None = None, num_restored: int = 0
) -> None:
    """Loss by step, the held-out loss where it was taken, and which steps were skipped.

    Args:
        axes: about 12 x 4 inches suit.
        log: as ``log_frame`` makes it.
        before: held-out loss before the first step of the process that ended the run.
        after: after the last one.
        num_restored: steps that earlier processes did.
    """
    _draw_line(axes, log.loss, "loss")
    # A run that was resumed at its end has one point for both.
    ends = pd.Series({num_restored: before} | ({log.index[-1]: after} if after is not None else {}), dtype=float)
    held_out = ends.combine_first(log.held_out_loss).dropna()
    if len(held_out):
        axes.plot(held_out.index, held_out, "o-", color=SECOND, markersize=5, linewidth=1, label="held-out loss")
    _mark_skipped(axes, log)
    axes.set_ylabel("loss per trained token")
    axes.legend(frameon=False, fontsize="small")


def draw_gradient_norm(axes: Axes, log: pd.DataFrame, clip_norm: float | None = None) -> None:
    """Global gradient norm before clipping; a dashed line is what it is clipped to."""
    _draw_line(axes, log.grad_norm, "gradient norm")
    if clip_norm is not None:
        axes.axhline(clip_norm, color="black", linestyle="--", linewidth=1, label=f"clipped to {clip_norm:g}")
    known = log.grad_norm[log.grad_norm > 0]
    if len(known) and known.max() > 30 * known.median():
        axes.set_yscale("log")
    _mark_skipped(axes, log)
    axes.set_ylabel("gradient norm")
    axes.legend(frameon=False, fontsize="small")


def draw_learning_rate(axes: Axes, log: pd.DataFrame) -> None:
    """Learning rate by step."""
    _draw_line(axes, log.learning_rate, "learning rate")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("learning rate")


def draw_step_time(axes: Axes, log: pd.DataFrame, predicted_s: float | None) -> None:
    """Time of each step beside what the plan predicts."""
    factor, unit = (1.0, "s") if log.step_s.median() >= 1 else (1e3, "ms")
    _draw_line(axes, factor * log.step_s, "measured")
    if predicted_s is not None:
        axes.axhline(factor * predicted_s, color="black", linestyle="--", linewidth=1, label="predicted")
    longest, usual = (factor * float(log.step_s.quantile(share)) for share in (1, 0.95))
    highest = 1.3 * max(usual, factor * (predicted_s or 0))
    if longest > 2 * highest:  # the first steps compile; they would flatten all others
        axes.set_ylim(0, highest)
        axes.set_title(f"longest: {longest:.3g} {unit}", fontsize="small", loc="right")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(f"step time, {unit}")
    axes.legend(frameon=False, fontsize="small")


def draw_tokens_per_s(axes: Axes, log: pd.DataFrame) -> None:
    """Tokens through the model a second, padding included."""
    _draw_line(axes, log.tokens_per_s, "tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens/s")


def draw_host_memory(axes: Axes, log: pd.DataFrame) -> None:
    """Physical memory of the process after each step: a line that keeps rising is a leak."""
    factor, unit = scale_of(float(log.host_rss_bytes.max()))
    _draw_line(axes, factor * log.host_rss_bytes, "host memory")
    axes.set_ylim(0, 1.1 * factor * float(log.host_rss_bytes.max()))
    axes.set_ylabel(f"host memory, {unit}")


def thinned(values: pd.Series) -> pd.Series:
    """``values`` as they are, or as means of so many in a row that ``MOST_POINTS`` are left; at the middle of each."""
    stride = -(-len(values) // MOST_POINTS)
    if stride <= 1:
        return values
    groups = np.arange(len(values)) // stride
    steps = pd.Series(values.index, dtype=float).groupby(groups).mean()
    return pd.Series(values.groupby(groups).mean().to_numpy(), index=steps)


def _draw_line(axes: Axes, values: pd.Series, label: str) -> None:
    shown = thinned(values)
    marker = "." if len(shown) <= 60 else ""
    axes.plot(shown.index, shown, color=LINE, linewidth=1.2, marker=marker, label=label)
    axes.set_xlabel("step" if len(shown) == len(values) else f"step, means of {-(-len(values) // MOST_POINTS)}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e8e8e8")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _mark_skipped(axes: Axes, log: pd.DataFrame) -> None:
    """Ticks at the bottom for steps whose gradient was not finite."""
    skipped = log.index[log.skipped.astype(bool)]
    if len(skipped):
        height = axes.get_xaxis_transform()
        label = f"skipped: {len(skipped)}, gradient not finite"
        axes.plot(skipped, [0.02] * len(skipped), "|", color=SKIPPED, markersize=12, transform=height, label=label)
