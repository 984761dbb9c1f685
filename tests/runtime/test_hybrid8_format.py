"""Quantising and decoding of the hybrid 8-bit state against float64, columns held apart, and memory."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config

from lazysched.optimizer_state import FP32_STATE_ELEMENTS, TensorState, hybrid8_layout
from lazysched.runtime.architecture import Architecture
from lazysched.runtime.hybrid8 import BlockState, Fp32State, num_blocks
from lazysched.runtime.hybrid8_torch import store_master
from lazysched.schemas import Stage
from tests.runtime.hybrid8_cases import (
    FLOAT_ERROR,
    INVERSE_ERROR,
    RECIPROCAL_ERROR,
    ExactAdamW,
    Prepare,
    Settings,
    arrays,
    bits,
    copy_of,
    differing,
    each_backend,
    first_moment,
    fresh_fp32_state,
    fresh_state,
    generator,
    master,
    normal,
    per_element,
    root_of_second_moment,
    used_state,
)

NUMEL = 5000
CODE_ERROR = 2.0**-15 + 127 * (RECIPROCAL_ERROR + FLOAT_ERROR)
"""Of a first moment's code before the random bits: half of its last bit, and the error of the reciprocal."""
ROOT_CODE_ERROR = 255 * 2 * FLOAT_ERROR
"""Of a second moment's code: square roots of the element and of the block's largest."""
SIGMAS = 5


def companded(x: Tensor) -> Tensor:
    """Code of the first moment before rounding, float64, of m / max|m|."""
    return 254 * x / (1 + x.abs())


def code_step(x: Tensor) -> Tensor:
    """Distance of m / max|m| to what the next larger code decodes to: 1 over the slope 254 / (1+x)**2, and its growth
    up to there, at most 127/126."""
    return (1 + x.abs()) ** 2 / 254 * (127 / 126)


def states() -> dict[str, BlockState]:
    """Before the first step, with gradients of one scale and of many, and from the middle of a run."""
    fresh = fresh_state((normal(NUMEL, 0) * 0.02).bfloat16())
    fresh.grad.copy_(normal(NUMEL, 1) * 1e-3)
    varied = copy_of(fresh)
    varied.grad.mul_(10.0 ** torch.empty(NUMEL).uniform_(-6, 0, generator=generator(2)))
    return {"fresh": fresh, "varied": varied, "used": used_state(NUMEL, 3)}


@each_backend
@pytest.mark.parametrize("name", states())
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_moments_and_master_are_within_a_code_step_of_float64(prepare: Prepare, name: str, factor: float) -> None:
    state, settings = states()[name], Settings(weight_decay=0.1)
    step = 1 if name != "used" else 40
    decoded, before = first_moment(state), master(state)
    exact = ExactAdamW(decoded, root_of_second_moment(state) ** 2)
    direction = exact.direction(state.grad, step, settings, factor)
    prepare([state]).update(settings.at(step, factor))

    largest = per_element(state.first_scale, NUMEL)
    noise = (RECIPROCAL_ERROR + FLOAT_ERROR) * decoded.abs() + FLOAT_ERROR * state.grad.double().abs()
    error = (first_moment(state) - exact.first).abs()
    assert (error <= largest * code_step(exact.first / largest) * (1 + CODE_ERROR) + noise).all()

    code = 255 * exact.second.sqrt() / per_element(state.second_scale, NUMEL)
    assert ((state.second.double() - code).abs()[code >= 2] <= 0.5 + ROOT_CODE_ERROR).all()
    assert (state.second[code <= 2] == 2).all()

    expected = before * (1 - 1e-3 * 0.1) - 1e-3 * direction
    unit = direction.abs() / exact.first.abs().clamp(min=1e-30)
    direction_error = direction.abs() * (INVERSE_ERROR + FLOAT_ERROR) + noise * unit
    tolerance = last_bit(expected) + 1e-3 * direction_error + expected.abs() * FLOAT_ERROR
    assert ((master(state) - expected).abs() <= tolerance).all()


def last_bit(value: Tensor) -> Tensor:
    """Weight of the last of the master's bits, 2**-15 of the power of two below; twice that where rounding reaches
    the next."""
    return 2.0 ** (torch.log2(value.abs() * (1 + 2.0**-15)).floor() - 15)


@each_backend
def test_scales_are_the_largest_of_each_block(prepare: Prepare) -> None:
    state, settings = states()["used"], Settings()
    exact = ExactAdamW(first_moment(state), root_of_second_moment(state) ** 2)
    exact.direction(state.grad, 40, settings)
    prepare([state]).update(settings.at(40))
    for stored, values, error in (
        (state.first_scale, exact.first.abs(), RECIPROCAL_ERROR), (state.second_scale, exact.second.sqrt(), 0.0)
    ):  # fmt: skip
        largest = torch.stack([part.max() for part in values.split(256)])
        assert ((stored.double() / largest - 1).abs() <= error + FLOAT_ERROR).all()


@each_backend
@pytest.mark.parametrize("weight", [0.02, -0.7, 1.0])
def test_the_master_rounds_without_bias(prepare: Prepare, weight: float) -> None:
    num, settings = 102_400, Settings(learning_rate=1e-7)
    state = fresh_state(torch.full((num,), weight).bfloat16())
    state.grad.fill_(1.0)
    exact = master(state)[0] - 1e-7
    prepare([state]).update(settings.at(1))
    values = master(state)
    low, high = values.min(), values.max()
    share = (exact - low) / (high - low)
    assert len(values.unique()) == 2
    assert low < exact < high
    sigma = (high - low) * (share * (1 - share) / num).sqrt()
    # fp32 holds the master before it is rounded: its own half ulp is a bias that no random byte can mend.
    assert (values.mean() - exact).abs() <= SIGMAS * sigma + last_bit(exact) / 512


@each_backend
def test_codes_of_the_first_moment_round_without_bias(prepare: Prepare) -> None:
    num, settings = 400, Settings()
    ratio = torch.linspace(-1, 1, 256, dtype=torch.float64).bfloat16()
    state = fresh_state(torch.zeros(num * 256).bfloat16())
    state.grad.copy_(ratio.repeat(num))
    prepare([state]).update(settings.at(1))
    codes = state.first.view(num, 256).double()
    expected = companded(ratio.double())
    assert (codes.mean(0) - expected).abs().max() <= SIGMAS * 0.5 / num**0.5 + CODE_ERROR
    assert codes.abs().max() == 127


SHAPE = (24, 200)
APART = torch.tensor([3, 50, 51, 52, 53, 120, 199])
OTHERS = torch.tensor([c for c in range(SHAPE[1]) if c not in APART.tolist()])


def held_apart(prepare: Prepare, writes: bool) -> tuple[BlockState, Fp32State, list[dict[str, int]]]:
    """Ten steps of a matrix whose columns ``APART`` have fp32 state beside it; ``writes`` them into it."""
    settings = Settings(weight_decay=0.1)
    start = (normal(math.prod(SHAPE), 0) * 0.02).bfloat16()
    state, side = fresh_state(start), fresh_fp32_state(start.view(SHAPE)[:, APART].flatten())
    places = [{name: array.data_ptr() for name, array in arrays(state).items()}]
    matrix, side_matrix = prepare([state]), prepare([side])
    for step in range(1, 11):
        gradient = (normal(math.prod(SHAPE), step) * 1e-3).bfloat16().view(SHAPE)
        side.grad.copy_(gradient[:, APART].flatten())
        gradient[:, APART] = 0
        state.grad.copy_(gradient.flatten())
        matrix.update(settings.at(step))
        side_matrix.update(settings.at(step))
        if writes:
            overwrite(state, side)
    places.append({name: array.data_ptr() for name, array in arrays(state).items()})
    return state, side, places


def overwrite(state: BlockState, side: Fp32State) -> None:
    """Write the masters of the columns apart into the matrix."""
    assert side.master is not None
    assert state.correction is not None
    weight, correction = torch.empty_like(side.weight), torch.empty(side.weight.shape, dtype=torch.int8)
    store_master(side.master, 128, weight, correction)
    state.weight.view(SHAPE)[:, APART] = weight.view(SHAPE[0], -1)
    state.correction.view(SHAPE)[:, APART] = correction.view(SHAPE[0], -1)


@each_backend
def test_columns_held_apart_follow_fp32_adamw(prepare: Prepare) -> None:
    state, side, (before, after) = held_apart(prepare, writes=True)
    param = torch.nn.Parameter((normal(math.prod(SHAPE), 0) * 0.02).bfloat16().view(SHAPE)[:, APART].float())
    theirs = torch.optim.AdamW([param], lr=1e-3, weight_decay=0.1, fused=True)
    for step in range(1, 11):
        param.grad = (normal(math.prod(SHAPE), step) * 1e-3).bfloat16().view(SHAPE)[:, APART].float()
        theirs.step()
    assert side.master is not None
    apart = master(state).view(SHAPE)[:, APART].flatten()
    # Ours and torch's fp32 differ by the order of a few operations.
    torch.testing.assert_close(side.master, param.detach().flatten(), rtol=1e-6, atol=10 * 1e-3 * 1e-6)
    assert ((apart - side.master.double()).abs() <= last_bit(side.master.double()) / 2).all()
    assert before == after


@each_backend
def test_columns_held_apart_do_not_reach_the_others(prepare: Prepare) -> None:
    state, _, _ = held_apart(prepare, writes=True)
    alone, _, _ = held_apart(prepare, writes=False)
    for name in ("weight", "correction", "first", "second"):
        left, right = (arrays(s)[name].view(SHAPE)[:, OTHERS] for s in (state, alone))
        assert torch.equal(bits(left), bits(right)), name
    assert not {"first_scale", "second_scale", "first", "second"} & set(differing(state, alone))
    assert not state.first.view(SHAPE)[:, APART].any()

    start = (normal(math.prod(SHAPE), 0) * 0.02).bfloat16().double()
    exact, settings = ExactAdamW(torch.zeros(start.numel()), torch.zeros(start.numel())), Settings()
    weights = start.clone()
    for step in range(1, 11):
        gradient = (normal(start.numel(), step) * 1e-3).bfloat16()
        weights = weights * (1 - 1e-4) - 1e-3 * exact.direction(gradient, step, settings)
    moved = (master(state) - start).view(SHAPE)[:, OTHERS]
    expected = (weights - start).view(SHAPE)[:, OTHERS]
    # Ten steps of codes that are a few per cent coarse.
    assert (moved - expected).norm() <= 0.05 * expected.norm()


def qwen2_7b() -> list[Stage]:
    config = Qwen2Config(
        hidden_size=3584, num_hidden_layers=28, intermediate_size=18944, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
    )  # fmt: skip
    return Architecture(config).stages("bfloat16")


def part(flat: Tensor, tensor: TensorState, name: str, dtype: torch.dtype) -> Tensor:
    offset, num_bytes = tensor.parts[name]
    return flat[offset : offset + num_bytes].view(dtype)


def states_of(stage: Stage) -> tuple[list[BlockState | Fp32State], Tensor]:
    """Real buffers of a stage with bf16 weights, and the flat one that holds its optimizer state."""
    layout, num_bytes = hybrid8_layout(stage, 2, FP32_STATE_ELEMENTS)
    flat, found = torch.empty(num_bytes, dtype=torch.uint8), list[BlockState | Fp32State]()
    for tensor in layout:
        weight, grad = (torch.empty(math.prod(tensor.shape), dtype=torch.bfloat16) for _ in range(2))
        if tensor.is_8bit:
            kinds = {"correction": torch.int8, "first": torch.int8, "second": torch.uint8}
            kinds |= {"first_scale": torch.float32, "second_scale": torch.float32}
            views = {name: part(flat, tensor, name, kind) for name, kind in kinds.items()}
            found.append(BlockState(weight=weight, grad=grad, **views, stream=0, decays=True))
        else:
            views = {name: part(flat, tensor, name, torch.float32) for name in ("master", "first", "second")}
            found.append(Fp32State(weight=weight, grad=grad, **views, decays=False))
    return found, flat


def test_a_7b_model_takes_at_most_7_05_bytes_per_parameter_with_its_gradient() -> None:
    stages = qwen2_7b()
    params = sum(math.prod(shape) for stage in stages for shape in stage.params.values())
    state_bytes = sum(hybrid8_layout(stage, 2, FP32_STATE_ELEMENTS)[1] for stage in stages)
    weight_bytes = sum(stage.weight_bytes for stage in stages)
    assert 7.6e9 < params < 7.7e9
    assert (2 * weight_bytes + state_bytes) / params <= 7.05


def test_the_buffers_of_a_7b_block_are_what_the_layout_counts() -> None:
    stage = qwen2_7b()[1]
    found, flat = states_of(stage)
    sizes = [array.numel() * array.element_size() for state in found for array in arrays(state).values()]
    params = sum(state.weight.numel() for state in found)
    assert params == sum(math.prod(shape) for shape in stage.params.values()) > 2e8
    assert sum(sizes) / params <= 7.05
    # Each part begins at a multiple of 256 bytes.
    parts = sum(len(arrays(state)) - 2 for state in found)
    assert flat.numel() - 255 * parts <= sum(sizes) - 4 * params <= flat.numel()
    places = sorted(
        (array.data_ptr(), array.numel() * array.element_size())
        for state in found for name, array in arrays(state).items() if name not in ("weight", "grad")
    )  # fmt: skip
    assert all(start + size <= following for (start, size), (following, _) in pairwise(places))
    for state in found:
        if isinstance(state, BlockState):
            assert state.first.numel() == state.second.numel() == state.weight.numel()
            assert state.first_scale.numel() == state.second_scale.numel() == num_blocks(state.weight.numel())
        else:
            assert state.first.numel() == state.second.numel() == state.weight.numel()
