"""``compare``: what differs and only that; equal plans, other batches, other models."""

from __future__ import annotations

import pytest
from rich.console import Console

from lazysched.errors import UsageError
from lazysched.schemas import Plan, Prediction, Update
from lazysched.solver import simulate_plan, solve
from lazysched.solver.compare import SETTINGS, Comparison, compare, print_comparison
from lazysched.solver.words import saves_in_words, stages_in_words
from tests.solver.synthetic import tiny_profile

MB = 1_000_000

SOLVED_BY_HAND = Plan(
    model_id="tiny", hardware_id="any", compute_dtype="float32", batch_size=2, seq_len=8, micro_batch=2,
    accumulation=1, loss_chunk_tokens=8, stages={}, variants={}, budget_bytes={},
)  # fmt: skip
"""Without a profile, so that its prediction is taken as it is."""


def solved(gpu_bytes: int = 1000 * MB, batch_size: int = 1, num_blocks: int = 4) -> Plan:
    return solve(
        tiny_profile(num_blocks), batch_size=batch_size, gpu_memory_bytes=gpu_bytes, host_memory_bytes=1000 * MB
    ).plan


def with_stages(plan: Plan, *stages: str, **changes: object) -> Plan:
    changed = {stage: plan.stages[stage].model_copy(update=changes) for stage in stages}
    return plan.model_copy(update={"stages": {**plan.stages, **changed}})


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Every block on the GPU, saving everything there."""
    blocks = [f"block.{i}" for i in range(4)]
    gpu = {"weights": "gpu", "state": "gpu", "save": "all", "saved_tiers": {"rest": "gpu"}, "input_tier": "gpu"}
    return with_stages(solved(), *blocks, **gpu)


def in_words(found: Comparison) -> str:
    console = Console(width=140)
    with console.capture() as captured:
        print_comparison(found, ("a.json", "b.json"), console)
    return captured.get()


def test_equal_plans_differ_in_nothing(plan: Plan) -> None:
    found = compare(plan, plan)
    assert (found.settings, found.stages) == ([], [])
    assert found.num_equal_stages == found.num_stages == 6
    assert all(figure.a == figure.b for figure in found.figures)
    text = in_words(found)
    assert "Decisions that differ" not in text
    assert "equal: 6 of 6 stages; all settings" in text


def test_stages_that_differ_alike_are_joined(plan: Plan) -> None:
    other = with_stages(plan, "block.0", "block.1", "block.3", weights="host", state="host")
    found = compare(plan, other)
    told = [(d.where, d.field, d.a, d.b) for d in found.stages]
    assert told == [
        ("block.0..1, 3", "weights", "on gpu", "streamed from host"),
        ("block.0..1, 3", "optimizer state", "hybrid8 on gpu", "hybrid8 on host"),
    ]
    assert found.num_equal_stages == 3
    assert "block.0..1, 3 weights" in in_words(found)


def test_what_a_block_saves_and_where(plan: Plan) -> None:
    other = with_stages(plan, "block.2", input_tier="host")
    other = with_stages(other, "block.3", saved_tiers={"rest": "host"}, input_tier="host")
    told = [(d.where, d.a, d.b) for d in compare(plan, other).stages]
    assert told == [
        ("block.2", "all on gpu", "all on gpu, its input on host"), ("block.3", "all on gpu", "all on host"),
    ]  # fmt: skip


def test_figures_are_those_of_the_plans_as_they_stand(plan: Plan) -> None:
    other = with_stages(plan, *(f"block.{i}" for i in range(4)), weights="host", state="host")
    assert other.predicted == plan.predicted  # stale
    figures = {figure.name: figure for figure in compare(plan, other).figures}
    seen = [simulate_plan(p) for p in (plan, other)]
    assert [figures["step_s"].a, figures["step_s"].b] == pytest.approx([t.step_s for t in seen])
    assert figures["h2d_bytes"].b == seen[1].moved_bytes["h2d"]
    assert figures["gpu_peak_bytes"].a == seen[0].peak_bytes["gpu"]
    assert figures["tokens_per_s"].a == pytest.approx(plan.seq_len / seen[0].step_s)


def test_another_batch_is_shown() -> None:
    found = compare(solved(), solved(batch_size=2))
    assert {d.where: (d.a, d.b) for d in found.settings} == {"batch_size": ("1", "2"), "accumulation": ("1", "2")}
    tokens = next(figure for figure in found.figures if figure.name == "tokens_per_s")
    step = next(figure for figure in found.figures if figure.name == "step_s")
    assert tokens.a is not None
    assert step.a is not None
    assert tokens.a == pytest.approx(16 / step.a)
    assert "batch_size" in in_words(found)


def test_other_budgets_and_clipping_are_shown(plan: Plan) -> None:
    other = plan.model_copy(
        update={"budget_bytes": {"gpu": 24 * 10**9, "host": 1000 * MB}, "update": Update(clip_norm=None)}
    )
    told = {d.where: (d.a, d.b) for d in compare(plan, other).settings}
    assert told["gpu budget"] == ("1 GB", "24 GB")
    assert told["update"][1] == "exact, no clipping, with check for finite gradients"


def test_what_was_fixed_by_hand_is_shown(plan: Plan) -> None:
    other = plan.model_copy(update={"pins": ["block[0:2].weights=gpu", "head.state=gpu"]})
    told = {d.where: (d.a, d.b) for d in compare(plan, other).settings}
    assert told == {"pins": ("none", "block[0:2].weights=gpu, head.state=gpu")}
    assert "pins" in compare(other, other).equal_settings


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_of_a_plan_is_compared(plan: Plan, name: str) -> None:
    other = plan.model_copy(update={name: "something else"})
    bare = [p.model_copy(update={"profile": None, "predicted": None}) for p in (plan, other)]
    assert [d.where for d in compare(*bare).settings] == [name]


def test_a_plan_without_prediction_has_no_figures(plan: Plan) -> None:
    by_hand = plan.model_copy(update={"profile": None, "predicted": None})
    found = compare(plan, by_hand)
    assert all(figure.b is None for figure in found.figures)
    assert found.figures
    assert " - " in in_words(found)


def test_other_models_are_refused(plan: Plan) -> None:
    with pytest.raises(UsageError, match="synthetic and other are different models"):
        compare(plan, plan.model_copy(update={"model_id": "other"}))
    with pytest.raises(UsageError, match=r"stages: 'block\.4' is in one of them only"):
        compare(plan, solved(num_blocks=5))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["embed", "block.0", "block.1", "block.3", "head"], "embed, block.0..1, 3, head"),
        (["block.7"], "block.7"),
        (["block.0", "block.2", "block.3", "block.4"], "block.0, 2..4"),
        ([], ""),
    ],
)
def test_stages_in_words(names: list[str], words: str) -> None:
    assert stages_in_words(names) == words


def test_segments_are_told(plan: Plan) -> None:
    choice = plan.stages["block.0"].model_copy(update={"segment": 4})
    assert saves_in_words(choice) == "all on gpu, segments of 4"


def test_what_is_rounding_is_no_difference() -> None:
    prediction = Prediction(step_s=1.0, exposed_s={}, moved_bytes={}, peak_bytes={})
    plans = [
        SOLVED_BY_HAND.model_copy(
            update={"predicted": prediction.model_copy(update={"step_s": step_s, "exposed_s": waits})}
        )
        for step_s, waits in ((1.0, {"h2d": 7e-15, "d2h": 0.25}), (1.0 + 7e-15, {"h2d": -7e-15, "d2h": 7e-15}))
    ]
    text = in_words(compare(*plans))
    rows = {
        cells[1]: cells[2:5]
        for cells in ([c.strip() for c in line.split("│")] for line in text.splitlines())
        if cells[2:]
    }
    assert rows["step"] == ["1 s", "1 s", ""]
    assert rows["waits for d2h"] == ["250 ms", "0 µs", "-250 ms (-100.0 %)"]
    assert "waits for h2d" not in rows
