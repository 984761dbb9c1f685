from __future__ import annotations

from typing import Any

import pytest
import torch

from lazysched.profiles import updates
from lazysched.schemas import Stage
from tests.runtime.tiny import CPU

BLOCK = Stage(id="block.0", structure="a", params={"a.weight": (128, 64), "a.norm": (32,)}, weight_bytes=2 * 8192 + 256)


def test_rate_counts_every_updated_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def one_second(work: Any, *_: object) -> list[float]:
        work()
        ran.append(1)
        return [1.0]

    monkeypatch.setattr(updates, "durations_of", one_second)
    found = updates.measure_updates([BLOCK] * 3, torch.bfloat16, CPU, host_limit_bytes=10**8, repeats=None)
    assert len(ran) == 4
    rates = [rate.per_s for by_format in found.alone.values() for rate in by_format.values()]
    assert rates == [3 * (BLOCK.num_params)] * 4
    assert set(found.alone["cpu"]) == set(found.alone["gpu"]) == {"fp32", "hybrid8"}


def test_state_that_does_not_fit_the_gpu_is_null_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def second_fails(*_: object) -> list[float]:
        calls.append(1)
        if len(calls) == 2:  # host fp32, gpu fp32, host hybrid8, gpu hybrid8
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [1.0]

    monkeypatch.setattr(updates, "durations_of", second_fails)
    found = updates.measure_updates([BLOCK], torch.bfloat16, CPU, host_limit_bytes=10**8, repeats=None)
    assert found.alone["cpu"]["fp32"].per_s == BLOCK.num_params
    assert found.alone["gpu"]["fp32"].per_s is None
    assert "do not fit" in (found.alone["gpu"]["fp32"].reason or "")
    assert found.alone["gpu"]["hybrid8"].per_s == BLOCK.num_params
