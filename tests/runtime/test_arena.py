"""The host arena: exact size, separate pieces, refused when too large, locked piece by piece."""

from __future__ import annotations

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch

from lazysched.errors import PinError, RunError
from lazysched.runtime.arena import HostArena
from lazysched.runtime.machine import rss_bytes

CPU = torch.device("cpu")
PAGE, MB = mmap.PAGESIZE, 10**6


def test_pieces_are_page_aligned_disjoint_and_no_larger_than_needed() -> None:
    sizes = {"a": 10, "b": PAGE, "none": 0, "c": PAGE + 2}
    arena = HostArena(sizes, [], CPU, limit_bytes=4 * PAGE)
    assert arena.total_bytes == 4 * PAGE
    tensors = {name: arena.tensor(name, torch.uint8) for name in sizes}
    for i, (name, tensor) in enumerate(tensors.items()):
        assert tensor.numel() == sizes[name]
        assert not tensor.any()
        assert tensor.data_ptr() % PAGE == 0
        tensor.fill_(i + 1)
    for i, tensor in enumerate(tensors.values()):
        assert tensor.eq(i + 1).all()


def test_a_piece_is_one_memory_under_every_dtype() -> None:
    arena = HostArena({"a": 8}, ["a"], CPU, limit_bytes=PAGE)
    arena.tensor("a", torch.float32)[1] = 1.0
    assert arena.tensor("a", torch.bfloat16).tolist() == [0, 0, 0, 1.0]
    odd = HostArena({"a": 6}, [], CPU, limit_bytes=PAGE)
    with pytest.raises(AssertionError, match="whole number"):
        odd.tensor("a", torch.float32)


def test_a_tensor_outlives_the_arena_and_then_the_memory_goes_back() -> None:
    num_bytes = 100_000_000
    arena = HostArena({"a": num_bytes}, [], CPU, limit_bytes=2 * num_bytes)
    tensor = arena.tensor("a", torch.uint8)
    before = rss_bytes()
    tensor.fill_(7)
    assert rss_bytes() - before > 0.9 * num_bytes
    arena.close()
    del arena
    gc.collect()
    assert tensor.eq(7).all()
    del tensor
    gc.collect()
    assert rss_bytes() - before < 0.1 * num_bytes


def test_too_much_is_refused_before_it_is_mapped() -> None:
    with pytest.raises(RunError, match=r"2e\+06 TB are needed and 1 GB are available; .*--host-memory"):
        HostArena({"a": 2 * 10**18}, [], CPU, limit_bytes=10**9)


def test_what_the_system_refuses_is_one_line() -> None:
    with pytest.raises(RunError, match=r"2e\+06 TB cannot be mapped \(Cannot allocate memory\)"):
        HostArena({"a": 2 * 10**18}, [], CPU, limit_bytes=10**19)


class FakeCudart:
    """Stands in for the CUDA runtime: registers until ``limit`` pieces are locked."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if len(self.locked) == self.limit:
            return 2
        assert flags == 0
        self.locked[address] = num_bytes
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return {2: "out of memory"}[status]

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_only_the_pinned_pieces_are_locked_each_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart(limit=9)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    sizes = {"a": 10, "b": PAGE, "none": 0, "c": PAGE + 2}
    arena = HostArena(sizes, {"a", "none", "c"}, torch.device("cuda"), limit_bytes=4 * PAGE)
    address = {name: arena.tensor(name, torch.uint8).data_ptr() for name in sizes}
    assert cudart.locked == {address["a"]: PAGE, address["c"]: 2 * PAGE}
    arena.close()
    arena.close()
    assert cudart.locked == {}


def test_a_refused_lock_unlocks_the_others_and_tells_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart(limit=1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    with pytest.raises(
        PinError,
        match=r"8\.19 kB of b cannot be page-locked \(out of memory\), 3 MB were; .*--pin-limit 3MB, then solve",
    ):
        HostArena({"a": 3 * MB, "b": PAGE + 1}, {"a", "b"}, torch.device("cuda"), limit_bytes=4 * MB)
    assert cudart.locked == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_pieces_copy_to_the_gpu_without_waiting() -> None:
    arena = HostArena({"a": 4096, "b": 4096}, {"a"}, torch.device("cuda"), limit_bytes=10**6)
    tensors = {name: arena.tensor(name, torch.float32) for name in "ab"}
    assert [tensors[name].is_pinned() for name in "ab"] == [True, False]
    tensors["a"].copy_(torch.arange(1024))
    assert torch.equal(tensors["a"].to("cuda", non_blocking=True).cpu(), torch.arange(1024.0))
    arena.close()
    assert not tensors["a"].is_pinned()
