"""Draw the pictures of ``how_it_works.md`` from ``pictures/plan.json``: ``python docs/pictures.py [FOLDER]``.

The plan was made by ``lazysched solve --hardware h200 --model config.json --batch-size 32 --gpu-memory 24GB
--host-memory 100GB`` for the 7B shape of ``benchmarks/step.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent.parent))
from lazysched.plots import draw_decisions, draw_memory, draw_timeline
from lazysched.schemas import Plan
from lazysched.solver import memory_frame, simulate_plan, steady_frame

FOLDER = Path(__file__).parent / "pictures"
TURN_S = 0.15
"""Before and after the loss in the enlarged picture: some blocks of the forward, some of the backward."""


def pictures(plan: Plan) -> dict[str, tuple[float, Callable[[Axes], None]]]:
    """File name -> height in inches and what draws it, for a plan that carries its profile."""
    timeline = simulate_plan(plan)
    steady, memory = steady_frame(timeline.intervals), memory_frame(plan, timeline)
    return {
        "step.svg": (3.0, partial(draw_timeline, steady=steady)),
        "turn.svg": (3.0, partial(_draw_turn, steady=steady)),
        "memory.svg": (3.8, partial(draw_memory, memory=memory, tier="gpu", budget_bytes=plan.budget_bytes["gpu"])),
        "decisions.svg": (3.2, partial(draw_decisions, decisions=plan.to_frame())),
    }


def save_pictures(folder: Path) -> None:
    """Write the pictures to ``folder``; the same plan gives the same bytes."""
    for name, (height_inches, draw) in pictures(Plan.load(FOLDER / "plan.json")).items():
        figure = Figure(figsize=(12, height_inches), layout="constrained", facecolor="white")
        axes = figure.subplots()
        draw(axes)
        for filled in axes.collections:  # thousands of corners, pixels take less
            filled.set_rasterized(name == "memory.svg")
        with rc_context({"svg.hashsalt": "lazysched"}):
            figure.savefig(folder / name, dpi=150, metadata={"Date": None})


def _draw_turn(axes: Axes, steady: pd.DataFrame) -> None:
    """The moments around the loss, where the forward turns into the backward."""
    loss = steady[steady.op.str.startswith("loss")]
    first_s, last_s = loss.start_s.min() - TURN_S, loss.end_s.max() + TURN_S
    draw_timeline(axes, steady[(steady.end_s > first_s) & (steady.start_s < last_s)])
    axes.set_xlim(first_s, last_s)


if __name__ == "__main__":
    save_pictures(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
