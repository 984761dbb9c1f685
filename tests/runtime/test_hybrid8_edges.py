"""The ends of the hybrid 8-bit format: sizes, zeros, subnormal and not finite numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lazysched.runtime import hybrid8_torch
from lazysched.runtime.hybrid8 import SMALLEST_SCALE, BlockState, num_blocks
from lazysched.runtime.hybrid8_backends import TorchUpdate
from lazysched.runtime.kernels import CompiledUpdate, variants
from tests.runtime.hybrid8_cases import (
    FLOAT_ERROR,
    INVERSE_ERROR,
    Prepare,
    Settings,
    arrays,
    copy_of,
    differing,
    each_backend,
    fresh_fp32_state,
    fresh_state,
    master,
    normal,
    used_state,
)

SIZES = [1, 255, 256, 257, 511, 5000]
DTYPES = [torch.bfloat16, torch.float32]
INFINITY, NAN = float("inf"), float("nan")


@each_backend
@pytest.mark.parametrize(
    ("numel", "dtype"),
    [*((n, t) for n in SIZES for t in DTYPES), ((1 << 20) + 1, torch.bfloat16)],
)
def test_bits_do_not_depend_on_size_or_backend(prepare: Prepare, numel: int, dtype: torch.dtype) -> None:
    """A tensor's whole blocks are updated as if nothing followed them; the last block, as if zeros did."""
    update = Settings(weight_decay=0.1).at(7, factor=0.5)
    state, shortest = used_state(numel, 0, dtype), min(numel, 700)
    reference = copy_of(state)
    padded = padded_copy(part_of(state, shortest), -(-shortest // 256) * 256)
    prepare([state]).update(update)
    TorchUpdate([reference]).update(update)
    assert differing(state, reference) == []
    prepare([padded]).update(update)
    whole = shortest if shortest == numel else shortest // 256 * 256
    assert differing(part_of(padded, whole), part_of(state, whole)) == []


def part_of(state: BlockState, numel: int) -> BlockState:
    """A copy of the first elements, with the scales of their blocks."""
    sizes = {name: num_blocks(numel) if "scale" in name else numel for name in arrays(state)}
    return replace(state, **{name: array[: sizes[name]].clone() for name, array in arrays(state).items()})


def padded_copy(state: BlockState, numel: int) -> BlockState:
    """A copy with zeros up to ``numel`` elements, within the last block."""
    missing = numel - state.weight.numel()
    return replace(
        state,
        **{
            name: array.clone() if "scale" in name else torch.nn.functional.pad(array, (0, missing))
            for name, array in arrays(state).items()
        },
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_the_reference_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = used_state(5120, 1, dtype)
    TorchUpdate([expected]).update(Settings(weight_decay=0.1).at(3))
    for chunk in (256, 1024):
        monkeypatch.setattr(hybrid8_torch, "CHUNK_ELEMENTS", chunk)
        for numel in (5000, 5120):
            state = part_of(used_state(5120, 1, dtype), numel)
            TorchUpdate([state]).update(Settings(weight_decay=0.1).at(3))
            whole = numel // 256 * 256
            assert differing(part_of(state, whole), part_of(expected, whole)) == []


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_chunks_change_nothing(variant: str, threads: int) -> None:
    expected = used_state(5000, 1)
    TorchUpdate([expected]).update(Settings().at(3))
    for chunk_blocks in (1, 7, 1000):
        state = used_state(5000, 1)
        CompiledUpdate([state], variant=variant, threads=threads, chunk_blocks=chunk_blocks).update(Settings().at(3))
        assert differing(state, expected) == []


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_skipped_step_changes_no_byte(prepare: Prepare, dtype: torch.dtype) -> None:
    small = fresh_fp32_state(normal(300, 2).to(dtype))
    states = [used_state(5000, 2, dtype), small]
    for state in states:
        state.grad[7] = NAN
    before = [replace(s, **{n: a.clone() for n, a in arrays(s).items()}) for s in states]
    prepare(states).update(Settings().at(3, skip=1.0))
    assert [differing(s, b) for s, b in zip(states, before, strict=True)] == [[], []]


@each_backend
def test_a_block_that_never_saw_a_gradient_stays_zero(prepare: Prepare) -> None:
    state = fresh_state(normal(600, 3).bfloat16())
    state.grad[300] = 1e-3
    weight = state.weight.clone()
    prepare([state]).update(Settings().at(1))
    assert state.first_scale.count_nonzero() == state.second_scale.count_nonzero() == 1
    for outside in (slice(0, 256), slice(512, 600)):
        assert not state.first[outside].any()
        assert not state.second[outside].any()
        assert torch.equal(state.weight[outside], weight[outside])


@each_backend
def test_without_gradients_scales_fall_to_zero_and_never_become_subnormal(prepare: Prepare) -> None:
    """Both decays are 0.5, so that the scales pass 2**-100 within 250 steps."""
    state, update = used_state(700, 4), Settings(learning_rate=0.0, beta1=0.5, beta2=0.5)
    state.grad.zero_()
    prepared = prepare([state])
    smallest = INFINITY
    for step in range(1, 251):
        prepared.update(update.at(1000 + step))
        for scale, code in ((state.first_scale, state.first), (state.second_scale, state.second)):
            assert ((scale == 0) | (scale >= SMALLEST_SCALE)).all()
            kept = scale.repeat_interleave(256)[:700] != 0
            assert not code[~kept].any()
        if state.first_scale.any():
            smallest = min(smallest, float(state.first_scale[state.first_scale > 0].min()))
    assert smallest < 2 * SMALLEST_SCALE
    assert not state.first_scale.any()
    assert not state.second_scale.any()


@each_backend
def test_subnormal_gradients_leave_a_finite_state(prepare: Prepare) -> None:
    state = fresh_state(normal(512, 5).bfloat16())
    state.grad.copy_(torch.tensor([9.2e-41, -9.2e-41, 5e-39, 0.0]).repeat(128))
    weight = master(state)
    assert (state.grad != 0).sum() == 384
    prepare([state]).update(Settings().at(1))
    assert not any(state_part.any() for name, state_part in arrays(state).items() if name not in ("weight", "grad"))
    assert torch.equal(master(state), weight)


@each_backend
@pytest.mark.parametrize("value", [INFINITY, -INFINITY, NAN])
def test_a_gradient_that_is_not_finite_reaches_only_its_block(prepare: Prepare, value: float) -> None:
    state, update = used_state(1400, 6), Settings()
    clean = copy_of(state)
    state.grad[600] = value
    prepared = prepare([state, clean])
    for step in (20, 21):
        prepared.update(update.at(step))
        state.grad[600] = 0.0
    assert state.first_scale.isnan().tolist() == state.second_scale.isnan().tolist() == [b == 2 for b in range(6)]
    assert not state.first[512:768].any()
    assert not state.second[512:768].any()
    assert state.weight[512:768].isnan().all()
    outside = torch.arange(1400) // 256 != 2
    for name in ("weight", "correction", "first", "second"):
        assert torch.equal(arrays(state)[name][outside], arrays(clean)[name][outside]), name
    for name in ("first_scale", "second_scale"):
        left, right = arrays(state)[name], arrays(clean)[name]
        assert torch.equal(left[[0, 1, 3, 4, 5]], right[[0, 1, 3, 4, 5]]), name


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_not_finite_stay(prepare: Prepare, dtype: torch.dtype) -> None:
    start = torch.full((256,), 0.5, dtype=dtype)
    start[:4] = torch.tensor([INFINITY, -INFINITY, NAN, -NAN]).to(dtype)
    state = fresh_state(start)
    state.grad.copy_(normal(256, 7))
    prepared = prepare([state])
    for step in (1, 2):
        prepared.update(Settings(weight_decay=0.1).at(step))
    assert state.weight[:2].tolist() == [INFINITY, -INFINITY]
    assert state.weight[2:4].isnan().all()
    assert state.weight[4:].isfinite().all()
    assert state.correction is None or not state.correction[:4].any()


@each_backend
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_master_that_overflows_becomes_infinite(prepare: Prepare, sign: float) -> None:
    state = fresh_state(torch.tensor([3.3e38 * sign, 1.0]).bfloat16())
    state.grad.copy_(torch.tensor([-sign, 1.0]))
    prepare([state]).update(Settings(learning_rate=3e37).at(1))
    assert state.correction is not None
    assert state.weight[0] == INFINITY * sign
    assert state.correction[0] == 0
    assert master(state)[1].isfinite()


@each_backend
def test_huge_gradients_move_weights_by_the_learning_rate(prepare: Prepare) -> None:
    """Squares of up to 1e19 still are fp32 numbers, so that a step is the learning rate, as for any first step."""
    state = fresh_state(torch.zeros(300))
    state.grad.copy_(torch.tensor([1e19, -1e18, 1e-3]).repeat(100))
    prepare([state]).update(Settings().at(1))
    expected = torch.tensor([-1e-3, 1e-3, -1e-3]).repeat(100)
    torch.testing.assert_close(state.weight, expected, rtol=INVERSE_ERROR + FLOAT_ERROR, atol=0)
    assert state.second_scale.isfinite().all()


@each_backend
@pytest.mark.parametrize("code", [-128, -1])
def test_a_negative_correction_beside_a_weight_of_zero_counts_as_zero(prepare: Prepare, code: int) -> None:
    state = fresh_state(torch.tensor([0.0, -0.0] * 150).bfloat16())
    clean = copy_of(state)
    assert state.correction is not None
    state.correction.fill_(code)
    for s in (state, clean):
        s.grad.fill_(1e-3)
        prepare([s]).update(Settings().at(1))
    assert differing(state, clean) == []


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_decay_applies_where_the_state_says(prepare: Prepare, dtype: torch.dtype) -> None:
    for decays, factor in ((True, 1 - 0.1 * 0.5), (False, 1.0)):
        weight = normal(300, 8).to(dtype)
        states = [fresh_state(weight, decays=decays), fresh_fp32_state(weight, decays=decays)]
        prepare(states).update(Settings(learning_rate=0.1, weight_decay=0.5).at(1))
        rtol = 2.0**-15 if dtype == torch.bfloat16 else 2.0**-23
        torch.testing.assert_close(master(states[0]), weight.double() * factor, rtol=rtol, atol=0)
        fp32 = states[1].weight if states[1].master is None else states[1].master
        torch.testing.assert_close(fp32.double(), weight.double() * factor, rtol=2.0**-23, atol=0)
