"""What the runtime does not execute is refused in one line; what it executes passes."""

from __future__ import annotations

import pytest

from lazysched.errors import UsageError
from lazysched.schemas import Plan, StagePlan, Update
from lazysched.schemas.executable import check_executable

BLOCK = StagePlan(weights="host", state="host", saved_tiers={"intermediates": "host"}, input_tier="host")


def plan_with(update: Update | None = None, **changes: object) -> Plan:
    return Plan(
        model_id="m", hardware_id="h", compute_dtype="float32", batch_size=2, seq_len=8, micro_batch=2, accumulation=1,
        loss_chunk_tokens=8, variants={}, budget_bytes={}, update=update or Update(),
        stages={"embed": StagePlan(weights="gpu", state="gpu"), "block.0": BLOCK.model_copy(update=changes)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "nvme", "state": "nvme"}, "stages.block.0.weights: nvme is not executable yet; use gpu or host"),
        ({"state": "nvme"}, "stages.block.0.state: nvme is not executable yet; use gpu or host"),
        ({"input_tier": "nvme"}, "stages.block.0.input_tier: nvme is not executable yet; use gpu or host"),
        (
            {"saved_tiers": {"intermediates": "nvme"}},
            "stages.block.0.saved_tiers.intermediates: nvme is not executable yet; use gpu or host",
        ),
        ({"segment": 2}, "stages.block.0.segment: 2 is not executable yet; use 1"),
    ],
)
def test_what_is_not_executed_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_executable(plan_with(**changes))
    assert str(caught.value) == f"plan: {message}"


def test_selective_updates_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^plan: update\.mode: 'selective' is not executable; use exact$"):
        check_executable(plan_with(Update(mode="selective")))


def test_what_is_executed_passes() -> None:
    check_executable(plan_with())
