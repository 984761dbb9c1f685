"""What holds for any state, gradient and size of the hybrid 8-bit format."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazysched.runtime.hybrid8 import SMALLEST_EPSILON, SMALLEST_SCALE, BlockState, Coefficients, stream_of
from lazysched.runtime.hybrid8_backends import TorchUpdate
from tests.runtime.hybrid8_cases import (
    FLOAT_ERROR,
    RECIPROCAL_ERROR,
    Prepare,
    Settings,
    bits,
    copy_of,
    differing,
    each_backend,
    fresh_fp32_state,
    generator,
    master,
    normal,
    used_state,
)
from tests.runtime.hybrid8_exact import exact_block

SIGMAS = 5
INFINITY, NAN = float("inf"), float("nan")
EDGE_FLOATS = [0.0, -0.0, 9.2e-41, -9.2e-41, 1.2e-38, 1.0, -1.0, 1e10, 1e19, -1e30, 3.3e38, INFINITY, -INFINITY, NAN]


@st.composite
def updates(draw: st.DrawFn) -> tuple[BlockState, Tensor]:
    """A valid state with gradients of any kind, some not finite, and coefficients."""
    numel, seed = draw(st.integers(1, 1100)), draw(st.integers(0, 10**6))
    state = used_state(numel, seed, draw(st.sampled_from([torch.bfloat16, torch.float32])), decays=draw(st.booleans()))
    exponents = torch.empty(numel).uniform_(-draw(st.sampled_from([0.0, 3.0, 30.0])), 0, generator=generator(seed))
    state.grad.mul_(10.0**exponents)
    for place, value in draw(st.lists(st.tuples(st.integers(0, numel - 1), st.sampled_from(EDGE_FLOATS)), max_size=4)):
        state.grad[place] = value
    for place, value in draw(st.lists(st.tuples(st.integers(0, numel - 1), st.sampled_from(EDGE_FLOATS)), max_size=4)):
        state.weight[place] = value
    hyper = Settings(
        learning_rate=draw(st.sampled_from([0.0, 1e-7, 1e-3, 1.0])), beta1=draw(st.sampled_from([0.0, 0.5, 0.9])),
        beta2=draw(st.sampled_from([0.0, 0.95, 0.999])), weight_decay=draw(st.sampled_from([0.0, 0.1])),
        epsilon=draw(st.sampled_from([SMALLEST_EPSILON, 1e-8, 1.0])),
    )  # fmt: skip
    step = draw(st.one_of(st.integers(1, 10), st.integers(1, 2**24)))
    return state, hyper.at(step, factor=draw(st.sampled_from([1.0, 0.01, 1e-10])))


@each_backend
@given(drawn=updates())
@settings(max_examples=60, deadline=None)
def test_every_backend_gives_the_bits_of_the_reference(prepare: Prepare, drawn: tuple[BlockState, Tensor]) -> None:
    state, coefficients = drawn
    reference = copy_of(state)
    prepare([state]).update(coefficients)
    TorchUpdate([reference]).update(coefficients)
    assert differing(state, reference) == []


@each_backend
@given(drawn=updates())
@settings(max_examples=60, deadline=None)
def test_states_stay_valid(prepare: Prepare, drawn: tuple[BlockState, Tensor]) -> None:
    state, coefficients = drawn
    gradient = state.grad.clone()
    prepare([state]).update(coefficients)
    assert torch.equal(bits(state.grad), bits(gradient))
    inverse_k = float(Coefficients(*coefficients).inverse_k)  # the second scale is multiplied by it at last
    for scale, codes, least, factor in (
        (state.first_scale, state.first, 0, 1.0), (state.second_scale, state.second, 2, inverse_k)
    ):  # fmt: skip
        assert (scale.isnan() | (scale == 0) | (scale >= SMALLEST_SCALE * factor)).all()
        coded = (scale > 0).repeat_interleave(256)[: codes.numel()]
        assert not codes[~coded].any()
        assert codes[coded].numel() == 0 or codes[coded].long().abs().min() >= least
    assert (state.first >= -127).all()
    if state.correction is not None:
        strange = ~master(state).isfinite()
        assert not state.correction[strange].any()


@each_backend
@given(numel=st.integers(1, 1500), seed=st.integers(0, 10**6), step=st.integers(1, 2**24))
@settings(max_examples=40, deadline=None)
def test_decoding_and_encoding_a_state_gives_it_back(prepare: Prepare, numel: int, seed: int, step: int) -> None:
    """Decays of 1, no gradient and a learning rate of 0 leave only the rounding of the codes: the second keep theirs,
    the first change by 1 as often as the error of the reciprocals, in codes, makes them."""
    state = used_state(numel, seed)
    state.grad.zero_()
    before = copy_of(state)
    prepare([state]).update(Settings(learning_rate=0.0, beta1=1.0, beta2=1.0).at(step))
    assert set(differing(state, before)) <= {"first", "first_scale", "second_scale"}
    changed = (before.first.long() - state.first.long()).abs()
    expected = numel * 127 * 1.5 * (RECIPROCAL_ERROR + FLOAT_ERROR)
    assert changed.max() <= 1
    assert changed.sum() <= expected + SIGMAS * expected**0.5 + 1
    torch.testing.assert_close(state.first_scale, before.first_scale, rtol=RECIPROCAL_ERROR + FLOAT_ERROR, atol=0)
    torch.testing.assert_close(state.second_scale, before.second_scale, rtol=FLOAT_ERROR, atol=0)


@each_backend
@given(seed=st.integers(0, 10**6), step=st.integers(1, 2**24), decays=st.booleans(), narrow=st.booleans())
@settings(max_examples=10, deadline=None)
def test_bits_are_those_of_the_specification_in_rational_numbers(
    prepare: Prepare, seed: int, step: int, decays: bool, narrow: bool
) -> None:
    numel = 2 * 256 + 1 + seed % 255
    state = used_state(numel, seed, torch.bfloat16 if narrow else torch.float32, decays)
    state.grad.mul_(10.0 ** torch.empty(numel).uniform_(-5, 0, generator=generator(seed)))
    state = replace(state, stream=stream_of(seed, "w"))
    coefficients = Settings(weight_decay=0.1).at(step, factor=0.7)
    block = seed % 3
    expected = exact_block(state, (seed, "w"), Coefficients(*coefficients), block)
    prepare([state]).update(coefficients)
    for name, values in expected.items():
        here = slice(block, block + 1) if "scale" in name else slice(block * 256, (block + 1) * 256)
        assert torch.equal(bits(vars(state)[name][here]), bits(values)), name


@each_backend
@given(numel=st.integers(1, 1500), seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_fp32_tensors_give_the_bits_of_the_reference(prepare: Prepare, numel: int, seed: int) -> None:
    weight = normal(numel, seed).bfloat16()
    state, reference = fresh_fp32_state(weight), fresh_fp32_state(weight)
    for s in (state, reference):
        s.grad.copy_(normal(numel, seed + 1))
    ours, theirs = prepare([state]), TorchUpdate([reference])
    for step in (1, 2, 3):
        ours.update(Settings(weight_decay=0.1).at(step, factor=0.5))
        theirs.update(Settings(weight_decay=0.1).at(step, factor=0.5))
    assert differing(state, reference) == []


@each_backend
def test_fp32_tensors_follow_torch(prepare: Prepare) -> None:
    weight = normal(3000, 9)
    state, param = fresh_fp32_state(weight), torch.nn.Parameter(weight.clone())
    theirs = torch.optim.AdamW([param], lr=1e-3, weight_decay=0.1, fused=True)
    for step in range(1, 11):
        state.grad.copy_(normal(3000, step) * 1e-3)
        param.grad = state.grad.float()
        prepare([state]).update(Settings(weight_decay=0.1).at(step))
        theirs.step()
    # Of the way, not of the weight: both round it to fp32 ten times.
    torch.testing.assert_close(state.weight, param.detach(), rtol=2.0**-22, atol=10 * 1e-3 * 1e-6)
