"""Every operation finds what the mathematics of the step needs, wherever a plan puts things."""

from __future__ import annotations

from hypothesis import given, settings

from lazysched.lower import lower
from lazysched.schemas import StagePlan
from tests.lowering.cases import Case, cases, model
from tests.lowering.contents import Replay
from tests.lowering.test_files import plan_of


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_operation_finds_what_it_needs(case: Case) -> None:
    plan, stages = case
    Replay(lower(plan, stages), plan, stages).run(steps=2)


def test_segments_side_by_side_do_not_overwrite_inputs_that_are_held() -> None:
    stages = model(6, tied=False)
    kept = StagePlan(weights="gpu", state="gpu", saved_tiers={"intermediates": "gpu"}, segment=2)
    plan = plan_of(stages, kept, StagePlan(weights="gpu", state="gpu"), micro_batch=2, accumulation=1)
    firsts = {f"block.{i}": kept.model_copy(update={"input_tier": "nvme"}) for i in (0, 2, 4)}
    plan = plan.model_copy(update={"stages": plan.stages | firsts})
    Replay(lower(plan, stages), plan, stages).run(steps=2)
