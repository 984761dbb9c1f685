"""The Triton kernels have the bits of the compiled update, whatever the numbers and sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazysched.runtime.hybrid8 import BlockState, Fp32State
from lazysched.runtime.hybrid8_backends import prepare
from tests.runtime.hybrid8_cases import (
    DECAYING,
    block_state,
    copy_of,
    differing,
    fp32_state,
    special_gradient,
    uneven_gradient,
)
from tests.runtime.test_kernels import DTYPES, random_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run_both(states: list[BlockState | Fp32State], steps: int) -> None:
    on_gpu = [copy_of(state, "cuda") for state in states]
    updates = prepare(states), prepare(on_gpu)
    for step in range(1, steps + 1):
        for state, other in zip(states, on_gpu, strict=True):
            state.grad.copy_(special_gradient(state.grad.numel(), step))
            other.grad.copy_(state.grad)
        updates[0].update(DECAYING.at(step, 0.7))
        updates[1].update(DECAYING.at(step, 0.7).cuda())
        assert [differing(a, b, any_nan=True) for a, b in zip(states, on_gpu, strict=True)] == [[] for _ in states]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 2048, 5000, 70_001, 1 << 20])
def test_sizes_and_special_gradients(numel: int, dtype: torch.dtype) -> None:
    run_both([block_state(numel, dtype), fp32_state(numel, dtype), block_state(numel, dtype, seed=1, decays=False)], 6)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
def test_any_state(numel: int, dtype: torch.dtype, seed: int) -> None:
    state = random_state(numel, dtype, seed)
    other = copy_of(state, "cuda")
    for step in (1, 1000):
        state.grad.copy_(uneven_gradient(numel, seed % 1000 + step))
        other.grad.copy_(state.grad)
        prepare([state]).update(DECAYING.at(step, 0.7))
        prepare([other]).update(DECAYING.at(step, 0.7).cuda())
        assert differing(state, other, any_nan=True) == []


def test_a_skipped_step_changes_no_byte() -> None:
    states = [block_state(5000), fp32_state(5000)]
    run_both(states, 2)
    on_gpu = [copy_of(state, "cuda") for state in states]
    for state in on_gpu:
        state.grad.fill_(float("nan"))
    prepare(on_gpu).update(DECAYING.at(3, skip=1.0).cuda())
    for state, other in zip(states, on_gpu, strict=True):
        other.grad.copy_(state.grad)
        assert differing(state, other, any_nan=True) == []
