"""Pictures of plans, drawn by matplotlib (extra ``plot``) from the frames that plans and timelines offer.

Every function draws on axes that it is given:

    figure, axes = plt.subplots(figsize=(12, 3))
    draw_timeline(axes, steady_frame(timeline.intervals))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from lazysched.schemas import Engine, Tier
from lazysched.units import format_bytes, format_seconds, scale_of

Color = str | tuple[float, float, float]
OP_COLORS = {
    "forward": "#4e79a7", "recompute": "#a0cbe8", "loss": "#e15759", "backward": "#f28e2b", "update": "#59a14f",
    "load": "#b07aa1", "fetch": "#76b7b2", "read": "#d4a6c8", "save": "#edc948", "grads": "#9c755f",
    "write": "#d7b5a6",
}  # fmt: skip
"""First part of an operation's id -> colour; others are ``OTHER_COLOR``."""
OTHER_COLOR = "#8c8c8c"
NOTHING_COLOR = "#f2f2f2"
KINDS = {
    "context": ("driver context", "#595959"), "page_tables": ("tables of page-locked memory", "#8c8c8c"),
    "fragmentation": ("fragmentation", "#bfbfbf"), "weights": ("weights", "#4e79a7"),
    "state": ("optimizer state", "#59a14f"), "grads": ("gradients", "#9c755f"),
    "accumulator": ("gradient accumulators", "#d7b5a6"), "hidden": ("hidden states, inputs", "#76b7b2"),
    "saved": ("saved tensors", "#f28e2b"), "outgoing": ("saved, leaving", "#edc948"),
    "fetched": ("saved, fetched", "#ffbe7d"), "working": ("working set", "#e15759"),
}  # fmt: skip
"""Kind of buffer -> (what a legend calls it, its colour), in the order of the stack; other kinds lie on top as one."""
OTHER_KIND = ("batch, arguments, scalars", "#b07aa1")
TIER_COLORS = {"gpu": "#f28e2b", "host": "#4e79a7", "nvme": "#b07aa1"}
MIXED_COLOR = "#59a14f"
"""For a stage whose saved tensors lie in several tiers."""
TIER_ROWS = {
    "weights": "weights", "state": "optimizer state", "saved_tiers": "saved tensors", "input_tier": "block input",
}  # fmt: skip
AMOUNT_ROWS = {"saved_bytes": "bytes saved", "recompute_s": "recompute time"}
FEW_RECTANGLES = 5000
"""A vector picture holds so many well; more of them are drawn as pixels."""
BORDERED_SHARE = 1 / 400
"""Of the step: operations that take less would drown in their white borders."""


def draw_timeline(axes: Axes, steady: pd.DataFrame, until_s: float | None = None) -> None:
    """One steady step by engine; a gap on ``compute`` is time in which it waits.

    Args:
        axes: what to draw on; about 12 x 3 inches suit.
        steady: ``op engine start_s end_s``, as ``lazysched.solver.steady_frame`` gives it.
        until_s: where the picture ends, so that several have one scale; None: with the step.
    """
    used = set(steady.engine)
    engines = [engine for engine in get_args(Engine) if engine in used]
    step_s = steady.end_s.max()
    factor, unit = (1.0, "s") if (until_s or step_s) >= 1 else (1e3, "ms")
    colors = steady.op.str.split("/").str[0].map(OP_COLORS).fillna(OTHER_COLOR)
    for row, engine in enumerate(engines):
        ops = steady[steady.engine == engine]
        axes.axhspan(row - 0.4, row + 0.4, color=NOTHING_COLOR, zorder=0)
        spans = list(zip(factor * ops.start_s, factor * (ops.end_s - ops.start_s), strict=True))
        axes.broken_barh(
            spans, (row - 0.4, 0.8), facecolors=colors[ops.index].tolist(), edgecolors="white",
            linewidth=0.15 if (ops.end_s - ops.start_s).median() > BORDERED_SHARE * step_s else 0,
            rasterized=len(steady) > FEW_RECTANGLES,
        )  # fmt: skip
    axes.set_yticks(range(len(engines)), engines)
    axes.set_ylim(len(engines) - 0.5, -0.5)
    axes.set_xlim(0, factor * (until_s or step_s))
    axes.set_xlabel(f"time since the step before left compute, {unit}")
    shown = {name: color for name, color in OP_COLORS.items() if color in set(colors)}
    shown |= {"other": OTHER_COLOR} if OTHER_COLOR in set(colors) else {}
    _legend(axes, [Patch(color=color, label=name) for name, color in shown.items()])


def draw_memory(axes: Axes, memory: pd.DataFrame, tier: Tier, budget_bytes: int | None = None) -> None:
    """Bytes of one tier over one steady step, stacked by kind, with the budget.

    Args:
        axes: what to draw on; about 12 x 4 inches suit.
        memory: as ``lazysched.solver.memory_frame`` gives it.
        tier: whose bytes.
        budget_bytes: what a dashed line shows; one far above the peak is named, not drawn.
    """
    by_kind = stacked_kinds(pd.DataFrame(memory.xs(tier, axis=1, level="tier")))
    at_peak = by_kind.iloc[int(by_kind.sum(axis=1).argmax())]
    peak_bytes = int(at_peak.sum())
    factor, unit = scale_of(peak_bytes)
    layers = [factor * by_kind[name] for name in by_kind]
    colors = [color for name, color in (*KINDS.values(), OTHER_KIND) if name in by_kind]
    seconds = by_kind.index.to_numpy()
    scale_s, time_unit = (1.0, "s") if seconds[-1] >= 1 else (1e3, "ms")
    axes.stackplot(
        scale_s * seconds, layers, colors=colors, step="post", linewidth=0, rasterized=by_kind.size > FEW_RECTANGLES
    )
    labels = [f"{name}, {format_bytes(num_bytes)}" for name, num_bytes in at_peak.items()]
    handles = [Patch(color=color, label=label) for color, label in zip(colors, labels, strict=True)]
    if budget_bytes is not None and budget_bytes <= 1.5 * peak_bytes:
        axes.axhline(factor * budget_bytes, color="black", linestyle="--", linewidth=1)
        axes.set_ylim(0, 1.06 * factor * max(budget_bytes, peak_bytes))
    axes.set_xlim(0, scale_s * seconds[-1])
    axes.set_xlabel(f"time since the step before left compute, {time_unit}")
    axes.set_ylabel(f"{tier} memory, {unit}")
    limit = "" if budget_bytes is None else f" of {format_bytes(budget_bytes)}"
    _legend(axes, handles[::-1], title=f"at the peak: {format_bytes(peak_bytes)}{limit}")


def stacked_kinds(memory: pd.DataFrame) -> pd.DataFrame:
    """Bytes of one tier, from below to above, by what a legend calls them; small kinds and unknown ones as one."""
    columns = {name: memory[kind] for kind, (name, _) in KINDS.items() if kind in memory and memory[kind].any()}
    rest = memory[[kind for kind in memory if kind not in KINDS]].sum(axis=1)
    return pd.DataFrame(columns | ({OTHER_KIND[0]: rest} if rest.any() else {}), index=memory.index)


def draw_decisions(axes: Axes, decisions: pd.DataFrame) -> None:
    """Decisions per stage as a heat map: a column for each stage, a row for each decision.

    Args:
        axes: what to draw on; about 12 x 3 inches suit.
        decisions: as ``plan.to_frame()`` gives them, figures included.
    """
    rows: dict[str, list[Color]] = {}
    blocks = decisions.index.str.startswith("block.")
    for column, name in TIER_ROWS.items():
        tiers = decisions[column].where(blocks | (column in ("weights", "state")), "")
        rows[name] = [TIER_COLORS.get(tier, MIXED_COLOR if tier else NOTHING_COLOR) for tier in tiers]
    variants = _variant_colors(decisions[blocks & (decisions.save != "")])  # without a backward nothing is saved
    rows["save variant"] = [variants.get(name, NOTHING_COLOR) for name in decisions.save.where(blocks, "")]
    if decisions.segment.max() > 1:
        rows["segment"] = _shades(decisions.segment.where(blocks, 0))
    for column, name in AMOUNT_ROWS.items():
        most = decisions[column].max()
        label = "none" if most <= 0 else f"up to {(format_seconds if column.endswith('_s') else format_bytes)(most)}"
        rows[f"{name}, {label}"] = _shades(decisions[column])
    image = np.array([[to_rgb(color) for color in row] for row in rows.values()])
    axes.imshow(image, aspect="auto", interpolation="nearest")
    _cell_borders(axes, len(decisions), len(rows))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xticks(*_stage_ticks(decisions.index))
    tiers_shown = set(decisions[list(TIER_ROWS)].to_numpy().ravel())
    handles = [Patch(color=color, label=tier) for tier, color in TIER_COLORS.items() if tier in tiers_shown]
    handles += [Patch(color=MIXED_COLOR, label="several tiers")] if any("+" in tier for tier in tiers_shown) else []
    _legend(axes, handles + [Patch(color=color, label=f"save {name}") for name, color in variants.items()])


def _variant_colors(blocks: pd.DataFrame) -> dict[str, Color]:
    """Save variant -> colour, darker the more it keeps."""
    kept = blocks.groupby("save").saved_bytes.max().sort_values(ascending=False)
    shades = np.linspace(0.95, 0.25, len(kept)) if len(kept) != 1 else [0.6]
    return {str(name): _shade(float(share)) for name, share in zip(kept.index, shades, strict=True)}


def _shades(amounts: pd.Series) -> list[Color]:
    most = float(amounts.max())
    return [_shade(float(amount) / most) if amount > 0 else NOTHING_COLOR for amount in amounts]


def _shade(share: float) -> Color:
    """From a light to a dark green-blue."""
    light, dark = np.array(to_rgb("#cfe8e6")), np.array(to_rgb("#0b4f57"))
    red, green, blue = (light + (dark - light) * share).tolist()
    return red, green, blue


def _cell_borders(axes: Axes, num_columns: int, num_rows: int) -> None:
    axes.set_xticks(np.arange(num_columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(num_rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def _stage_ticks(stages: pd.Index) -> tuple[list[int], list[str]]:
    """Places and labels: blocks by number, as many as can be read; the ends by name, a line lower."""
    digits = len(str(len(stages)))
    stride = next(s for s in (1, 2, 4, 8, 16, 32, 10**9) if len(stages) * digits <= 80 * s)
    labels = {k: str(stage).removeprefix("block.") for k, stage in enumerate(stages) if (k - 1) % stride == 0}
    labels |= {k: f"\n{stages[k]}" for k in (0, len(stages) - 1)}
    places = sorted(labels)
    return places, [labels[place] for place in places]


def draw_frontier(axes: Axes, step_s: pd.DataFrame, *, main: str = "lazysched") -> None:
    """Step time against a budget, one line for each column, with the place where the main line bends.

    Args:
        axes: what to draw on; about 9 x 4 inches suit.
        step_s: index: the budget in GB, ascending; columns: what plans; values: seconds, NaN where there is no plan.
        main: the column that is drawn thick.
    """
    axes.plot(step_s.index, step_s[main], marker="o", linewidth=2.2, color="#f28e2b", label=main, zorder=3)
    others = [name for name in step_s if name != main]
    colors = ("#76b7b2", "#b07aa1", "#9c755f", "#59a14f", "#edc948", "#8c8c8c")
    for name, color, dashes in zip(others, colors, ("-", "--", ":", "-", "--", ":"), strict=False):
        axes.plot(step_s.index, step_s[name], dashes, marker=".", linewidth=1.5, color=color, label=name)
    bend = bend_of(step_s[main])
    if bend is not None:
        axes.axvline(bend, color="black", linestyle=":", linewidth=1, label=f"bend at {bend:g} GB")
    axes.set_ylim(0, 1.08 * float(step_s.max().max()))
    axes.grid(axis="y", color="#e0e0e0")
    axes.set_axisbelow(True)
    axes.set_ylabel("predicted step, s")
    _legend(axes)


def bend_of(step_s: pd.Series) -> float | None:
    """The budget at which a falling line lies farthest below the straight one between its ends; None for a line.

    Args:
        step_s: index: budgets, ascending; values: seconds, NaN where nothing fits.
    """
    line = step_s.dropna()
    if len(line) < 3 or line.iloc[0] <= line.iloc[-1]:
        return None
    budgets = line.index.to_numpy(float)
    along = (budgets - budgets[0]) / (budgets[-1] - budgets[0])
    down = ((line - line.iloc[-1]) / (line.iloc[0] - line.iloc[-1])).to_numpy()
    below = 1 - along - down
    return None if below.max() <= 0 else float(budgets[below.argmax()])


def draw_ratios(axes: Axes, ratios: pd.DataFrame, names: Mapping[str, str]) -> None:
    """Predicted over measured as dots beside 1, a row for each case.

    Args:
        axes: what to draw on; about 9 x (1 + 0.4 a case) inches suit.
        ratios: index: labels of the cases; values: predicted / measured, NaN where one is missing.
        names: column of ``ratios`` -> what the legend calls it.
    """
    rows = np.arange(len(ratios))
    axes.axvline(1, color="black", linewidth=1)
    for (column, name), color, marker in zip(names.items(), ("#f28e2b", "#4e79a7", "#59a14f"), "oDs", strict=False):
        axes.plot(ratios[column], rows, marker, color=color, label=name, markersize=7)
    axes.set_yticks(rows, list(ratios.index))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    widest = max(0.05, 1.15 * float((ratios[list(names)] - 1).abs().max().max()))
    axes.set_xlim(1 - widest, 1 + widest)
    axes.xaxis.set_major_formatter(lambda ratio, _: f"{100 * (ratio - 1):+.0f} %" if abs(ratio - 1) > 1e-9 else "equal")
    axes.grid(axis="both", color="#e8e8e8")
    axes.set_axisbelow(True)
    axes.set_xlabel("predicted against measured: left of the line reality took more")
    _legend(axes)


def _legend(axes: Axes, handles: Sequence[Patch] | None = None, title: str | None = None) -> None:
    """A legend beside the picture, where it hides nothing."""
    shown = {} if handles is None else {"handles": handles}
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.02), "alignment": "left", **shown}
    axes.legend(**place, frameon=False, fontsize="small", title=title, title_fontsize="small")
