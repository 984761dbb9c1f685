"""A session opens only with what the runtime executes."""

from __future__ import annotations

import pytest
import torch
from transformers import PretrainedConfig

from lazysched.errors import UsageError
from lazysched.runtime import session
from lazysched.schemas import Plan, Prediction
from tests.runtime.race_plans import fixed_plans
from tests.runtime.test_plans_do_not_change_results import (
    CHUNK_TOKENS,
    FP32_ELEMENTS,
    MICRO_BATCH,
    open_session,
    tiny_model,
)
from tests.runtime.tiny import SEQ_LEN, llama


def a_plan() -> tuple[Plan, bool, float | None]:
    return next(
        fixed_plans(
            tiny_model, "float32", micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, chunk_tokens=CHUNK_TOKENS,
            fp32_elements=FP32_ELEMENTS,
        )
    )  # fmt: skip


def test_what_libraries_hold_in_the_allocator_is_not_taken_from_it_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on an H200: 33 MB of cuBLAS were outside and inside at once, and plans that filled their budget failed."""
    held: list[int] = []

    def note(_device: torch.device, _num_bytes: int, planned_outside_bytes: int) -> None:
        held.append(planned_outside_bytes)

    for name in ("hold_to_budget", "claim"):
        monkeypatch.setattr(session, name, note)
    plan, tied, clip_norm = a_plan()
    predicted = Prediction(step_s=1.0, exposed_s={}, moved_bytes={}, peak_bytes={"gpu": 10**9})
    changes = {"context_bytes": 846, "workspace_bytes": 33, "predicted": predicted}
    open_session(plan.model_copy(update=changes), llama(tied), clip_norm).close()
    assert held == [813, 813, 813]


def test_a_plan_that_is_not_executable_is_refused() -> None:
    plan, tied, clip_norm = a_plan()
    config: PretrainedConfig = llama(tied)
    in_files = plan.stages["block.1"].model_copy(update={"state": "nvme"})
    plan = plan.model_copy(update={"stages": plan.stages | {"block.1": in_files}})
    with pytest.raises(UsageError, match=r"^plan: stages\.block\.1\.state: nvme is not executable yet; use"):
        open_session(plan, config, clip_norm)
