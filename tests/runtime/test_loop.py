"""The loop: learning rates, gradients that are not finite, held-out loss."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_scheduler

from lazysched.errors import RunError
from lazysched.optimizer_state import NUM_COEFFICIENTS
from lazysched.runtime.batch import Batch
from lazysched.runtime.hybrid8 import Coefficients
from lazysched.runtime.loop import StepRow, TrainingLoop, mean_loss
from lazysched.runtime.model import Model
from lazysched.runtime.schedule import LearningRateSchedule, SchedulerType
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Plan, StagePlan
from tests.runtime.tiny import CPU, SEQ_LEN, llama, uneven_batch, variants_of


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.3])
def test_learning_rates_are_those_of_transformers(kind: SchedulerType, warmup_ratio: float) -> None:
    num_steps = 11
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    warmup = math.ceil(num_steps * warmup_ratio)
    name = "constant_with_warmup" if kind == "constant" else kind
    theirs = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=num_steps)
    ours = LearningRateSchedule(2.0, kind, num_steps, warmup_ratio)
    for step in range(num_steps):
        assert ours.rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        theirs.step()


@pytest.fixture
def session() -> Session:
    config = llama(tied=True)
    model = Model(config, "float32", CPU, micro_batch=2, seq_len=SEQ_LEN)
    choice = StagePlan(weights="host", state="host", save="input")
    plan = Plan(
        model_id=model.model_id, hardware_id="any", compute_dtype="float32", batch_size=2, seq_len=SEQ_LEN,
        micro_batch=2, accumulation=1, loss_chunk_tokens=16, variants=variants_of(model, 2, SEQ_LEN), budget_bytes={},
        stages={s.id: choice if s.is_block else StagePlan(weights="host", state="host") for s in model.stages},
    )  # fmt: skip
    made = Session(plan, config, CPU, settings=AdamWSettings(), max_grad_norm=1.0, host_limit_bytes=10**9)
    made.initialise(seed=3)
    return made


def batch(step: int) -> Batch:
    return uneven_batch(2, SEQ_LEN, 97, seed=step)


def num_updates(session: Session) -> float:
    """What the bias correction sees."""
    return float(Coefficients(*session.buffers["gpu/scale"][:NUM_COEFFICIENTS]).step)


def poison(session: Session) -> torch.Tensor:
    """Make one weight NaN; returns the tensor to mend."""
    weights = session.updates["block.1"].weights
    value = next(iter(weights.values()))
    value.view(-1)[0] = float("nan")
    return value


def run(session: Session, num_steps: int, rows: list[StepRow]) -> None:
    schedule = LearningRateSchedule(1e-2, "constant", num_steps, 0.0)
    TrainingLoop(session.executor, batch, schedule, rows.append).run()


def test_gradients_that_are_not_finite_change_nothing_and_stop_the_run(session: Session) -> None:
    poison(session)
    before = {name: session.weight(name).clone() for name, _ in session.weight_names()}
    rows: list[StepRow] = []
    with pytest.raises(RunError, match="3 steps in a row"):
        run(session, 10, rows)
    assert [row.skipped for row in rows] == [True] * 3
    for name, value in before.items():
        assert torch.equal(session.weight(name).nan_to_num(7.0), value.nan_to_num(7.0)), name


def test_a_run_goes_on_after_a_single_skipped_step_as_if_it_had_not_been(session: Session) -> None:
    weight = poison(session)
    rows: list[StepRow] = []
    run(session, 1, rows)
    weight.view(-1)[0] = 0.5
    run(session, 2, rows)
    assert [row.skipped for row in rows] == [True, False, False]
    # The number of updates, which the bias correction sees, does not count the skipped one.
    assert num_updates(session) == 2.0


def test_loss_falls_and_the_rows_say_what_was_done(session: Session) -> None:
    rows: list[StepRow] = []
    schedule = LearningRateSchedule(2e-2, "constant", 30, 0.0)
    history = TrainingLoop(session.executor, lambda step: batch(0), schedule, rows.append).run()
    assert history.losses[-1] < 0.5 * history.losses[0]
    assert [row.step for row in rows] == list(range(30))
    assert all(row.tokens == 2 * SEQ_LEN and row.step_s > 0 for row in rows)
    assert history.jsonl().count("\n") == 30


def test_an_evaluation_changes_nothing_that_follows(session: Session) -> None:
    """Not the weights, and not the number of updates that the bias correction sees."""
    before = {name: session.weight(name).clone() for name, _ in session.weight_names()}
    session.executor.step(batch(1), 1e-2)
    updates = num_updates(session)
    after = {name: session.weight(name).clone() for name, _ in session.weight_names()}
    session.executor.evaluate(batch(2))
    session.executor.evaluate(batch(3))
    assert num_updates(session) == updates
    assert all(torch.equal(session.weight(name), value) for name, value in after.items())
    assert not all(torch.equal(before[name], value) for name, value in after.items())


def test_held_out_loss_weighs_batches_by_their_tokens(session: Session) -> None:
    parts = [batch(1), batch(2)]
    losses = [session.executor.evaluate(part).loss for part in parts]
    tokens = [part.num_trained_tokens for part in parts]
    mean = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
    assert mean_loss(session.executor, parts) == pytest.approx(mean, rel=1e-6)


def test_held_out_loss_of_nothing_is_refused(session: Session) -> None:
    masked = Batch(torch.ones(2, SEQ_LEN, dtype=torch.int64), torch.full((2, SEQ_LEN), -100), 0)
    with pytest.raises(RunError, match="no token is trained"):
        mean_loss(session.executor, [masked])
