"""State of the public optimizer that is saved, copied and loaded; and what it refuses."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lazysched.errors import UsageError
from lazysched.runtime.optimizer import HybridAdamW8bit
from tests.runtime.optimizer_cases import (
    devices,
    dtypes,
    equal,
    formats,
    gpu,
    groups,
    make,
    num_counts,
    parameters,
    run,
    set_gradients,
    snapshot,
)


@devices
@formats
@dtypes
@pytest.mark.parametrize("way", ["plain", "file", "deepcopy", "pickle"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    device: str, state: str, dtype: torch.dtype, way: str, tmp_path: Path
) -> None:
    params = parameters(dtype, device)
    optimizer = make(groups(params), state=state, seed=5, max_grad_norm=1.0)
    run(optimizer, params[1:], range(1))  # the first joins late
    run(optimizer, params, range(1, 3))
    if way in ("plain", "file"):
        others = [Parameter(p.detach().clone()) for p in params]
        other = make(groups(others), state=state, lr=0.5, max_grad_norm=1.0)
        if way == "file":
            torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
            other.load_state_dict(torch.load(tmp_path / "optimizer.pt", map_location="cpu"))
        else:
            other.load_state_dict(optimizer.state_dict())
    else:
        other = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        others = [p for group in other.param_groups for p in group["params"]]
    assert equal(snapshot(optimizer), snapshot(other))
    assert num_counts(optimizer) == num_counts(other) == 2
    run(optimizer, params, range(3, 6))
    run(other, others, range(3, 6))
    assert equal(snapshot(optimizer), snapshot(other))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_a_state_moves_between_devices(device: str) -> None:
    runs = {}
    for first, second in [("cpu", "cpu"), (device, "cpu"), ("cpu", device)]:
        params = parameters(torch.bfloat16, first)
        optimizer = make(params)
        run(optimizer, params, range(2))
        others = [Parameter(p.detach().to(second)) for p in params]
        other = make(others)
        other.load_state_dict(optimizer.state_dict())
        assert all(t.device.type == second for p in others for t in other.state.get(p, {}).values())
        run(other, others, range(2, 4))
        runs[first, second] = snapshot(other)
    assert equal(runs["cpu", "cpu"], runs[device, "cpu"])
    assert equal(runs["cpu", "cpu"], runs["cpu", device])


def test_a_loaded_state_is_a_copy() -> None:
    params, others = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, other = make(params), make(others)
    run(optimizer, params, range(2))
    before = snapshot(optimizer)
    other.load_state_dict(optimizer.state_dict())
    run(other, others, range(2, 4))
    assert equal(before, snapshot(optimizer))


def _saved(**changes: Any) -> dict[str, Any]:
    params = parameters(changes.pop("dtype", torch.bfloat16))
    optimizer = make(params, **changes)
    run(optimizer, params, range(1))
    return optimizer.state_dict()


def _with(saved: dict[str, Any], name: str, value: Tensor) -> dict[str, Any]:
    saved["state"][0][name] = value
    return saved


LOAD_REFUSALS = {
    "format": (lambda: _saved(state="fp32"), r"state_dict: state of group 0 is 'fp32'; make .* 'hybrid8'"),
    "groups": (lambda: _saved() | {"param_groups": []}, r"state_dict: \[\] parameters in its groups, .* has \[5\]; "),
    "torch": (lambda: torch.optim.AdamW(parameters(torch.bfloat16)).state_dict(), "state of group 0 is None; make "),
    "dtype": (lambda: _saved(dtype=torch.float32), "state_dict: parameter 0 has step, .* torch.bfloat16 has .*; use "),
    "shape": (lambda: _with(_saved(), "first", torch.zeros(130, 40).char()), "first of parameter 0 is .*130, 40"),
    "cast": (lambda: _with(_saved(), "first_scale", torch.zeros(21).half()), "first_scale of parameter 0 .*float16"),
}


@pytest.mark.parametrize("case", LOAD_REFUSALS)
def test_a_foreign_state_is_refused_in_one_line(case: str) -> None:
    saved, message = LOAD_REFUSALS[case]
    params = parameters(torch.bfloat16)
    optimizer = make(params)
    run(optimizer, params, range(1))
    before = snapshot(optimizer)
    with pytest.raises(UsageError, match=message) as error:
        optimizer.load_state_dict(saved())
    assert "\n" not in str(error.value)
    assert equal(before, snapshot(optimizer))


ONE = torch.ones(2, 3)
REFUSALS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "lr": (ONE, {"lr": -1.0}, "lr: -1.0; give"),
    "lr of nan": (ONE, {"lr": math.nan}, "lr: nan; give"),
    "lr of two": (ONE, {"lr": torch.ones(2)}, r"lr: tensor of shape \(2,\) on cpu; give"),
    "betas": (ONE, {"betas": (0.9, 1.0)}, r"betas: \(0.9, 1.0\); give"),
    "eps": (ONE, {"eps": 0.0}, "eps: 0.0; give"),
    "weight decay": (ONE, {"weight_decay": -0.1}, "weight_decay: -0.1; give"),
    "format": (ONE, {"state": "fp8"}, "state: 'fp8'; give one of hybrid8, fp32"),
    "elements": (ONE, {"fp32_elements": -1}, "fp32_elements: -1; give"),
    "seed": (ONE, {"seed": 0.5}, "seed: 0.5; give"),
    "norm": (ONE, {"max_grad_norm": 0.0}, "max_grad_norm: 0.0; give"),
    "fp16": (ONE.half(), {}, r"params: parameter 1 of shape \(2, 3\) has dtype torch.float16; convert"),
    "complex": (ONE.to(torch.complex64), {}, "has dtype torch.complex64; convert"),
    "meta": (ONE.to("meta"), {}, "is on meta; move"),
    "transposed": (ONE.t(), {}, "is not contiguous; set"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused_in_one_line(case: str) -> None:
    value, options, message = REFUSALS[case]
    params = [Parameter(torch.ones(1)), Parameter(value)]
    with pytest.raises(UsageError, match=message) as error:
        HybridAdamW8bit(params, **options)
    assert "\n" not in str(error.value)


def test_a_refused_group_is_not_added() -> None:
    optimizer = make([Parameter(torch.ones(3))])
    with pytest.raises(UsageError, match=r"parameter 1 .*float16"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(3).half())]})
    assert len(optimizer.param_groups) == 1


def test_what_a_loop_may_do_to_parameters_is_refused_before_anything_changes() -> None:
    params = [Parameter(torch.ones(20, 30)), torch.nn.Embedding(9, 4, sparse=True).weight]
    optimizer = make(params)
    set_gradients(params, 0)
    optimizer.step()
    before = snapshot(optimizer)
    params[1].grad = torch.eye(9, 4).to_sparse()
    with pytest.raises(UsageError, match=r"grad: that of parameter 1 has layout torch\.sparse_coo; make it dense"):
        optimizer.step()
    params[1].grad, original = None, params[1].data
    params[1].data = original.bfloat16()
    params[1].grad = torch.ones(9, 4, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=r"params: parameter 1 has step, first, second, but .* master, first, second"):
        optimizer.step()
    params[1].grad, params[1].data = None, original
    assert equal(before, snapshot(optimizer))
