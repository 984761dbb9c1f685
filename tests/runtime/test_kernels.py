"""The compiled update: the reference's bits from every variant, thread count and chunk size; chunks, forks, absence."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazysched.errors import RunError
from lazysched.runtime import hybrid8_backends, kernels
from lazysched.runtime.hybrid8 import BlockState, Fp32State
from lazysched.runtime.hybrid8_backends import TorchUpdate
from lazysched.runtime.kernels import CompiledUpdate
from tests.runtime.hybrid8_cases import (
    DECAYING,
    arrays,
    block_state,
    copy_of,
    differing,
    fp32_state,
    special_gradient,
    uneven_gradient,
)

SOURCES = Path(kernels.__file__).resolve().parent / "csrc"
DTYPES = [torch.bfloat16, torch.float32]


def run(states: list[BlockState | Fp32State], update: CompiledUpdate | TorchUpdate, steps: int = 6) -> None:
    for step in range(1, steps + 1):
        for state in states:
            state.grad.copy_(special_gradient(state.grad.numel(), step))
        update.update(DECAYING.at(step, 0.7))


def test_the_library_is_built() -> None:
    assert "portable" in kernels.variants()
    assert len(kernels.variants()) > 1  # this project is tested on processors with vector units


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5000, 70_001])
@pytest.mark.parametrize("variant", kernels.variants())
def test_variants_have_the_bits_of_the_reference(variant: str, numel: int, dtype: torch.dtype) -> None:
    states = [block_state(numel, dtype), fp32_state(numel, dtype), block_state(numel, dtype, seed=1, decays=False)]
    expected = [copy_of(state) for state in states]
    run(states, CompiledUpdate(states, variant=variant, threads=2, chunk_blocks=3))
    run(expected, TorchUpdate(expected))
    assert [differing(a, b, any_nan=True) for a, b in zip(states, expected, strict=True)] == [[], [], []]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3000), st.sampled_from(DTYPES), st.integers(1, 5), st.integers(1, 20), st.integers(0, 2**32 - 1),
    st.sampled_from(kernels.variants()),
)  # fmt: skip
def test_any_state_any_threads_any_chunks(
    numel: int, dtype: torch.dtype, threads: int, chunk_blocks: int, seed: int, variant: str
) -> None:
    state = random_state(numel, dtype, seed)
    expected = copy_of(state)
    for step in (1, 1000):
        for each in (state, expected):
            each.grad.copy_(uneven_gradient(numel, seed % 1000 + step))
        CompiledUpdate([state], variant=variant, threads=threads, chunk_blocks=chunk_blocks).update(
            DECAYING.at(step, 0.7)
        )
        TorchUpdate([expected]).update(DECAYING.at(step, 0.7))
        assert differing(state, expected, any_nan=True) == []


def random_state(numel: int, dtype: torch.dtype, seed: int) -> BlockState:
    """Any codes and scales, weights of zero with corrections of either sign, weights that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    state = block_state(numel, dtype, seed=seed)
    state.first.copy_(torch.randint(-127, 128, (numel,), generator=generator))
    state.second.copy_(torch.randint(0, 256, (numel,), generator=generator))
    for scale in (state.first_scale, state.second_scale):
        scale.copy_(10.0 ** (torch.rand(scale.numel(), generator=generator) * 20 - 22))
    if state.correction is not None:
        state.correction.copy_(torch.randint(-128, 128, (numel,), generator=generator))
    chosen = torch.randint(0, 60, (numel,), generator=generator)
    for value, number in enumerate((0.0, -0.0, float("inf"), float("nan"))):
        state.weight[chosen == value] = number
    return state


def test_a_skipped_step_changes_no_byte() -> None:
    states = [block_state(1000), fp32_state(1000)]
    run(states, CompiledUpdate(states), steps=2)
    before = [copy_of(state) for state in states]
    CompiledUpdate(states).update(DECAYING.at(3, skip=1.0))
    assert [differing(a, b, any_nan=True) for a, b in zip(states, before, strict=True)] == [[], []]


def test_chunks_are_final_once_waited_for() -> None:
    numel, chunk = 1 << 20, 16
    state = block_state(numel)
    state.grad.copy_(uneven_gradient(numel, 1))
    expected = copy_of(state)
    CompiledUpdate([expected]).update(DECAYING.at(1, 0.7))
    running = CompiledUpdate([state], threads=3, chunk_blocks=chunk).start(DECAYING.at(1, 0.7))
    assert running.num_chunks == numel // (256 * chunk)
    for index in range(running.num_chunks):
        running.wait(index + 1)
        here = slice(256 * chunk * index, 256 * chunk * (index + 1))
        assert torch.equal(state.weight[here], expected.weight[here])
        assert torch.equal(state.second[here], expected.second[here])
    running.finish()
    assert differing(state, expected, any_nan=True) == []


def test_updates_of_several_threads_share_a_pool() -> None:
    states = [block_state(100_000, seed=seed) for seed in range(4)]
    expected = [copy_of(state) for state in states]
    workers = [
        threading.Thread(target=run, args=([state], CompiledUpdate([state], threads=2, chunk_blocks=7)))
        for state in states
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for state in expected:
        run([state], CompiledUpdate([state], threads=1))
    assert [differing(a, b, any_nan=True) for a, b in zip(states, expected, strict=True)] == [[]] * 4


def test_the_callers_flushing_of_subnormals_changes_nothing() -> None:
    state = block_state(512)
    expected = copy_of(state)
    for each in (state, expected):
        each.grad.copy_(uneven_gradient(512, 3) * 1e-30)
        each.grad[::3] = 1e-39
    CompiledUpdate([expected], threads=5).update(DECAYING.at(1, 0.7))
    assert torch.set_flush_denormal(True)
    try:
        CompiledUpdate([state], threads=6).update(DECAYING.at(1, 0.7))  # a pool that is made meanwhile
    finally:
        torch.set_flush_denormal(False)
    assert differing(state, expected, any_nan=True) == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    state = block_state(5000)
    update = CompiledUpdate([state], threads=2)
    run([state], update, steps=1)
    child = os.fork()
    if child == 0:
        try:
            run([state], update, steps=2)
        finally:
            os._exit(0 if bool(state.second.any()) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_without_the_library_torch_does_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    state, expected = block_state(600), block_state(600)
    run([expected], CompiledUpdate([expected]))
    monkeypatch.setattr(kernels, "_library_path", lambda: None)
    with pytest.warns(RuntimeWarning, match="compiled optimizer is missing.*Install a compiler"):
        update = hybrid8_backends.prepare([state])
    assert isinstance(update, TorchUpdate)
    run([state], update)
    assert differing(state, expected, any_nan=True) == []


def test_a_library_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "_kernels.so"
    broken.write_text("no library")
    monkeypatch.setattr(kernels, "_library_path", lambda: broken)
    kernels._library.cache_clear()
    kernels.variants.cache_clear()
    try:
        with pytest.raises(RunError, match=r"_kernels.so: cannot be loaded .*; install lazysched again"):
            hybrid8_backends.prepare([block_state(10)])
        monkeypatch.undo()
        monkeypatch.setattr(kernels, "_INTERFACE", 0)
        with pytest.raises(RunError, match=r"has interface \d+, this version needs 0; install lazysched again"):
            hybrid8_backends.prepare([block_state(10)])
    finally:
        kernels._library.cache_clear()
        kernels.variants.cache_clear()


def test_memory_that_cannot_be_addressed_is_refused() -> None:
    state = block_state(512)
    with pytest.raises(ValueError, match="not contiguous on the CPU"):
        CompiledUpdate([copy_of(state).__class__(**{**vars(state), "first": torch.zeros(1024, dtype=torch.int8)[::2]})])
    with pytest.raises(ValueError, match=r"coefficients: .* not fp32 on the CPU"):
        CompiledUpdate([state]).update(DECAYING.at(1, 0.7).double())
    with pytest.raises(ValueError, match="threads 1, chunk_blocks 0: both must be at least 1"):
        CompiledUpdate([state], threads=1, chunk_blocks=0)
    with pytest.raises(RuntimeError, match="'sse2' is not among those that run here"):
        CompiledUpdate([state], variant="sse2")


@pytest.fixture(scope="module")
def arm_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The update for 64-bit Arm, as a program that qemu runs."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        if os.environ.get("LAZYSCHED_REQUIRE_DATA") == "1":
            pytest.fail("aarch64-linux-gnu-g++ and qemu-aarch64 are needed: install g++-aarch64-linux-gnu, qemu-user")
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64")
    program = tmp_path_factory.mktemp("arm") / "driver"
    flags = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-static"]
    sources = [Path(__file__).parent / "cross_driver.cpp", SOURCES / "variants.cpp"]
    subprocess.run([compiler, *flags, f"-I{SOURCES}", *sources, "-o", program], check=True)
    return program


@pytest.mark.parametrize("make", [block_state, fp32_state])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["portable", "neon"])
def test_arm_has_the_bits_of_the_reference(
    variant: str, dtype: torch.dtype, make: object, arm_driver: Path, tmp_path: Path
) -> None:
    state = make(5001, dtype)  # type: ignore[operator]
    expected, steps = copy_of(state), 6
    run([expected], TorchUpdate([expected]), steps)
    case, result = tmp_path / "case", tmp_path / "result"
    case.write_bytes(_case(state, variant, steps))
    subprocess.run(["qemu-aarch64", arm_driver, case, result], check=True)
    data = bytearray(result.read_bytes())
    for name, array in arrays(state).items():
        if name != "grad":
            size = array.numel() * array.element_size()
            array.copy_(torch.frombuffer(data[:size], dtype=array.dtype))
            del data[:size]
    state.grad.copy_(expected.grad)
    assert not data
    assert differing(state, expected, any_nan=True) == []


def _case(state: BlockState | Fp32State, variant: str, steps: int) -> bytes:
    in_blocks, narrow = isinstance(state, BlockState), state.weight.dtype == torch.bfloat16
    stream = state.stream if isinstance(state, BlockState) else 0
    header = struct.pack(
        "<qiiiiII", state.weight.numel(), (not narrow) + 2 * (not in_blocks), state.decays,
        kernels.VARIANTS.index(variant), steps, stream & 0xFFFFFFFF, stream >> 32,
    )  # fmt: skip
    parts = [_bytes(array) for name, array in arrays(state).items() if name != "grad"]
    for step in range(1, steps + 1):
        parts.append(_bytes(DECAYING.at(step, 0.7)))
        parts.append(_bytes(special_gradient(state.weight.numel(), step).to(state.weight.dtype)))
    return header + b"".join(parts)


def _bytes(array: torch.Tensor) -> bytes:
    return array.contiguous().view(torch.uint8).numpy().tobytes()
