"""The same on a GPU: a worker that raises, memory that is refused, and a process that trains on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from lazysched.errors import RunError
from lazysched.runtime import arena
from lazysched.runtime.model import Model
from lazysched.runtime.operations import Operations, StepContext
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.runtime.train import train
from lazysched.schemas import Op, Plan, StagePlan
from tests.end_to_end.tiny_folder import make_data, make_model
from tests.runtime.tiny import SEQ_LEN, llama, uneven_batch, variants_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


class Broken(Exception):
    """Raised by what a test breaks."""


def plan_for(model: Model) -> Plan:
    """Everything on the host, every block recomputed."""
    end = StagePlan(weights="host", state="host", state_format="hybrid8")
    block = end.model_copy(update={"save": "input", "input_tier": "host"})
    return Plan(
        model_id=model.model_id, hardware_id="any", compute_dtype="bfloat16", batch_size=2, seq_len=SEQ_LEN,
        micro_batch=2, accumulation=1, loss_chunk_tokens=16, variants=variants_of(model, 2, SEQ_LEN), budget_bytes={},
        stages={s.id: block if s.is_block else end for s in model.stages}, fp32_state_elements=1000,
    )  # fmt: skip


def make_plan() -> Plan:
    return plan_for(Model(llama(tied=True), "bfloat16", torch.device("cuda"), micro_batch=2, seq_len=SEQ_LEN))


def make_session(plan: Plan) -> Session:
    config, device = llama(tied=True), torch.device("cuda")
    made = Session(plan, config, device, settings=AdamWSettings(), max_grad_norm=1.0, host_limit_bytes=10**9)
    made.initialise(seed=3)
    return made


def trained(plan: Plan) -> list[float]:
    """Losses of a new session."""
    with make_session(plan) as session:
        results = [session.executor.step(uneven_batch(2, SEQ_LEN, 97, seed), 1e-2) for seed in range(3)]
        session.executor.drain()
        return [result.loss for result in results]


def explode(*_: object) -> None:
    raise Broken("in an update")


def test_a_worker_that_raises_ends_the_step_with_its_own_traceback() -> None:
    plan = make_plan()
    before = trained(plan)
    with make_session(plan) as broken:
        broken.updates["block.1"].update = explode  # type: ignore[method-assign]
        broken.executor.step(uneven_batch(2, SEQ_LEN, 97, 0), 1e-2)
        with pytest.raises(Broken, match="in an update") as caught:
            broken.executor.step(uneven_batch(2, SEQ_LEN, 97, 1), 1e-2)
        assert caught.traceback[-1].name == "explode"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lazysched-cpu")]
    assert trained(plan) == before


def test_out_of_memory_in_the_first_step_is_one_line_and_the_process_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, output = make_plan(), tmp_path / "out"
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    run = Operations.run

    def greedy(self: Operations, op: Op, context: StepContext) -> None:
        if op.id == "backward/block.1/0":
            torch.empty(10**13, dtype=torch.uint8, device="cuda")
        run(self, op, context)

    def start() -> None:
        train(plan, model=str(model), data=str(data), output_dir=str(output), device="cuda", max_steps=2)

    with monkeypatch.context() as patch:
        patch.setattr(Operations, "run", greedy)
        with pytest.raises(RunError, match=r"GPU memory: planned an unknown peak; found .* more was asked for; .*"):
            start()
    assert not output.exists()
    start()
    assert (output / "model.safetensors").is_file()


class Twice:
    """The CUDA runtime, which is asked for the third piece twice and refuses that."""

    def __init__(self) -> None:
        self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self.cudaError = self._cudart.cudaError
        self.cudaGetErrorString = self._cudart.cudaGetErrorString
        self.num_locked = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> object:
        status = self._cudart.cudaHostRegister(address, num_bytes, flags)
        if self.num_locked == 2:
            status = self._cudart.cudaHostRegister(address, num_bytes, flags)
            self._cudart.cudaHostUnregister(address)
            return status
        self.num_locked += 1
        return status

    def cudaHostUnregister(self, address: int) -> object:
        self.num_locked -= 1
        return self._cudart.cudaHostUnregister(address)


def test_refused_page_locking_unlocks_what_was_locked_and_the_process_trains_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan()
    before = trained(plan)
    cudart = Twice()
    with monkeypatch.context() as patch:
        patch.setattr(arena, "_cudart", lambda: cudart)
        with pytest.raises(RunError, match=r"cannot be page-locked .*already mapped.*; profile again with --pin-limit"):
            make_session(plan)
    assert cudart.num_locked == 0
    assert trained(plan) == before
