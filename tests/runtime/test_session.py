"""A session opens only with what the runtime executes."""

from __future__ import annotations

import pytest
from transformers import PretrainedConfig

from lazysched.errors import UsageError
from tests.runtime.race_plans import fixed_plans
from tests.runtime.test_plans_do_not_change_results import (
    CHUNK_TOKENS,
    FP32_ELEMENTS,
    MICRO_BATCH,
    open_session,
    tiny_model,
)
from tests.runtime.tiny import SEQ_LEN, llama


def test_a_plan_that_is_not_executable_is_refused() -> None:
    plan, tied, clip_norm = next(
        fixed_plans(
            tiny_model, "float32", micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, chunk_tokens=CHUNK_TOKENS,
            fp32_elements=FP32_ELEMENTS,
        )
    )  # fmt: skip
    config: PretrainedConfig = llama(tied)
    in_files = plan.stages["block.1"].model_copy(update={"state": "nvme"})
    plan = plan.model_copy(update={"stages": plan.stages | {"block.1": in_files}})
    with pytest.raises(UsageError, match=r"^plan: stages\.block\.1\.state: nvme is not executable yet; use"):
        open_session(plan, config, clip_norm)
