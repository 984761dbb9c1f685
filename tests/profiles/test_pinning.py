"""What can be page-locked: stated, met, or not tried; and copies of memory that is not."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import pytest
import torch

from lazysched.profiles import links, pinning
from lazysched.profiles.pinning import Pinning, measure_pinning
from tests.runtime.fake_streams import fake_streams
from tests.runtime.test_arena import FakeCudart
from tests.runtime.tiny import CPU

CUDA = torch.device("cuda")
MB = 10**6


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart(limit=3)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(pinning, "PIECE_BYTES", 4 * mmap.PAGESIZE)
    return fake


def test_without_a_gpu_nothing_is_said(cudart: FakeCudart) -> None:
    assert measure_pinning(CPU, 10**9, None) == Pinning(None, "")


def test_a_stated_limit_is_taken(cudart: FakeCudart) -> None:
    found = measure_pinning(CUDA, 10**9, 5 * MB)
    assert found == Pinning(5 * MB, "5 MB at most, as stated; not tried")


def test_a_refusal_is_the_limit_and_everything_is_unlocked(cudart: FakeCudart) -> None:
    found = measure_pinning(CUDA, 10**9, None)
    assert found == Pinning(3 * 4 * mmap.PAGESIZE, "49.2 kB at most: then the system refused")
    assert cudart.locked == {}


def test_what_is_not_refused_sets_no_limit(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    cudart.limit = 10**6
    most: list[int] = []
    register = cudart.cudaHostRegister

    def counted(address: int, num_bytes: int, flags: int) -> int:
        status = register(address, num_bytes, flags)
        most.append(sum(cudart.locked.values()))
        return status

    monkeypatch.setattr(cudart, "cudaHostRegister", counted)
    assert measure_pinning(CUDA, 10**9, None) == Pinning(None, "262 kB without a refusal; more was not tried")
    assert max(most) == pinning.NUM_PIECES * 4 * mmap.PAGESIZE
    assert cudart.locked == {}
    most.clear()
    measure_pinning(CUDA, 9 * mmap.PAGESIZE, None)  # no more than there is
    assert max(most) == 8 * mmap.PAGESIZE


@pytest.mark.parametrize(("limit", "pinned"), [(None, True), (0, False), (2**29 - 1, False), (2**29, True)])
def test_buffers_are_page_locked_where_the_limit_lets_them(limit: int | None, pinned: bool) -> None:
    assert links.buffers_can_be_pinned(limit) == pinned


def test_both_directions_of_ordinary_memory_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (1 << 12, 1 << 14)
    together, laps_s = threading.Barrier(2), links._laps_s

    def met(requests: Callable[[], None], count: int, device: torch.device) -> list[float]:
        together.wait(timeout=20)
        return laps_s(requests, count, device)

    monkeypatch.setattr(links, "PAGEABLE_SIZES", sizes)
    monkeypatch.setattr(links, "LAP_BYTES", 1 << 16)
    monkeypatch.setattr(links, "_laps_s", met)
    up, down = ((torch.zeros(1 << 16, dtype=torch.uint8), torch.ones(1 << 16, dtype=torch.uint8)) for _ in range(2))
    with fake_streams():
        curves = links._pageable(up, down, CPU, repeats=2)
    assert list(curves) == list(links.PAGEABLE)
    assert all([size for size, _ in curve.points] == list(sizes) for curve in curves.values())
    assert torch.equal(*up)
    assert torch.equal(*down)
