"""Every operation finds what the mathematics of the step needs, wherever a plan puts things."""

from __future__ import annotations

from hypothesis import given, settings

from lazysched.lower import lower
from tests.lowering.cases import Case, cases
from tests.lowering.contents import Replay


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_operation_finds_what_it_needs(case: Case) -> None:
    plan, stages = case
    Replay(lower(plan, stages), plan, stages).run(steps=2)
