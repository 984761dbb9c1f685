"""Kernels and threads depend on nothing that a launcher or another library brings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lazysched.runtime.engines import RESERVED_CORES, cpu_threads
from lazysched.runtime.kernels import RunningUpdate, available_cores

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"


def test_a_launchers_single_thread_does_not_slow_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(16)))
    assert torch.get_num_threads() == 1
    assert cpu_threads(torch.device("cuda")) == 16 - RESERVED_CORES
    assert available_cores() == 16


def test_the_kernels_link_neither_openmp_nor_torch_nor_cuda() -> None:
    libraries = sorted(RUNTIME.glob("_kernels*.so"))
    if not libraries:
        pytest.skip("the kernels are not compiled here")
    content = libraries[0].read_bytes()
    assert [name for name in (b"libgomp", b"libomp", b"libiomp", b"libtorch", b"libcudart") if name in content] == []


def test_what_was_never_begun_says_nothing_when_it_goes() -> None:
    update = RunningUpdate.__new__(RunningUpdate)
    update.__del__()
