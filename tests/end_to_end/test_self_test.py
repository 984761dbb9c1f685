"""A run tries its optimizer's kernel before it begins, and does not train with a wrong one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lazysched.cli import main
from lazysched.errors import RunError
from lazysched.runtime import kernels
from lazysched.runtime.kernels import CompiledUpdate
from lazysched.runtime.self_test import check_updates
from lazysched.schemas import Dtype, Plan, StateFormat
from tests.end_to_end.small_runs import SmallRun


@pytest.fixture
def wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The last block's moment is off by one bit; dtypes of what was updated."""
    update, seen = CompiledUpdate.update, list[torch.dtype]()

    def updating(self: CompiledUpdate, coefficients: torch.Tensor) -> None:
        update(self, coefficients)
        seen.extend(state.weight.dtype for state in self._states)
        self._states[0].first.view(torch.uint8)[-1] ^= 1

    monkeypatch.setattr(CompiledUpdate, "update", updating)
    return seen


@pytest.mark.usefixtures("wrong_kernel")
def test_a_wrong_kernel_ends_the_run_before_anything_is_written(
    run: SmallRun, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.save(tmp_path / "plan.json")
    flags: dict[str, Any] = {"plan": tmp_path / "plan.json", "model": run.model, "data": run.data}
    given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    assert main(["train", *given, "--output-dir", str(tmp_path / "out"), "--device", "cpu"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"the 8-bit update ({kernels.variants()[-1]}) found wrong results, so nothing was trained" in said
    assert "--optimizer-state fp32" in said
    assert sorted(os.listdir(tmp_path)) == ["plan.json"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernel_is_tried_as_it_will_run(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, wrong_kernel: list[torch.dtype], dtype: Dtype
) -> None:
    with pytest.raises(RunError, match="found wrong results"):
        check_updates(run.plan(dtype=dtype), torch.device("cpu"))
    assert set(wrong_kernel) == {getattr(torch, dtype)}
    monkeypatch.undo()
    check_updates(run.plan(dtype=dtype), torch.device("cpu"))


@pytest.mark.parametrize(("state_format", "is_built"), [("fp32", True), ("hybrid8", False)])
def test_what_does_not_use_the_kernel_does_not_try_it(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, wrong_kernel: list[torch.dtype], state_format: StateFormat,
    is_built: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(kernels, "is_built", lambda: is_built)
    check_updates(run.plan(state_format=state_format), torch.device("cpu"))
    assert not wrong_kernel
