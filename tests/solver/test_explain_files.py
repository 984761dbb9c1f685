"""``explain``, ``simulate``, ``compare`` and frames of a plan with things in files."""

from __future__ import annotations

import pytest
from rich.console import Console

from lazysched.lower import lower
from lazysched.schemas import Curve, Plan, Profile
from lazysched.schemas.plan import Plan as PlanSchema
from lazysched.solver import memory_frame, simulate_plan, solve
from lazysched.solver.compare import compare
from lazysched.solver.explain import explain
from lazysched.solver.explain_report import print_explanation
from lazysched.solver.simulate_report import simulation
from lazysched.solver.what_if import faster, over_budget, wider
from tests.solver.synthetic import tiny_profile
from tests.solver.test_file_plans import SLOW, with_files

MB = 1_000_000


@pytest.fixture(scope="module")
def profile() -> Profile:
    return with_files(tiny_profile(4), SLOW)


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    """Blocks 0 and 1 live in files wholly, 2 has its state there, 3 what it saves."""
    solved = solve(profile, batch_size=1, gpu_memory_bytes=1000 * MB, host_memory_bytes=1000 * MB).plan
    whole, rest = {"weights": "nvme", "state": "nvme"}, {"saved_tiers": {"rest": "nvme"}, "input_tier": "nvme"}
    changes: dict[str, dict[str, object]] = {
        "block.0": {**whole, **rest}, "block.1": {**whole, **rest}, "block.2": {"weights": "host", "state": "nvme"},
        "block.3": {"weights": "host", "state": "host", **rest},
    }  # fmt: skip
    stages = {
        name: choice.model_copy(update={"save": "all", **changes.get(name, {})})
        for name, choice in solved.stages.items()
    }
    budgets = {**solved.budget_bytes, "nvme": 1000 * MB}
    edited = solved.model_copy(update={"stages": stages, "budget_bytes": budgets, "solver": None})
    edited = PlanSchema.model_validate(edited.model_dump())  # by hand, but no nonsense
    return edited.model_copy(update={"predicted": simulate_plan(edited).prediction()})
