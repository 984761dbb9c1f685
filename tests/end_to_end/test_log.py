"""``log.jsonl`` of real runs: there while they train and after they stop, fail or are killed; the same when resumed."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lazysched.errors import RunError, StoppedError
from lazysched.runtime.batch import Batch
from lazysched.runtime.data import Batches
from lazysched.runtime.executor import StepResult
from lazysched.schemas import Plan
from lazysched.step_rows import LOG_FILE, MEASURED, rows_of
from tests.end_to_end.small_runs import SmallRun, at_step, log_of
from tests.end_to_end.tiny_folder import WORDS, make_data
from tests.one_thread import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def whole(run: SmallRun, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "out"
    run.train(plan, output, 6, save_steps=2)
    return output


def test_rows_say_what_the_step_did_and_took(whole: Path) -> None:
    rows = rows_of((whole / LOG_FILE).read_text())
    assert [row.step for row in rows] == [*range(6)]
    for row in rows:
        assert row.tokens == 4 * 24
        assert 0 < row.trained_tokens < row.tokens
        assert row.step_s > 0
        assert row.host_rss_bytes is not None
        assert row.host_rss_bytes > 10**7
    assert not [*whole.glob("log.*.jsonl")]


def test_the_first_row_of_a_process_says_what_the_plan_predicts(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted = {"step_s": 0.125, "exposed_s": {}, "moved_bytes": {}, "peak_bytes": {}}
    told = Plan.model_validate(plan.model_dump() | {"predicted": predicted})
    run.train(told, tmp_path / "out", 2, save_steps=2)
    run.train(told, tmp_path / "out", 4, resume=True)
    rows = rows_of((tmp_path / "out" / LOG_FILE).read_text())
    assert [row.predicted_step_s for row in rows] == [0.125, None, 0.125, None]


def test_the_log_is_there_while_the_run_trains(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    log = tmp_path / "out" / LOG_FILE
    at_step(monkeypatch, {3: lambda: seen.append(len(rows_of(log.read_text())))})
    run.train(plan, tmp_path / "out", 4)
    assert seen == [3]


def killed(arguments: tuple[SmallRun, Plan, Path, dict[str, Any]]) -> None:
    """Train and kill this process in step 5."""
    run, plan, output, options = arguments
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, {5: lambda: os.kill(os.getpid(), signal.SIGKILL)})
        run.train(plan, output, 6, **options)


def test_kill_9_leaves_every_step_and_a_resumed_run_has_each_once(
    run: SmallRun, plan: Plan, whole: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    process = multiprocessing.get_context("spawn").Process(
        target=killed, args=((run, plan, output, {"save_steps": 2, "eval_data": None}),)
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert log_of(output) == log_of(whole)[:5]
    before = (output / LOG_FILE).read_text().splitlines()
    run.train(plan, output, 6, resume=True)
    assert log_of(output) == log_of(whole)
    # What the checkpoint knew is the very line, times and all; the second one may not have been whole yet.
    assert (output / LOG_FILE).read_text().splitlines()[:2] == before[:2]
    assert not [*output.glob("log.*")][1:]


def test_a_failed_run_keeps_its_log_and_says_what_the_numbers_were(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match="3 steps in a row") as failed:
        run.train(plan, tmp_path / "out", 6, learning_rate=1e30, weight_decay=0.0)
    rows = rows_of((tmp_path / "out" / LOG_FILE).read_text())
    first, last = rows[-3].step + 1, rows[-1].step + 1
    assert re.search(
        rf"look at rows \d+(, \d+)+( and \d+ more)? of {re.escape(str(run.data))}, which steps {first}-{last} held "
        r"\(those of each step: data_rows in log\.jsonl\)$",
        str(failed.value),
    )
    assert [row.skipped for row in rows[-3:]] == [True] * 3
    assert not any(math.isfinite(row.grad_norm) for row in rows[-3:])
    # The next try in this folder keeps it too.
    with monkeypatch.context() as patch:
        at_step(patch, {1: lambda: 1 / 0})
        with pytest.raises(ZeroDivisionError):
            run.train(plan, tmp_path / "out", 2)
    assert sorted(os.listdir(tmp_path / "out")) == ["log.1.jsonl", LOG_FILE]
    assert rows_of((tmp_path / "out" / "log.1.jsonl").read_text())[-1].skipped
    run.train(plan, tmp_path / "out", 2)
    # The result replaces its folder, and takes the logs of other runs over.
    assert sorted(path.name for path in (tmp_path / "out").glob("log*.jsonl")) == [
        "log.1.jsonl", "log.2.jsonl", LOG_FILE,
    ]  # fmt: skip
    assert rows_of((tmp_path / "out" / "log.1.jsonl").read_text())[-1].skipped
    assert len(log_of(tmp_path / "out")) == 2


def test_steps_whose_gradient_was_not_finite_say_which_rows_they_held(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches are looked at for their tokens, of which each row of the data has its own."""
    questions = [f"what is {WORDS[3 + i]} plus {WORDS[3 + (i + 1) % 10]}" for i in range(10)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": "nine"}) + "\n\n" for q in questions))
    numbers, held = {"".join(q.split()): number for number, q in enumerate(questions, 1)}, list[list[int]]()
    batch, tokenizer = Batches.batch, AutoTokenizer.from_pretrained(run.model)

    def seen(self: Batches, step: int) -> Batch:
        found = batch(self, step)
        texts = ["".join(tokenizer.decode(ids[:7].tolist()).split()[2:]) for ids in found.input_ids]
        held.append([numbers[text] for text in texts])
        return found

    monkeypatch.setattr(Batches, "batch", seen)
    norm = StepResult.grad_norm
    monkeypatch.setattr(
        StepResult, "grad_norm", property(lambda self: math.nan if len(held) in (3, 4, 6) else norm.fget(self))
    )
    _, shown = SmallRun(run.model, data).train(plan, tmp_path / "out", 6)
    rows = rows_of((tmp_path / "out" / LOG_FILE).read_text())
    assert [row.data_rows for row in rows] == [tuple(h) if k in (2, 3, 5) else None for k, h in enumerate(held)]
    assert [row.epoch for row in rows] == [None, None, 0, 1, None, 2]  # ten rows, four a step
    of_all = sorted({number for k in (2, 3, 5) for number in held[k]})
    named = ", ".join(map(str, of_all[:8])) + (f" and {len(of_all) - 8} more" if len(of_all) > 8 else "")
    assert (
        f"steps 3-4, 6: the gradient was not finite; look at rows {named} of {data} (each step's: data_rows in "
        in shown
    )


def test_a_row_whose_held_out_loss_was_interrupted_is_there(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = str(make_data(tmp_path / "held_out.jsonl", 6))
    from lazysched.runtime import run as run_module

    evaluate, calls = run_module.held_out_loss, iter(range(9))

    def interrupted(*arguments: Any) -> float | None:
        if next(calls) == 1:  # 0 is before the first step
            raise KeyboardInterrupt
        return evaluate(*arguments)

    monkeypatch.setattr(run_module, "held_out_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.train(plan, tmp_path / "out", 4, eval_data=held_out, eval_steps=2)
    assert [row["step"] for row in log_of(tmp_path / "out")] == [1, 2]


def test_a_stopped_run_keeps_its_log(
    run: SmallRun, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, {1: lambda: os.kill(os.getpid(), signal.SIGINT)})
    with pytest.raises(StoppedError, match="stopped after step 1"):
        run.train(plan, tmp_path / "out", 4)
    assert len(log_of(tmp_path / "out")) == 1


def test_measured_keys_are_in_the_log(whole: Path) -> None:
    line = json.loads((whole / LOG_FILE).read_text().splitlines()[0])
    assert set(MEASURED) - set(line) <= {"predicted_step_s"}
