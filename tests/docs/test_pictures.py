"""Pictures in ``docs`` come out of the plan beside them."""

from __future__ import annotations

import runpy
from pathlib import Path

from lazysched.schemas import Plan
from lazysched.solver import simulate_plan
from tests.docs.markdown import ROOT

FOLDER = ROOT / "docs" / "pictures"
MOST_BYTES = 200_000


def test_pictures_can_be_drawn_again(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "docs" / "pictures.py"))["save_pictures"](tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in FOLDER.glob("*.svg")}
    assert all((FOLDER / name).stat().st_size < MOST_BYTES for name in drawn)


def test_the_plan_is_what_the_text_says_of_it() -> None:
    plan = Plan.load(FOLDER / "plan.json")
    timeline = simulate_plan(plan)
    text = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    assert f"{timeline.step_s:.2f} s" in text
    assert f"{timeline.peak_bytes['gpu'] / 1e9:.1f} GB" in text
    assert (plan.prefetch_depth, plan.d2h_lag, plan.micro_batch, plan.accumulation) == (1, 2, 8, 4)
