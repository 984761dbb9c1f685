"""The end of a run as one web page, made of what its folder holds: nothing is measured or trained here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path

from lazysched.errors import UsageError
from lazysched.html_page import facts, page, picture, save_page, table
from lazysched.plots import draw_timeline
from lazysched.run_plots import (
    draw_gradient_norm,
    draw_host_memory,
    draw_learning_rate,
    draw_loss,
    draw_step_time,
    draw_tokens_per_s,
    log_frame,
)
from lazysched.runtime.report import comparison_rows
from lazysched.runtime.train_result import TrainResult, recorded_result
from lazysched.schemas import Plan
from lazysched.schemas.run import REPORT_HEAD, RUN_FILE, Run
from lazysched.solver import simulate_plan, steady_frame
from lazysched.solver.words import choice_in_words, stages_in_words
from lazysched.step_rows import LOG_FILE, StepRow, rows_of
from lazysched.trainable import training_of

PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class SeenRun:
    """What the folder of a run holds.

    Attributes:
        rows: of its steps, at least one.
        record: of the run as a whole; None where it did not come to its end.
        plan: None where not even a checkpoint holds it.
    """

    folder: Path
    rows: list[StepRow]
    record: Run | None
    plan: Plan | None

    @classmethod
    def load(cls, folder: Path) -> SeenRun:
        """Read a finished run, or one that trains, stopped, failed or was killed.

        Raises:
            UsageError: no such folder, or it holds no log, or one without a step.
        """
        log = folder / LOG_FILE
        try:
            text = log.read_text(encoding="utf-8")
            rows = rows_of(text)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "no text"
            raise UsageError(f"{log}: cannot be read ({reason}); name the --output-dir of a run") from None
        except ValueError as error:
            raise UsageError(f"{log}: {error}; name the --output-dir of a run") from None
        if not rows:
            raise UsageError(f"{log}: holds no step yet; come back when one is done")
        record = Run.load(folder / RUN_FILE) if (folder / RUN_FILE).is_file() else None
        if record is not None and record.log_sha256 != hashlib.sha256(text.encode()).hexdigest():
            record = None
        plans = [folder / PLAN_FILE] if record else []
        plans += sorted(folder.glob(f"checkpoint-*/{PLAN_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True)
        plan = next((Plan.load(path) for path in plans if path.is_file()), None)
        return cls(folder, rows, record, plan)

    def result(self) -> TrainResult | None:
        """What the run returned when it ended; None where it did not."""
        if self.record is None:
            return None
        return recorded_result(self.folder, self.record, self.rows, self.plan)


def save_report(path: Path, folder: Path) -> None:
    """Write the page of the run in ``folder``.

    Raises:
        UsageError: the folder holds no run, or a file of it cannot be read.
        RunError: the page cannot be written.
    """
    save_page(path, report_page(SeenRun.load(folder)))


def report_page(run: SeenRun) -> str:
    """The page as HTML."""
    name = run.record.model if run.record else run.plan.model_id if run.plan else run.folder.name
    result = run.result()
    parts = [
        f"<h1>Training of {escape(name)}</h1>",
        f'<p class="note">{escape(_note(run))}</p>',
        facts(dict(_facts(run))),
        *_curves(run),
    ]
    if result is not None:
        parts += ["<h2>Predicted and measured</h2>", table(("", "predicted", "measured"), comparison_rows(result))]
    return page(f"{name}: training", [*parts, *_timelines(run), *_plan(run)], head=REPORT_HEAD)


def _note(run: SeenRun) -> str:
    if run.record is None:
        return "This run has not come to its end: what is known are the steps in its log."
    return f"{run.record.hardware_id}; " + ", ".join(f"{name} {text}" for name, text in run.record.versions.items())


def _facts(run: SeenRun) -> Iterator[tuple[str, str]]:
    rows, record = run.rows, run.record
    if record is not None:
        yield "data", record.data + (f", held out {record.eval_data}" if record.eval_data else "")
    restored = f", {record.num_restored} of them by an earlier process" if record and record.num_restored else ""
    yield "steps", f"{len(rows):,}{restored}"
    yield "tokens", f"{sum(row.tokens for row in rows):,}, {sum(row.trained_tokens for row in rows):,} of them trained"
    yield "loss", f"{rows[0].loss:.4f} in the first step, {rows[-1].loss:.4f} in the last"
    if record is not None and record.held_out_loss_before is not None and record.held_out_loss_after is not None:
        began = f"after step {record.num_restored}" if record.num_restored else "before"
        yield "held-out loss", f"{record.held_out_loss_before:.4f} {began}, {record.held_out_loss_after:.4f} at the end"
    num_skipped = sum(row.skipped for row in rows)
    if num_skipped:
        yield "skipped steps", f"{num_skipped}, gradient not finite"
    if record is not None:
        shown = ("learning_rate", "lr_scheduler_type", "warmup_ratio", "weight_decay", "max_grad_norm", "seed")
        yield "settings", ", ".join(f"{name} {record.settings[name]}" for name in shown if name in record.settings)


def _curves(run: SeenRun) -> Iterator[str]:
    log, record = log_frame(run.rows), run.record
    predicted_s = run.plan.predicted.step_s if run.plan and run.plan.predicted else None
    before, after = (record.held_out_loss_before, record.held_out_loss_after) if record else (None, None)
    clip_norm = record.settings.get("max_grad_norm") if record else None
    yield "<h2>Loss</h2>"
    num_restored = record.num_restored if record else 0
    yield picture(3.8, partial(draw_loss, log=log, before=before, after=after, num_restored=num_restored))
    yield "<h2>Gradient norm and learning rate</h2>"
    norm = partial(draw_gradient_norm, log=log, clip_norm=float(clip_norm) if clip_norm else None)
    yield picture(3.0, norm, partial(draw_learning_rate, log=log))
    yield "<h2>Pace and memory</h2>"
    memory = [partial(draw_host_memory, log=log)] if log.host_rss_bytes.notna().any() else []
    pace = (partial(draw_step_time, log=log, predicted_s=predicted_s), partial(draw_tokens_per_s, log=log))
    yield picture(3.0, *pace, *memory)


def _timelines(run: SeenRun) -> Iterator[str]:
    """The last timed step, and below it the same one as the plan predicts it."""
    if run.record is None:
        return
    yield "<h2>One step on the engines</h2>"
    if not run.record.timeline:
        yield '<p class="note">Too few steps were timed for a picture.</p>'
        return
    steady = {f"measured, step {run.record.timeline[-1].step + 1}": steady_frame(run.record.timeline)}
    if run.plan is not None and run.plan.profile is not None:
        steady["predicted"] = steady_frame(simulate_plan(run.plan).intervals)
    longest_s = max(frame.end_s.max() for frame in steady.values())
    for name, frame in steady.items():
        yield f'<p class="note">{name}</p>'
        yield picture(2.6, partial(draw_timeline, steady=frame, until_s=longest_s))


def _plan(run: SeenRun) -> Iterator[str]:
    """The plan in words: stages for which the same was decided share a line."""
    if run.plan is None:
        return
    plan = run.plan
    alike: dict[str, list[str]] = {}
    training = training_of(plan.profile.stages) if plan.profile else {}
    for name, choice in plan.stages.items():
        words = choice_in_words(choice, name.startswith("block."), training.get(name, "trained"))
        alike.setdefault(words, []).append(name)
    yield "<h2>The plan</h2>"
    step = f"{plan.batch_size} rows of {plan.seq_len} tokens, {plan.accumulation} times {plan.micro_batch}"
    yield facts({"a step": step} | {stages_in_words(names): words for words, names in alike.items()})
