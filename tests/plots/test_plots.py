"""What pictures show: read back from the axes they were drawn on."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from lazysched import plots
from lazysched.schemas import Plan
from lazysched.solver import memory_frame, simulate_plan, solve, steady_frame
from tests.solver.synthetic import CARD, SHAPE_3B, large_profile

GB = 10**9


@pytest.fixture(scope="module")
def plan() -> Plan:
    profile = large_profile(SHAPE_3B, CARD, 6, (4,))
    return solve(
        profile, batch_size=8, gpu_memory_bytes=8 * GB, host_memory_bytes=100 * GB, time_limit_s=3
    ).plan  # fmt: skip


@pytest.fixture
def axes() -> Axes:
    return Figure(figsize=(12, 4), layout="constrained").subplots()


def outlines(axes: Axes) -> list[list[np.ndarray]]:
    """Of each group of filled areas, the corners of each area as (n, 2) arrays."""
    groups = [artist for artist in axes.collections if isinstance(artist, PolyCollection)]
    return [[np.asarray(path.vertices) for path in group.get_paths()] for group in groups]


def legend(axes: Axes) -> dict[str, str]:
    """Label -> colour."""
    shown = axes.get_legend()
    assert shown is not None
    colors = [to_hex(handle.get_facecolor()) for handle in shown.get_patches()]
    return dict(zip([text.get_text() for text in shown.get_texts()], colors, strict=True))


def test_every_operation_lies_in_the_row_of_its_engine(plan: Plan, axes: Axes) -> None:
    steady = steady_frame(simulate_plan(plan).intervals)
    plots.draw_timeline(axes, steady)
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["compute", "h2d", "d2h", "cpu"]
    for engine, bars in zip(rows, outlines(axes), strict=True):
        ops = steady[steady.engine == engine]
        factor = 1 if steady.end_s.max() >= 1 else 1e3
        drawn = [bar[[0, 2], 0] for bar in bars]
        expected = factor * ops[["start_s", "end_s"]].to_numpy()
        assert np.sort(np.sort(np.array(drawn)), axis=0) == pytest.approx(np.sort(expected, axis=0))
    shown = legend(axes)
    assert shown["forward"] == plots.OP_COLORS["forward"]
    assert {op.split("/")[0] for op in steady.op} & set(plots.OP_COLORS) == set(shown) - {"other"}


def test_engines_of_the_disk_have_rows_of_their_own(axes: Axes) -> None:
    steady = pd.DataFrame(
        [("read/block.0", "nvme_read", 0.0, 1.0), ("forward/x", "compute", 1.0, 2.0)],
        columns=["op", "engine", "start_s", "end_s"],
    )
    plots.draw_timeline(axes, steady)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "nvme_read"]


def test_the_stack_is_as_high_as_the_peak(plan: Plan, axes: Axes) -> None:
    timeline = simulate_plan(plan)
    plots.draw_memory(axes, memory_frame(plan, timeline), "gpu", 8 * GB)
    peak_gb = timeline.peak_bytes["gpu"] / GB
    tops = [layer[:, 1].max() for layers in outlines(axes) for layer in layers]
    assert max(tops) == pytest.approx(peak_gb)
    (line,) = axes.lines
    assert list(line.get_ydata()) == [8, 8]
    assert axes.get_ylim()[1] > 8
    shown = axes.get_legend()
    assert shown is not None
    assert shown.get_title().get_text().endswith("of 8 GB")
    assert any(label.startswith("weights, ") for label in legend(axes))


def test_bytes_last_until_they_change(axes: Axes) -> None:
    memory = pd.DataFrame({("gpu", "weights"): [8 * GB, GB, GB]}, index=pd.Index([0.0, 3.0, 4.0], name="time_s"))
    memory.columns.names = ["tier", "kind"]
    plots.draw_memory(axes, memory, "gpu")
    ((layer,),) = outlines(axes)
    corners = {(float(x), float(y)) for x, y in layer}
    assert {(0.0, 8.0), (3.0, 8.0), (3.0, 1.0), (4.0, 1.0)} <= corners
    assert (0.0, 1.0) not in corners


def test_a_budget_far_away_is_named_and_not_drawn(plan: Plan, axes: Axes) -> None:
    memory = memory_frame(plan, simulate_plan(plan))
    plots.draw_memory(axes, memory, "host", 1000 * GB)
    assert not axes.lines
    shown = axes.get_legend()
    assert shown is not None
    assert shown.get_title().get_text().endswith("of 1 TB")


def test_kinds_that_nobody_named_are_stacked_as_one() -> None:
    memory = pd.DataFrame({"weights": [5, 5], "batch": [1, 1], "loss": [2, 2], "saved": [0, 0]}, index=[0.0, 1.0])
    stacked = plots.stacked_kinds(memory)
    assert stacked.iloc[0].to_dict() == {"weights": 5, plots.OTHER_KIND[0]: 3}


def decisions(num_blocks: int = 4) -> pd.DataFrame:
    """Blocks on all tiers; the first of them keeps all, in several tiers."""
    index = ["embed", *(f"block.{i}" for i in range(num_blocks)), "head"]
    frame = pd.DataFrame(
        {"weights": "host", "state": "nvme", "save": "input", "saved_tiers": "", "segment": 1, "input_tier": "gpu",
         "saved_bytes": 10, "recompute_s": 0.5},
        index=pd.Index(index, name="stage"),
    )  # fmt: skip
    frame.loc["block.0", ["save", "saved_tiers", "saved_bytes", "recompute_s"]] = ["all", "gpu+host", 100, 0.0]
    frame.loc[["embed", "head"], ["save", "saved_bytes", "recompute_s"]] = ["all", 0, 0.0]
    return frame


def cell_colors(axes: Axes) -> dict[str, list[str]]:
    """Row -> colour of each stage."""
    (image,) = axes.images
    array = np.asarray(image.get_array())
    names = [label.get_text() for label in axes.get_yticklabels()]
    return {name: [to_hex(cell) for cell in row] for name, row in zip(names, array, strict=True)}


def test_cells_have_the_colour_of_their_decision(axes: Axes) -> None:
    plots.draw_decisions(axes, decisions())
    cells, shown = cell_colors(axes), legend(axes)
    assert cells["weights"] == [shown["host"]] * 6
    assert cells["optimizer state"] == [shown["nvme"]] * 6
    nothing = plots.NOTHING_COLOR
    assert cells["saved tensors"] == [nothing, shown["several tiers"], *[nothing] * 4]
    assert cells["block input"] == [nothing, *[shown["gpu"]] * 4, nothing]
    assert cells["save variant"] == [nothing, shown["save all"], *[shown["save input"]] * 3, nothing]
    recompute = cells["recompute time, up to 500 ms"]
    assert recompute[0] == recompute[1] == nothing
    assert recompute[2] != nothing
    assert "segment" not in cells


def test_segments_have_a_row_where_there_are_any(axes: Axes) -> None:
    frame = decisions()
    frame.loc["block.2":"block.3", "segment"] = 2
    plots.draw_decisions(axes, frame)
    ones, twos = cell_colors(axes)["segment"][1:3], cell_colors(axes)["segment"][3:5]
    assert ones[0] == ones[1] != twos[0] == twos[1]


@pytest.mark.parametrize("num_blocks", [1, 28, 36, 80, 128, 1000])
def test_labels_of_stages_do_not_touch(axes: Axes, num_blocks: int) -> None:
    plots.draw_decisions(axes, decisions(num_blocks))
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.canvas.draw()
    labels = [label for label in axes.get_xticklabels() if label.get_text()]
    boxes = [label.get_window_extent() for label in labels if not label.get_text().startswith("\n")]
    boxes.sort(key=lambda box: box.x0)
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))
    names = [label.get_text().strip() for label in labels]
    assert (names[0], names[-1]) == ("embed", "head")


def test_the_line_bends_where_it_is_farthest_below_its_chord() -> None:
    line = pd.Series({10: 1.0, 20: 0.6, 30: 0.3, 40: 0.28, 60: 0.25})
    assert plots.bend_of(line) == 30
    assert plots.bend_of(pd.Series({5: np.nan} | line.to_dict())) == 30
    assert plots.bend_of(pd.Series({10: 1.0, 20: 0.5, 30: 0.0})) is None
    assert plots.bend_of(pd.Series({10: 1.0, 20: 1.0, 30: 1.0})) is None
    assert plots.bend_of(pd.Series({10: 1.0, 20: 0.1})) is None


def test_the_frontier_shows_every_way_of_planning(axes: Axes) -> None:
    frame = pd.DataFrame({"all on gpu": [np.nan, 0.9, 0.9], "lazysched": [1.0, 0.4, 0.3]}, index=[10, 20, 80])
    plots.draw_frontier(axes, frame)
    shown = axes.get_legend()
    assert shown is not None
    assert [text.get_text() for text in shown.get_texts()] == ["lazysched", "all on gpu", "bend at 20 GB"]
    assert list(axes.lines[0].get_ydata()) == [1.0, 0.4, 0.3]
    assert axes.get_ylim() == (0, 1.08)


def test_ratios_are_all_in_sight(axes: Axes) -> None:
    ratios = pd.DataFrame({"time": [0.8, 1.02], "memory": [1.0, np.nan]}, index=["a", "b"])
    plots.draw_ratios(axes, ratios, {"time": "step", "memory": "peak"})
    low, high = axes.get_xlim()
    assert low < 0.8
    assert high > 1.02
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert axes.xaxis.get_major_formatter()(0.8, 0) == "-20 %"
