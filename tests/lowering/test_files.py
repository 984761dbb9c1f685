"""Plans whose state, weights and saved tensors live in files: the operations, slots and bytes of one of each."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lazysched.errors import UsageError
from lazysched.lower import lower
from lazysched.schemas import Plan, Program, Stage, StagePlan
from tests.lowering.cases import VARIANTS, model

IN_FILES = StagePlan(
    weights="nvme", state="nvme", save="all", saved_tiers={"intermediates": "nvme"}, input_tier="nvme"
)  # fmt: skip
END_IN_FILES = StagePlan(weights="nvme", state="nvme")
WEIGHT_BYTES, STATE_BYTES = 512, 1024
"""Of a block in fp32, two moments."""
SAVED_BYTES = 500


def plan_of(stages: list[Stage], block: StagePlan, end: StagePlan = END_IN_FILES, **changes: object) -> Plan:
    fields: dict[str, object] = {
        "model_id": "m", "hardware_id": "h", "compute_dtype": "float32", "batch_size": 2, "seq_len": 8,
        "micro_batch": 1, "accumulation": 2, "loss_chunk_tokens": 8, "variants": VARIANTS, "budget_bytes": {},
        "stages": {stage.id: block if stage.is_block else end for stage in stages},
    }  # fmt: skip
    return Plan.model_validate(fields | changes)


def lowered(num_blocks: int, block: StagePlan, end: StagePlan = END_IN_FILES, **changes: object) -> Program:
    stages = model(num_blocks, tied=False)
    return lower(plan_of(stages, block, end, **changes), stages)


def sizes(program: Program, prefix: str) -> list[int]:
    return [buffer.num_bytes for key, buffer in program.buffers.items() if key.startswith(prefix)]


def test_slots_on_the_host_are_as_many_as_the_depth_and_lag_want() -> None:
    program = lowered(5, IN_FILES, prefetch_depth=2, d2h_lag=3)
    assert sizes(program, "host/weights/slot") == 4 * [WEIGHT_BYTES]
    assert sizes(program, "host/weights/vocabulary") == sizes(program, "gpu/weights/vocabulary") == [2304]
    assert sizes(program, "host/outgoing/slot") == 5 * [SAVED_BYTES]
    assert sizes(program, "host/fetched/slot") == 4 * [SAVED_BYTES]
    assert sizes(program, "host/state/slot") == 3 * [3 * 2304]  # state and weights of the largest, the head
    assert sizes(program, "nvme/saved/") == 10 * [SAVED_BYTES]
    assert sizes(program, "nvme/weights/block.") == 5 * [WEIGHT_BYTES]
    assert sizes(program, "nvme/state/block.") == 5 * [STATE_BYTES]
    on_host = {key.split("/")[1] for key in program.buffers if key.startswith("host/")}
    assert on_host == {"batch", "scale", "totals", "weights", "outgoing", "fetched", "state", "grads"}
    assert {buffer.kind for buffer in program.buffers.values() if buffer.tier == "host" and not buffer.pinned} == {
        "state"
    }  # fmt: skip
    assert not any(buffer.pinned for buffer in program.buffers.values() if buffer.tier == "nvme")


def test_what_is_in_files_is_read_before_its_copy_and_written_after_it() -> None:
    program = lowered(3, IN_FILES)
    order = list(program.ops)
    reads = {op.id: op for op in program.ops.values() if op.engine == "nvme_read"}
    writes = {op.id: op for op in program.ops.values() if op.engine == "nvme_write"}
    for stage in ("block.0", "block.1", "block.2"):
        for m in (0, 1):
            save, fetch = program.ops[f"save/{stage}/{m}"], program.ops[f"fetch/{stage}/{m}"]
            write, read = writes[f"write/saved/{stage}/{m}"], reads[f"read/saved/{stage}/{m}"]
            assert order.index(write.id) == order.index(save.id) + 1
            assert order.index(read.id) == order.index(fetch.id) - 1
            assert (write.reads, write.writes) == (save.writes, (f"nvme/saved/{stage}/{m}",))
            assert (read.reads, read.writes) == (write.writes, fetch.reads)
            assert save.num_bytes == write.num_bytes == read.num_bytes == fetch.num_bytes == SAVED_BYTES
        read, update = reads[f"read/state/{stage}"], program.ops[f"update/{stage}"]
        write = writes[f"write/state/{stage}"]
        assert [order.index(op.id) - order.index(update.id) for op in (read, write)] == [-1, 1]
        assert read.reads == write.writes == (f"nvme/state/{stage}", f"nvme/weights/{stage}")
        assert read.writes == update.writes == write.reads
        assert update.reads == (f"host/grads/{stage}", "host/scale")
        assert update.engine == "cpu"
        assert read.num_bytes == write.num_bytes == STATE_BYTES + WEIGHT_BYTES
    loads = [op for op in order if op.startswith("load/")]
    # The last two blocks are still in the GPU's two slots when the backward begins.
    assert [op for op in loads if op.endswith("backward")] == ["load/block.0/backward"]
    for load in loads:
        read = reads[f"read/weights/{load.removeprefix('load/')}"]
        assert order.index(read.id) == order.index(load) - 1
        assert read.writes == program.ops[load].reads
        assert read.num_bytes == program.ops[load].num_bytes
    assert len(reads) == len(loads) + 6 + 5
    assert len(writes) == 6 + 5
    assert {op.cost for op in reads.values()} == {("link", "nvme_read")}
    assert {op.cost for op in writes.values()} == {("link", "nvme_write")}


@pytest.mark.parametrize("weights", ["gpu", "host"])
def test_weights_elsewhere_than_their_state_in_files_are_updated_in_place(weights: str) -> None:
    choice = StagePlan.model_validate({"weights": weights, "state": "nvme", "save": "input"})
    program = lowered(2, choice, StagePlan(weights="gpu", state="gpu"))
    assert program.ops["update/block.1"].writes == ("host/state/slot1", "host/weights/block.1")
    assert program.ops["read/state/block.1"].num_bytes == STATE_BYTES
    assert program.ops["read/state/block.1"].reads == ("nvme/state/block.1",)
    assert program.ops["load/block.1/forward"].reads == ("host/weights/block.1",)
    assert sizes(program, "host/state/") == 3 * [STATE_BYTES]
    assert sizes(program, "nvme/weights/") == []


def test_evaluation_reads_weights_and_nothing_else() -> None:
    stages = model(3, tied=True)
    program = lower(plan_of(stages, IN_FILES), stages, training=False)
    moved = [op.id for op in program.ops.values() if op.engine in ("nvme_read", "nvme_write")]
    assert moved == [f"read/weights/{stage.id}/forward" for stage in stages]
    assert not [key for key in program.buffers if key.startswith(("host/state/", "host/outgoing", "host/fetched"))]


def test_weights_in_files_need_their_state_there() -> None:
    stages = model(2, tied=False)
    choice = StagePlan(weights="nvme", state="host", save="input")
    with pytest.raises(ValidationError, match=r"stages\.block\.0: weights on nvme need state on nvme"):
        plan_of(stages, choice)


@pytest.mark.parametrize(
    ("saved", "input_tier", "message"),
    [("nvme", "host", r"block\.0\.saved_tiers\.intermediates"), ("host", "nvme", r"block\.0\.input_tier")],
)
def test_a_block_sends_all_that_leaves_to_one_tier(saved: str, input_tier: str, message: str) -> None:
    data = {"weights": "gpu", "state": "gpu", "saved_tiers": {"intermediates": saved}, "input_tier": input_tier}
    with pytest.raises(UsageError, match=rf"^plan: stages\.{message}: nvme beside host in one block; use one"):
        lowered(2, StagePlan.model_validate(data))


def test_selective_updates_are_not_lowered_as_exact_ones() -> None:
    with pytest.raises(UsageError, match=r"update\.mode: 'selective' cannot be lowered yet; use exact"):
        lowered(2, IN_FILES, update={"mode": "selective"})
