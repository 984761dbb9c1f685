"""What goes wrong in a step ends it with its own words, gives everything back, and never hangs."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from lazysched.cli import main
from lazysched.errors import RunError
from lazysched.runtime import buffers, executor, session
from lazysched.runtime.arena import HostArena
from lazysched.runtime.buffers import Buffers
from lazysched.runtime.engines import CudaEngines
from lazysched.runtime.model import Model
from lazysched.runtime.operations import Operations, StepContext
from lazysched.runtime.session import Session
from lazysched.schemas import Op, Plan, Prediction
from lazysched.step_rows import LOG_FILE
from tests.end_to_end.tiny_folder import make_data, make_model
from tests.runtime.test_arena import FakeCudart
from tests.runtime.test_loop import make_session, plan_for
from tests.runtime.tiny import CPU, SEQ_LEN, llama, uneven_batch

WORKER = "lazysched-"
VOCABULARY = 97
pytestmark = pytest.mark.timeout(120)
"""A hang is a failure, not a wait for ever."""


class Broken(Exception):
    """Raised by what a test breaks."""


class SlowEvent:
    """Stands in for an event of a device that finishes a little later."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None:
        time.sleep(0.01)

    def elapsed_time(self, later: SlowEvent) -> float:
        return 1.0


class InlineStream:
    """Stands in for a stream: what is launched on it has run."""

    def wait_event(self, event: SlowEvent) -> None: ...


@pytest.fixture(params=[False, True], ids=["pinned", "pageable"])
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions on the CPU run as on a GPU: streams in line, updates and uploads on workers that wait for events.

    For host memory that is not page-locked, copies to the host are on a worker too.
    """
    for name, stand_in in {
        "Event": SlowEvent, "Stream": InlineStream, "current_stream": InlineStream,
        "stream": lambda _: nullcontext(), "synchronize": lambda: None, "current_device": lambda: 0,
        "set_device": lambda _: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(executor, "InlineEngines", lambda: CudaEngines(threads=1, blocking_copies=request.param))
    yield
    assert not workers_alive()


def workers_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(WORKER)]


def explode(*_: object) -> None:
    raise Broken("in an update")


def trained(num_steps: int = 3) -> list[float]:
    """Losses of a new session."""
    with make_session() as fresh:
        results = [fresh.executor.step(uneven_batch(2, SEQ_LEN, VOCABULARY, seed), 1e-2) for seed in range(num_steps)]
        fresh.executor.drain()
        return [result.loss for result in results]


def finished_step(running: Session) -> float:
    """The loss of one more step, once nothing is under way."""
    loss = running.executor.step(uneven_batch(2, SEQ_LEN, VOCABULARY, 1), 1e-2).loss
    running.executor.drain()
    return loss


def fail_in(monkeypatch: pytest.MonkeyPatch, op_id: str, action: Callable[[], object], step: int = 0) -> None:
    """Let ``action`` run instead of one operation of one step."""
    run, seen = Operations.run, [0]

    def failing(self: Operations, op: Op, context: StepContext) -> None:
        if op.id == op_id:
            seen[0] += 1
            if seen[0] == step + 1:
                action()
        run(self, op, context)

    monkeypatch.setattr(Operations, "run", failing)


# ---- the worker


@pytest.mark.parametrize("where", ["the next step", "drain"])
def test_a_worker_that_raises_ends_the_step_with_its_own_traceback(worker: None, where: str) -> None:
    before = trained()
    with make_session() as broken:
        broken.updates["block.1"].update = explode  # type: ignore[method-assign]
        broken.executor.step(uneven_batch(2, SEQ_LEN, VOCABULARY, 0), 1e-2)
        assert workers_alive()
        go_on = {
            "drain": broken.executor.drain,
            "the next step": lambda: broken.executor.step(uneven_batch(2, SEQ_LEN, VOCABULARY, 1), 1e-2),
        }
        with pytest.raises(Broken, match="in an update") as caught:
            go_on[where]()
        assert caught.traceback[-1].name == "explode"
    assert not workers_alive()
    assert trained() == before


@pytest.mark.parametrize(
    "op_id", ["load/block.1/forward", "forward/block.1/0", "backward/block.0/0", "grads/block.1", "totals/copy"]
)
def test_a_step_that_breaks_while_the_worker_waits_does_not_hang(
    worker: None, monkeypatch: pytest.MonkeyPatch, op_id: str
) -> None:
    before = trained()
    with monkeypatch.context() as patch:
        fail_in(patch, op_id, explode, step=1)
        with make_session() as broken:
            broken.executor.step(uneven_batch(2, SEQ_LEN, VOCABULARY, 0), 1e-2)
            with pytest.raises(Broken) as caught:
                finished_step(broken)
        assert caught.traceback[-1].name == "explode"
    assert not workers_alive()
    assert trained() == before


def test_reading_a_number_that_never_came_raises_what_kept_it(worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in(monkeypatch, "totals/copy", explode)
    with make_session() as broken, pytest.raises(Broken):
        _ = broken.executor.step(uneven_batch(2, SEQ_LEN, VOCABULARY, 0), 1e-2).loss


# ---- the command line


class Folder:
    """A model, data and a plan in files; every weight is on the host."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_model(path / "model")
        make_data(path / "data.jsonl")
        model = Model(llama(tied=True), "float32", CPU, micro_batch=2, seq_len=SEQ_LEN)
        predicted = Prediction(
            step_s=1.0, exposed_s={}, moved_bytes={}, peak_bytes={"gpu": 1_500_000_000, "host": 10**9}
        )
        plan = plan_for(model).model_copy(
            update={"predicted": predicted, "budget_bytes": {"gpu": 2 * 10**9, "host": 10**9}}
        )
        plan.save(path / "plan.json")
        self.before = self.files()

    def files(self) -> set[Path]:
        """All but the log of a run's steps, which stays."""
        output, found = self.path / "out", set(self.path.rglob("*"))
        return found - ({output, output / LOG_FILE} if [*output.glob("*")] == [output / LOG_FILE] else set())

    def train(self) -> int:
        return main(
            ["train", "--plan", str(self.path / "plan.json"), "--model", str(self.path / "model"), "--data",
             str(self.path / "data.jsonl"), "--output-dir", str(self.path / "out"), "--device", "cpu",
             "--max-steps", "3"]
        )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Folder:
    made = Folder(tmp_path)
    capsys.readouterr()  # transformers shows a bar while it writes
    return made


def refused(folder: Folder, capsys: pytest.CaptureFixture[str], exit_code: int = 1) -> str:
    """The one line on stderr of a run that leaves no file behind."""
    assert folder.train() == exit_code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert folder.files() == folder.before
    return lines[0]


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")


def test_out_of_gpu_memory_says_what_was_planned_what_was_found_and_what_to_do(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        fail_in(patch, "backward/block.1/0", out_of_memory)
        for name, num_bytes in {"memory_reserved": 1_900_000_000, "max_memory_allocated": 1_700_000_000}.items():
            patch.setattr(torch.cuda, name, lambda num_bytes=num_bytes: num_bytes)
        patch.setattr("lazysched.runtime.machine.device_memory", lambda _: (4 * 10**9, 10**9))
        message = refused(folder, capsys)
    assert "planned a peak of 1.5 GB within 2 GB" in message
    assert "found 1.9 GB reserved, of which at most 1.7 GB in use" in message
    assert "1.1 GB taken by the driver and other processes, and 1 GB free when 2.00 GiB more was asked for" in message
    assert message.endswith("solve again with a smaller --gpu-memory or --batch-size")
    assert folder.train() == 0


def test_out_of_memory_of_the_driver_is_one_line_too_and_its_other_errors_are_not_taken_for_it(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(reason: str) -> None:
        raise torch.AcceleratorError(f"CUDA error: {reason}")

    with monkeypatch.context() as patch:
        fail_in(patch, "backward/block.1/0", partial(fail, "out of memory"))
        patch.setattr(torch.cuda, "memory_reserved", lambda: 0)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
        assert "memory more was asked for; solve again with a smaller --gpu-memory" in refused(folder, capsys)
    with monkeypatch.context() as patch:
        fail_in(patch, "backward/block.1/0", partial(fail, "an illegal memory access was encountered"))
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            folder.train()


def test_out_of_memory_lets_the_tensors_of_the_step_go(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    from lazysched.runtime.train import train

    held: list[weakref.ref[torch.Tensor]] = []

    def with_a_tensor() -> None:
        tensor = torch.zeros(10)
        held.append(weakref.ref(tensor))
        out_of_memory()

    fail_in(monkeypatch, "backward/block.1/0", with_a_tensor)
    with pytest.raises(RunError, match="GPU memory") as caught:
        train(
            Plan.load(folder.path / "plan.json"), model=str(folder.path / "model"),
            data=str(folder.path / "data.jsonl"), output_dir=str(folder.path / "out"), device="cpu", max_steps=2,
        )  # fmt: skip
    gc.collect()
    assert [reference() for reference in held] == [None]
    assert "--gpu-memory" in str(caught.value)


def test_a_broken_worker_leaves_no_file_and_the_process_trains_on(
    worker: None, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_in(patch, "update/block.1", explode)
        with pytest.raises(Broken, match="in an update"):
            folder.train()
        assert folder.files() == folder.before
        assert not workers_alive()
    assert folder.train() == 0


def ctrl_c() -> None:
    """From any thread to the main one, which may be waiting for this one."""
    os.kill(os.getpid(), signal.SIGINT)


def ctrl_c_twice() -> None:
    ctrl_c()
    while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # two at once are one to Python
        time.sleep(0.001)
    ctrl_c()


@pytest.mark.parametrize("op_id", ["forward/block.1/0", "load/block.1/forward"])
def test_ctrl_c_twice_during_a_step_ends_the_run(
    worker: None, folder: Folder, op_id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_in(monkeypatch, op_id, ctrl_c_twice, step=1)
    assert refused(folder, capsys, exit_code=130) == "error: interrupted"
    assert not workers_alive()


@pytest.mark.parametrize("op_id", ["forward/block.1/0", "load/block.1/forward"])
def test_ctrl_c_during_a_step_finishes_and_saves_it(
    worker: None, folder: Folder, op_id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_in(monkeypatch, op_id, ctrl_c, step=1)
    assert folder.train() == 130
    assert "stopped after step 2; go on from" in capsys.readouterr().err
    assert sorted(path.name for path in (folder.path / "out").iterdir()) == ["checkpoint-2", LOG_FILE]
    assert not workers_alive()


# ---- page-locking


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    """Arenas on the CPU lock their pieces as for a GPU."""
    fake = FakeCudart(limit=10**6)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)

    def locking(sizes: dict[str, int], pinned: list[str], device: torch.device, limit_bytes: int) -> HostArena:
        return HostArena(sizes, pinned, torch.device("cuda"), limit_bytes)

    monkeypatch.setattr(buffers, "HostArena", locking)
    return fake


def test_refused_page_locking_is_one_line_and_unlocks_what_was_locked(
    folder: Folder, cudart: FakeCudart, capsys: pytest.CaptureFixture[str]
) -> None:
    cudart.limit = 3
    message = refused(folder, capsys)
    assert re.search(
        r"cannot be page-locked \(out of memory\), .* were; profile again with --pin-limit 0MB, then solve again$",
        message,
    )
    assert cudart.locked == {}
    cudart.limit = 10**6
    assert folder.train() == 0
    assert cudart.locked == {}


def test_a_plan_without_page_locking_locks_nothing(
    folder: Folder, cudart: FakeCudart, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder.path / "plan.json"
    Plan.load(path).model_copy(update={"host_memory": "pageable"}).save(path)
    cudart.limit = 0
    assert folder.train() == 0


def test_ctrl_c_while_locking_unlocks_what_was_locked(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    register, calls = cudart.cudaHostRegister, []

    def interrupted(address: int, num_bytes: int, flags: int) -> int:
        calls.append(address)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return register(address, num_bytes, flags)

    monkeypatch.setattr(cudart, "cudaHostRegister", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_session()
    assert len(calls) == 3
    assert cudart.locked == {}


def test_a_session_that_cannot_be_made_unlocks_its_memory(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []

    def fail(*_: object) -> None:
        locked.append(len(cudart.locked))
        raise Broken

    for place, name in ((Buffers, "_on_device"), (Session, "_update_of"), (session, "Executor")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fail)
            with pytest.raises(Broken):
                make_session()
        assert cudart.locked == {}
    assert all(locked)


def test_a_device_that_fails_while_closing_does_not_keep_memory_locked(
    cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = make_session()
    assert cudart.locked
    monkeypatch.setattr(broken.executor._engines, "close", explode)
    with pytest.raises(Broken):
        broken.close()
    assert cudart.locked == {}
