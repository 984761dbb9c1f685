"""The public optimizer in ordinary loops: its numbers, its clipping, and what a ``torch.optim.Optimizer`` promises."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

from lazysched.errors import UsageError
from lazysched.runtime import hybrid8_torch
from lazysched.runtime import optimizer as module
from lazysched.runtime.hybrid8 import BlockState, coefficients, num_blocks, stream_of
from lazysched.runtime.optimizer import HybridAdamW8bit
from tests.runtime.optimizer_cases import (
    devices,
    dtypes,
    equal,
    formats,
    gpu,
    groups,
    make,
    parameters,
    run,
    set_gradients,
    snapshot,
    spoil,
)
from tests.runtime.tiny import llama


@devices
@dtypes
@pytest.mark.parametrize("max_grad_norm", [None, 0.5, 1e4])
def test_fp32_state_has_the_bits_of_torch(device: str, dtype: torch.dtype, max_grad_norm: float | None) -> None:
    """Groups, a schedule and clipping included; torch works on fp32 copies of parameters and gradients."""
    ours, theirs = parameters(dtype, device), [Parameter(p.float()) for p in parameters(dtype, device)]
    optimizer = make(groups(ours), state="fp32", max_grad_norm=max_grad_norm)
    reference = torch.optim.AdamW(groups(theirs), lr=1e-2, fused=True)
    schedules = [LambdaLR(each, lambda step: 1 / (1 + step)) for each in (optimizer, reference)]
    for step in range(4):
        set_gradients(ours, step)
        for param, other in zip(ours, theirs, strict=True):
            other.grad = param.grad.to(torch.float32, copy=True)  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(theirs, max_grad_norm or math.inf, foreach=False)
        optimizer.step()
        reference.step()
        for schedule in schedules:
            schedule.step()
        assert optimizer.grad_norm is not None
        assert torch.equal(optimizer.grad_norm, norm)
    for param, other in zip(ours, theirs, strict=True):
        assert torch.equal(optimizer.fp32_master(param), other)
        assert torch.equal(param, other.to(dtype))


@devices
@dtypes
def test_8bit_parameters_get_the_specified_update(device: str, dtype: torch.dtype) -> None:
    """Of the second parameter: random bits depend on the number."""
    params = parameters(dtype, device)[3:]
    param, n, blocks = params[1], params[1].numel(), num_blocks(params[1].numel())
    is_narrow = dtype == torch.bfloat16
    parts: dict[str, Any] = {
        "correction": torch.zeros(n, dtype=torch.int8, device=device) if is_narrow else None,
        "first": torch.zeros(n, dtype=torch.int8, device=device),
        "second": torch.zeros(n, dtype=torch.uint8, device=device),
        "first_scale": torch.zeros(blocks, device=device),
        "second_scale": torch.zeros(blocks, device=device),
    }
    weight, grad = param.detach().clone().view(-1), torch.zeros(n, dtype=dtype, device=device)
    state = BlockState(weight, grad, **parts, stream=stream_of(7, "1"), decays=True)
    optimizer = make(params, seed=7, max_grad_norm=0.5)
    for step in (1, 2, 3):
        set_gradients(params, step)
        assert param.grad is not None
        grad.copy_(param.grad.view(-1))
        factor = 0.5 / (torch.linalg.vector_norm(grad, dtype=torch.float32) + 1e-6)
        values = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}
        skip = torch.zeros((), device=device)
        hybrid8_torch.update_blocks(state, coefficients(factor, skip, skip + step, **values))
        optimizer.step()
        assert torch.equal(param.grad.view(-1), grad)
    assert torch.equal(param.view(-1), weight)
    for name in parts.keys() - ({"correction"} if not is_narrow else set()):
        assert torch.equal(optimizer.state[param][name].view(-1), parts[name]), name


def exact_adamw(weight: Tensor, grads: list[Tensor], rate: float, decay: float) -> Tensor:
    """In fp64."""
    weight, first, second = weight.double(), torch.zeros(()).double(), torch.zeros(()).double()
    for t, grad in enumerate((g.double() for g in grads), start=1):
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        u = first / (1 - 0.9**t) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)
        weight = weight * (1 - rate * decay) - rate * u
    return weight


def bound_of_8bit(rate: float, num_steps: int, largest_weight: float) -> float:
    """Most that a weight may be off after ``num_steps`` where all |gradients| are in [0.5, 1].

    First moment: below one code of 127, and x of z = 2x/(1+x) rises at most twice as fast as z: an error of 2/127 of
    the block's maximum in each step, which decays with beta1. Second: half a code of 255 of the maximum, relative to
    roots that are at least half of it: 1/255 in each step, compounding. |update| <= 1/0.5 and root >= 0.5 turn both
    into the update's error. Master: one unit of 2**-15 a step. The arithmetic: below 1e-5.
    """
    total, first_error = 0.0, 0.0
    for t in range(1, num_steps + 1):
        first_error = 0.9 * (first_error + 2 / 127 * (1 - 0.9 ** (t - 1)))
        root_error = (1 + 1 / 255) ** (t - 1) - 1
        total += rate * (first_error / (1 - 0.9**t) / 0.5 * (1 + root_error) + 2 * root_error + 1e-5)
    return total + num_steps * 2.0**-15 * largest_weight


@devices
@dtypes
def test_8bit_state_stays_near_exact_adamw(device: str, dtype: torch.dtype) -> None:
    generator, rate, num_steps = torch.Generator().manual_seed(3), 1e-2, 10
    param = Parameter((0.1 * torch.randn(40, 130, generator=generator)).to(device, dtype))
    start, optimizer = param.detach().clone(), make([param], lr=rate, weight_decay=0.1)
    grads = []
    for _ in range(num_steps):
        values = (0.5 + 0.5 * torch.rand(40, 130, generator=generator)).to(dtype)
        grads.append(torch.where(torch.rand(40, 130, generator=generator) < 0.3, -values, values).to(device))
        param.grad = grads[-1]
        optimizer.step()
    expected = exact_adamw(start, grads, rate, decay=0.1)
    bound = bound_of_8bit(rate, num_steps, float(expected.abs().max()))
    assert bound < 0.3 * (expected - start).abs().max()  # or it would show nothing
    assert (optimizer.fp32_master(param).double() - expected).abs().max() <= bound


@devices
def test_a_schedule_sets_the_rate_of_each_step(device: str) -> None:
    scheduled, by_hand = parameters(torch.bfloat16, device), parameters(torch.bfloat16, device)
    optimizer, other = make(groups(scheduled), lr=torch.tensor(1e-2)), make(groups(by_hand))
    schedule = LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.25**step])
    for step in range(3):
        run(optimizer, scheduled, range(step, step + 1))
        schedule.step()
        other.param_groups[0]["lr"], other.param_groups[1]["lr"] = 1e-2 * 0.5**step, 3e-2 * 0.25**step
        run(other, by_hand, range(step, step + 1))
    assert all(torch.equal(a, b) for a, b in zip(scheduled, by_hand, strict=True))


def test_a_closure_is_called_with_gradients_on() -> None:
    param = Parameter(torch.ones(3))
    optimizer = make([param], max_grad_norm=1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param * param).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 3.0
    assert (param < 1).all()


def test_autograd_notices_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of kernels that write through addresses, as one does that leaves no trace at all."""
    params = parameters(torch.bfloat16)
    optimizer = make(params)
    loss = torch.stack([(p * p).sum() for p in params]).sum()
    set_gradients(params, 0)
    monkeypatch.setattr(module, "prepare", lambda states: SimpleNamespace(update=lambda scalars: None))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@devices
@formats
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_step_that_is_not_finite_changes_nothing(device: str, state: str, max_grad_norm: float | None) -> None:
    params, others = parameters(torch.bfloat16, device), parameters(torch.bfloat16, device)
    optimizer, other = (make(p, state=state, max_grad_norm=max_grad_norm) for p in (params, others))
    optimizer.skip_nonfinite = max_grad_norm is None
    for step in range(3):
        for bad in (math.inf, -math.inf, math.nan):
            set_gradients(params, 100 + step)
            spoil(params[2], bad)
            before = [p.detach().clone() for p in params]
            optimizer.step()
            assert equal(before, [p.detach() for p in params])
        run(optimizer, params, range(step, step + 1))
        run(other, others, range(step, step + 1))
        assert equal(snapshot(optimizer), snapshot(other))
    assert int(optimizer.num_skipped_steps) == 9
    assert int(other.num_skipped_steps) == 0


def test_without_clipping_and_check_no_norm_is_taken() -> None:
    params = parameters(torch.float32)
    optimizer = make(params, skip_nonfinite=False)
    run(optimizer, params, range(1))
    assert optimizer.grad_norm is None
    spoil(params[2], math.nan)
    optimizer.step()
    assert params[2].isnan().any()
    assert not params[0].isnan().any()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
@formats
def test_a_step_waits_for_nothing_on_a_gpu(device: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from kernels, which have tests of their own."""
    params = parameters(torch.bfloat16, device)
    optimizer = make(groups(params), state=state, max_grad_norm=1.0)
    monkeypatch.setattr(module, "prepare", lambda states: SimpleNamespace(update=lambda scalars: None))
    for step in range(3):
        set_gradients(params, step)
        try:
            torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@devices
@formats
@dtypes
def test_each_parameter_counts_its_own_steps(device: str, state: str, dtype: torch.dtype) -> None:
    """Which of them take part varies, and one joins late: each is as if it were alone."""
    params, alone = parameters(dtype, device), parameters(dtype, device)
    optimizer = make(params[:-1], state=state)
    takes_part = [(0, 1, 2, 4), (0, 2), (0, 1, 2, 4), (0, 1, 4), (0, 1, 2, 4)]
    numbered = [make([*parameters(dtype, device)[:i], p], state=state) for i, p in enumerate(alone)]
    for step, present in enumerate(takes_part):
        if step == 1:
            optimizer.add_param_group({"params": params[-1:]})
        for each in (params, alone):
            set_gradients(each, step)
        for i, param in enumerate(params):
            if i not in present or (step == 0 and i == 4):
                param.grad = None
            else:
                numbered[i].step()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, alone, strict=True))
    assert [int(optimizer.state[p]["step"]) for p in params if p.numel()] == [5, 4, 4, 3]


def test_a_gradient_that_is_not_contiguous_is_used_as_it_is() -> None:
    params, others = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, other = make(params), make(others)
    set_gradients(params, 0)
    set_gradients(others, 0)
    assert params[0].grad is not None
    params[0].grad = params[0].grad.t().contiguous().t()
    assert not params[0].grad.is_contiguous()
    optimizer.step()
    other.step()
    assert equal(snapshot(optimizer), snapshot(other))


@formats
def test_weights_that_someone_changed_are_where_the_next_step_begins(state: str) -> None:
    """A step of rate 0 shows the master; with 8 bits it keeps a correction of at most half a unit of the weight."""
    params = parameters(torch.bfloat16)
    optimizer = make(params, state=state)
    run(optimizer, params, range(3))
    for param in params:
        param.data.mul_(-3)
    changed = [p.detach().clone() for p in params]
    optimizer.param_groups[0]["lr"] = 0.0
    run(optimizer, params, range(3, 4))
    for param, value in zip(params, changed, strict=True):
        if "correction" in optimizer.state[param]:
            half_ulp = torch.exp2(torch.floor(torch.log2(value.float().abs())) - 8)
            assert ((optimizer.fp32_master(param) - value.float()).abs() <= half_ulp).all()
        else:
            assert torch.equal(optimizer.fp32_master(param), value.float())
            assert torch.equal(param, value)


def test_the_master_of_a_new_parameter_is_its_weight() -> None:
    params = [*parameters(torch.bfloat16), *parameters(torch.float32)]
    optimizer = make(params)
    for param in params:
        master = optimizer.fp32_master(param)
        assert master.dtype == torch.float32
        assert torch.equal(master, param.float())
        assert master.numel() == 0 or master.data_ptr() != param.data_ptr()
    with pytest.raises(UsageError, match=r"param: one of shape \(3,\) is in no group"):
        optimizer.fp32_master(torch.ones(3))


RATE, STEPS = 5e-3, 24
RELATIVE_LOSS = 5e-3
"""What the optimizer may cost in loss at most; six seeds of the rounding stayed within 0.15 % of fp32 state."""


def train(state: str, seed: int = 0, device: str = "cpu") -> list[float]:
    """Losses of a tiny model that learns one batch by heart, clipped, with a cosine schedule and accumulation."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama(tied=True, num_hidden_layers=1, initializer_range=0.1))
    model = model.to(device, torch.bfloat16)
    ids = torch.randint(3, 97, (2, 2, 16), generator=torch.Generator().manual_seed(1)).to(device)
    optimizer = HybridAdamW8bit(
        model.parameters(), lr=RATE, max_grad_norm=1.0, fp32_elements=256, state=state, seed=seed
    )  # type: ignore[arg-type]
    schedule = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / STEPS)))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for rows in ids:
            loss = model(input_ids=rows, labels=rows).loss / len(ids)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        schedule.step()
    return losses


@devices
def test_a_model_learns_as_with_fp32_state(device: str) -> None:
    exact, ours = train("fp32", device=device), train("hybrid8", device=device)
    assert exact[-1] < 0.5 * exact[0]
    assert ours[0] == exact[0]
    assert ours[-1] == pytest.approx(exact[-1], rel=RELATIVE_LOSS)


README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_five_lines_of_the_readme() -> None:
    section = README.read_text().split("## The optimizer alone")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line]) == 5
    model = AutoModelForCausalLM.from_config(llama(tied=True)).to(torch.bfloat16)
    ids = torch.arange(3, 19).view(1, -1)
    names: dict[str, Any] = {"model": model, "batch": {"input_ids": ids, "labels": ids}}
    before = [p.detach().float() for p in model.parameters()]
    exec(code[1], names)
    optimizer = names["optimizer"]
    assert isinstance(optimizer, HybridAdamW8bit)
    for param, start in zip(model.parameters(), before, strict=True):
        assert not torch.equal(optimizer.fp32_master(param), start)
        assert param.grad is None


@devices
@formats
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("bad", [None, math.inf])
def test_a_grad_scaler_scales_nothing_but_the_loss(device: str, state: str, unscales: bool, bad: float | None) -> None:
    """With and without ``unscale_``, which changes gradients without a trace; powers of two scale exactly."""
    (params, plain), optimizers = (parameters(torch.float32, device) for _ in range(2)), []
    optimizers = [make(each, state=state, max_grad_norm=1.0) for each in (params, plain)]
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(param.shape, generator=generator).to(device) for param in params]
    if bad is not None:
        inputs[2][1, 1] = bad
    losses = [torch.stack([(p * x).sum() for p, x in zip(each, inputs, strict=True)]).sum() for each in (params, plain)]
    scaler.scale(losses[0]).backward()
    losses[1].backward()
    if unscales:
        scaler.unscale_(optimizers[0])
    scaler.step(optimizers[0])
    optimizers[1].step()
    assert int(optimizers[0].num_skipped_steps) == int(optimizers[1].num_skipped_steps) == (bad is not None)
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))
    if bad is None:
        assert torch.equal(optimizers[0].grad_norm, optimizers[1].grad_norm)
