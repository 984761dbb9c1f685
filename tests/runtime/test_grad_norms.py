"""Norms of gradients that hooks take: which are taken when, and that none is used for another gradient."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import TensorWeakRef

from lazysched.runtime import grad_norms
from lazysched.runtime.optimizer import HybridAdamW8bit

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NUM_PARAMS = 3


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def params(request: pytest.FixtureRequest) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    sizes = (300, 7, 64)[:NUM_PARAMS]
    return [Parameter(torch.randn(size, 5, generator=generator).to(request.param)) for size in sizes]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of elements for each norm that is taken."""
    counted: list[int] = []
    norm_of = grad_norms._norm_of

    def counting(grad: Tensor) -> Tensor:
        counted.append(grad.numel())
        return norm_of(grad)

    monkeypatch.setattr(grad_norms, "_norm_of", counting)
    return counted


def backward(params: list[Parameter], scale: float = 1.0) -> None:
    torch.stack([(scale * p * p * p).sum() for p in params]).sum().backward()


def expected_norm(params: list[Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], foreach=False)


def assert_norm(optimizer: HybridAdamW8bit, expected: Tensor) -> None:
    assert optimizer.grad_norm is not None
    assert torch.equal(optimizer.grad_norm, expected)


def test_backward_takes_the_norms_and_the_step_none(params: list[Parameter], taken: list[int]) -> None:
    optimizer = HybridAdamW8bit(params, max_grad_norm=1.0)
    for _ in range(3):
        backward(params)
        assert len(taken) == NUM_PARAMS
        expected = expected_norm(params)
        optimizer.step()
        assert_norm(optimizer, expected)
        assert len(taken) == NUM_PARAMS
        taken.clear()
        optimizer.zero_grad()


def test_with_accumulation_only_the_last_backward_takes_them(params: list[Parameter], taken: list[int]) -> None:
    """The first step cannot know how many there will be; a shorter one takes its norms in the step."""
    optimizer = HybridAdamW8bit(params, max_grad_norm=1.0)
    for num_backwards, num_norms in [(3, 3), (3, 1), (1, 1), (2, 2), (2, 1)]:
        for part in range(num_backwards):
            backward(params, scale=1.0 + part)
        expected = expected_norm(params)
        optimizer.step()
        assert_norm(optimizer, expected)
        assert len(taken) == num_norms * NUM_PARAMS, num_backwards
        taken.clear()
        optimizer.zero_grad()


def _scaled(param: Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def _replaced(param: Parameter) -> None:
    assert param.grad is not None
    param.grad = 2 * param.grad


def _moved(param: Parameter) -> None:
    assert param.grad is not None
    param.grad.data = 3 * param.grad.data


def _at_the_same_address(param: Parameter) -> None:
    """As when the old gradient was freed and its memory used again: only the tensor is another one."""
    assert param.grad is not None
    alias, version = param.grad.data.mul_(2).data, param.grad._version
    while alias._version < version:
        alias.mul_(1)
    param.grad = alias
    assert param.grad._version == version


def _clipped(param: Parameter) -> None:
    torch.nn.utils.clip_grad_norm_([param], 0.1)


@pytest.mark.parametrize("change", [_scaled, _replaced, _moved, _at_the_same_address, _clipped])
def test_gradients_that_were_changed_by_hand_get_new_norms(
    params: list[Parameter], taken: list[int], change: Callable[[Parameter], None]
) -> None:
    optimizer = HybridAdamW8bit(params, max_grad_norm=1.0)
    backward(params)
    change(params[1])
    taken.clear()
    expected = expected_norm(params)
    optimizer.step()
    assert_norm(optimizer, expected)
    assert taken == [params[1].numel()]


def test_gradients_of_data_parallel_are_measured_when_they_are_reduced(
    params: list[Parameter], taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reduces them after the hooks, in memory whose changes autograd may not see."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    optimizer = HybridAdamW8bit(params, max_grad_norm=1.0)
    backward(params)
    assert taken == []
    for param in params:
        assert param.grad is not None
        param.grad.data.mul_(0.5)
    expected = expected_norm(params)
    optimizer.step()
    assert_norm(optimizer, expected)


def test_every_way_to_get_a_parameter_is_watched(params: list[Parameter], taken: list[int]) -> None:
    params[2].requires_grad_(False)
    optimizer = HybridAdamW8bit(params[:1], max_grad_norm=1.0)
    optimizer.add_param_group({"params": params[1:]})
    copied = copy.deepcopy(optimizer)
    theirs = [p for group in copied.param_groups for p in group["params"]]
    for each, owner in ((params, optimizer), (theirs, copied)):
        backward(each[:2])
        assert len(taken) == 2
        owner.step()
        assert len(taken) == 2
        each[2].requires_grad_()
        backward(each)
        owner.step()
        backward(each)
        taken.clear()
        backward(each)
        owner.step()
        assert len(taken) == NUM_PARAMS
        taken.clear()


def test_neither_gradients_nor_the_optimizer_are_kept(params: list[Parameter], taken: list[int]) -> None:
    optimizer = HybridAdamW8bit(params, max_grad_norm=1.0)
    backward(params)
    grads = [TensorWeakRef(p.grad) for p in params if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    assert [ref() for ref in grads] == [None] * NUM_PARAMS
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    taken.clear()
    backward(params)
    assert taken == []
