"""The loop: learning rates, gradients that are not finite, held-out loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import get_scheduler

from lazysched.errors import RunError, UsageError
from lazysched.optimizer_state import NUM_COEFFICIENTS
from lazysched.runtime import blocks
from lazysched.runtime.batch import Batch
from lazysched.runtime.blocks import add_gradients
from lazysched.runtime.executor import StepResult
from lazysched.runtime.hybrid8 import Coefficients
from lazysched.runtime.loop import History, TrainingLoop, mean_loss
from lazysched.runtime.model import Model
from lazysched.runtime.schedule import LearningRateSchedule, SchedulerType
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Dtype, Plan, StagePlan, StateFormat, Update
from lazysched.step_rows import StepRow
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


STORED = ("weights", "state")
EARLY = Update(clip_norm=None, check_finite=False)


def plan_for(
    model: Model, compute_dtype: Dtype = "float32", state_format: StateFormat = "hybrid8", update: Update | None = None
) -> Plan:
    """Everything on the host, every block recomputed; matrices above 1000 elements have 8-bit state."""
    end = StagePlan(weights="host", state="host", state_format=state_format)
    return Plan(
        model_id=model.model_id, hardware_id="any", compute_dtype=compute_dtype, batch_size=2, seq_len=SEQ_LEN,
        micro_batch=2, accumulation=1, loss_chunk_tokens=16, variants=variants_of(model, 2, SEQ_LEN), budget_bytes={},
        stages={s.id: end.model_copy(update={"save": "input"}) if s.is_block else end for s in model.stages},
        fp32_state_elements=1000, update=update or Update(),
    )  # fmt: skip


def make_session(
    state_format: StateFormat = "hybrid8", update: Update | None = None, max_grad_norm: float | None = 1.0,
    compute_dtype: Dtype = "float32", settings: AdamWSettings = AdamWSettings(),  # noqa: B008
) -> Session:  # fmt: skip
    config = llama(tied=True)
    model = Model(config, compute_dtype, CPU, micro_batch=2, seq_len=SEQ_LEN)
    plan = plan_for(model, compute_dtype, state_format, update)
    made = Session(plan, config, CPU, settings=settings, max_grad_norm=max_grad_norm, host_limit_bytes=10**9)
    made.initialise(seed=3)
    return made


@pytest.fixture(params=["hybrid8", "fp32"])
def session(request: pytest.FixtureRequest) -> Session:
    return make_session(request.param)


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


def stored_bytes(session: Session) -> list[bytes]:
    """Weights and optimizer state of all stages, to the byte."""
    buffers = (session.buffers[f"host/{kind}/{stage.id}"] for stage in session.model.stages for kind in STORED)
    return [buffer.view(torch.uint8).numpy().tobytes() for buffer in buffers]


def run(session: Session, num_steps: int, rows: list[StepRow]) -> None:
    schedule = LearningRateSchedule(1e-2, "constant", num_steps, 0.0)
    TrainingLoop(session.executor, batch, schedule, rows.append).run()


def test_gradients_that_are_not_finite_change_nothing_and_stop_the_run(session: Session) -> None:
    run(session, 1, [])  # so that there are moments which must not change
    poison(session)
    before = stored_bytes(session)
    rows: list[StepRow] = []
    # All stages from the one where the loss is taken, in the order of the backward.
    named = "3 steps in a row, last in head, block.2, block.1, block.0, embed, with loss nan"
    with pytest.raises(RunError, match=named):
        run(session, 10, rows)
    assert [row.skipped for row in rows] == [True] * 3
    assert stored_bytes(session) == before


def test_a_resumed_run_counts_the_steps_before_it_that_were_not_finite(session: Session) -> None:
    rows: list[StepRow] = []
    run(session, 2, rows)
    before = [rows[0], *(replace(rows[1], step=step, grad_norm=float("nan")) for step in (1, 2))]
    poison(session)
    schedule = LearningRateSchedule(1e-2, "constant", 10, 0.0)
    with pytest.raises(RunError, match="step 4: the gradient norm was nan in 3 steps in a row"):
        TrainingLoop(session.executor, batch, schedule, rows.append, history=History(before, num_restored=3)).run()


def test_bf16_weights_and_24_bit_masters_do_not_change_in_a_skipped_step() -> None:
    session = make_session(compute_dtype="bfloat16")
    run(session, 1, [])
    poison(session)
    before = stored_bytes(session)
    run(session, 2, [])
    assert stored_bytes(session) == before


def test_only_the_stages_whose_gradient_is_not_finite_are_named(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    def second_block_fails(sums: list[torch.Tensor], grads: Sequence[torch.Tensor], first: bool) -> None:
        add_gradients(sums, grads, first)
        if next(calls) % 3 == 1:  # blocks 2, 1, 0
            sums[0].view(-1)[0] = float("inf")

    monkeypatch.setattr(blocks, "add_gradients", second_block_fails)
    with pytest.raises(RunError, match=r"norm was inf in 3 steps in a row, last in block\.1, with loss \d"):
        run(session, 10, [])


def test_where_only_the_sum_of_norms_overflows_the_largest_is_named() -> None:
    norms = {"embed": (0, 1), "block.0": (1, 3), "head": (3, 4)}
    finite = torch.tensor([1.0, float("inf"), 1.0, 1e30, 2e38, 3e38, 1e30])
    assert StepResult(finite, None, 0.0, norms).stages_not_finite() == ["block.0"]


def test_a_plan_that_gave_the_check_up_skips_nothing_but_stops_too() -> None:
    session = make_session(update=EARLY, max_grad_norm=None)
    poison(session)
    rows: list[StepRow] = []
    with pytest.raises(RunError, match=r"3 steps in a row, last in head, block\.2"):
        run(session, 10, rows)
    assert [row.skipped for row in rows] == [False] * 3
    assert num_updates(session) >= 3.0


def test_early_updates_are_those_that_wait() -> None:
    """Without clipping the factor is 1 either way, so that only the order of the updates differs."""
    waiting, early = (make_session(update=update, max_grad_norm=None) for update in (Update(clip_norm=None), EARLY))
    rows: dict[str, list[StepRow]] = {"waiting": [], "early": []}
    run(waiting, 4, rows["waiting"])
    run(early, 4, rows["early"])
    reported = [[(row.loss, row.grad_norm, row.skipped) for row in rows[kind]] for kind in rows]
    assert reported[0] == reported[1]
    assert stored_bytes(waiting) == stored_bytes(early)


def test_clipping_is_refused_where_updates_do_not_wait_for_the_norm() -> None:
    with pytest.raises(UsageError, match=r"max_grad_norm: 1\.0: this plan updates before the gradient norm is known"):
        make_session(update=EARLY)


def test_an_epsilon_that_8bit_state_cannot_have_is_refused() -> None:
    with pytest.raises(UsageError, match="adam_epsilon: 1e-31 is too small for optimizer state hybrid8"):
        make_session(settings=AdamWSettings(epsilon=1e-31))
    make_session("fp32", settings=AdamWSettings(epsilon=1e-31))


def test_the_seed_decides_the_rounding_of_8bit_state() -> None:
    states = []
    for seed in (0, 0, 1):
        session = make_session(settings=AdamWSettings(seed=seed))
        run(session, 2, [])
        states.append(stored_bytes(session))
    assert states[0] == states[1] != states[2]


def test_a_run_goes_on_after_a_single_skipped_step_as_if_it_had_not_been(session: Session) -> None:
    weight = poison(session)
    rows: list[StepRow] = []
    run(session, 1, rows)
    weight.view(-1)[0] = 0.5
    run(session, 2, rows)
    assert [row.skipped for row in rows] == [True, False, False]
    assert History(rows).num_skipped == 1
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
