"""Compiled graphs on a GPU: gradients are transformers' own, and placement does not change a bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazysched.runtime.model import Model
from lazysched.schemas import AttentionBackend, Plan, SaveVariant, StagePlan
from tests.lowering.plans import plans
from tests.runtime.test_architectures import CONFIGS, ERROR_RATIO, plan_of, worst_error
from tests.runtime.test_architectures import MICRO_BATCH as FEW_ROWS
from tests.runtime.test_architectures import SEQ_LEN as FEW_TOKENS
from tests.runtime.test_compiled import all_kept, compiled_variants
from tests.runtime.test_cuda import CHUNK_TOKENS, MICRO_BATCH, SEQ_LEN, assert_equal, config, outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*determinis.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),
    pytest.mark.timeout(600),
]
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Attention's backward adds in any order unless told not to."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_gradients_are_those_of_transformers(name: str) -> None:
    """A variant in the middle, the block's input alone, and two micro-batches that are summed."""
    model = Model(CONFIGS[name], "float32", GPU, micro_batch=FEW_ROWS, seq_len=FEW_TOKENS)
    variants = compiled_variants(model, FEW_TOKENS)
    middle = [v.name for v in variants.values() if v.budget is not None][2]
    assert worst_error(CONFIGS[name], plan_of(model, variants, middle), device=GPU) <= ERROR_RATIO


@cache
def model_and_variants(tied: bool) -> tuple[Model, dict[str, SaveVariant]]:
    model = Model(config(tied), "bfloat16", GPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN)
    return model, compiled_variants(model, SEQ_LEN, MICRO_BATCH)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, bool]:
    tied, accumulation = draw(st.booleans()), draw(st.sampled_from([1, 3]))
    model, variants = model_and_variants(tied)
    plan = draw(
        plans(
            model.stages, variants, micro_batch=MICRO_BATCH, accumulation=accumulation, seq_len=SEQ_LEN,
            compute_dtype="bfloat16", clip_norm=0.5, loss_chunk_tokens=CHUNK_TOKENS, formats=("hybrid8",),
        )
    )  # fmt: skip
    return plan.model_copy(update={"model_id": model.model_id}), tied


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_placement_does_not_change_a_bit(case: tuple[Plan, bool]) -> None:
    plan, tied = case
    assert_equal(outcome(plan, tied), outcome(all_resident(plan), tied))


def all_resident(plan: Plan) -> Plan:
    """The same save variants with everything on the GPU."""
    resident = all_kept(plan).stages
    stages = {
        name: resident[name].model_copy(
            update={
                "save": choice.save, "state_format": choice.state_format,
                "saved_tiers": dict.fromkeys(choice.saved_tiers, "gpu"),
            }
        )
        for name, choice in plan.stages.items()
    }  # fmt: skip
    return plan.model_copy(update={"stages": stages, "prefetch_depth": 1, "d2h_lag": 0, "host_memory": "pinned"})


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_grouped_queries_compile_with_the_kernels_that_take_them(backend: AttentionBackend) -> None:
    """torch 2.11 refuses to weigh them; what they learn is what torch's own choice does, but for rounding."""
    losses = []
    for chosen in ("default", backend):
        model = Model(config(True), "bfloat16", GPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, attention_backend=chosen)
        variants = compiled_variants(model, SEQ_LEN, MICRO_BATCH)
        blocks = [stage for stage in model.stages if stage.is_block]
        middle = [key for key in variants if key.startswith(f"{blocks[0].structure}:")][1]
        on_host = StagePlan(weights="host", state="host")
        kept = on_host.model_copy(update={"save": variants[middle].name, "saved_tiers": {"intermediates": "host"}})
        stages = {stage.id: kept if stage.is_block else on_host for stage in model.stages}
        plan = Plan(
            model_id=model.model_id, hardware_id="any", compute_dtype="bfloat16", batch_size=2 * MICRO_BATCH,
            seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, accumulation=2, loss_chunk_tokens=CHUNK_TOKENS, stages=stages,
            variants=variants, budget_bytes={}, attention=chosen,
        )  # fmt: skip
        numbers, _ = outcome(plan, tied=True)
        losses.append([loss for loss, _ in numbers])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


FIRST_IN_PROCESS = """
import torch
from lazysched.runtime.attention import attention
query = torch.zeros(2, 4, 128, 64, dtype=torch.bfloat16, device="cuda")
with attention({backend!r}):
    print(torch.nn.attention.SDPBackend(torch.ops.aten._fused_sdp_choice(query, query, query)).name)
"""


@pytest.mark.parametrize(
    ("backend", "kernel"),
    [("cudnn", "CUDNN_ATTENTION"), ("flash", "FLASH_ATTENTION"), ("efficient", "EFFICIENT_ATTENTION")],
)
def test_a_process_begins_with_the_kernel_that_is_asked_for(backend: str, kernel: str) -> None:
    """torch reorders its kernels at its first choice."""
    command = [sys.executable, "-c", FIRST_IN_PROCESS.format(backend=backend)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [kernel]
