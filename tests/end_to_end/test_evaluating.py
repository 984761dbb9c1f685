"""Held-out loss during a run: seen, kept in the log, and without any influence on training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lazysched.errors import UsageError
from lazysched.step_rows import LOG_FILE
from tests.end_to_end.small_runs import SmallRun, weights_of
from tests.end_to_end.tiny_folder import make_data
from tests.one_thread import one_thread

__all__ = ["one_thread"]


def held_out_of(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / LOG_FILE).read_text().splitlines()]
    return {row["step"]: row["held_out_loss"] for row in rows if "held_out_loss" in row}


def test_held_out_loss_is_seen_kept_and_changes_nothing(run: SmallRun, tmp_path: Path) -> None:
    held_out = str(make_data(tmp_path / "held_out.jsonl", 6))
    plan = run.plan()
    plain, _ = run.train(plan, tmp_path / "plain", 5, eval_data=held_out)
    seen, shown = run.train(plan, tmp_path / "seen", 5, eval_data=held_out, eval_steps=2, save_steps=3)
    assert seen.losses == plain.losses
    assert weights_of(tmp_path / "seen") == weights_of(tmp_path / "plain")
    losses = held_out_of(tmp_path / "seen")
    assert list(losses) == [2, 4]
    assert held_out_of(tmp_path / "plain") == {}
    assert f"step 4: held-out loss {losses[4]:.4f}" in shown
    assert seen.held_out_loss_after == plain.held_out_loss_after != losses[4]

    # A run that goes on from step 3 has the same log.
    shutil.copytree(tmp_path / "seen" / "checkpoint-3", tmp_path / "on" / "checkpoint-3")
    run.train(plan, tmp_path / "on", 5, eval_data=held_out, eval_steps=2, resume=True)
    assert held_out_of(tmp_path / "on") == losses


@pytest.mark.parametrize(
    ("steps", "message"), [(2, "eval_steps: 2: give held-out data"), (-1, "eval_steps: -1: give 0")]
)
def test_what_cannot_be_evaluated_is_refused(run: SmallRun, tmp_path: Path, steps: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run.train(run.plan(), tmp_path / "out", 2, eval_steps=steps)
    assert not (tmp_path / "out").exists()
