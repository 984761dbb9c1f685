"""Packed rows: each sample's loss and gradients are those that it has alone, in every architecture."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from lazysched.errors import UsageError
from lazysched.lower import lower
from lazysched.runtime import architecture
from lazysched.runtime.batch import Batch
from lazysched.runtime.model import Model
from lazysched.runtime.packed import PackedArguments, example_positions
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Plan
from tests.runtime.test_architectures import (
    CONFIGS,
    ERROR_RATIO,
    MICRO_BATCH,
    SEQ_LEN,
    SMALL,
    model_of,
    plan_of,
    worst_error,
)
from tests.runtime.test_compiled import compiled_variants
from tests.runtime.tiny import CPU, packed_batch, packing, uneven_batch, variants_of

VOCABULARY = SMALL["vocab_size"]


def packed_model(config: PretrainedConfig, micro_batch: int = MICRO_BATCH) -> Model:
    return Model(config, "float32", CPU, micro_batch=micro_batch, seq_len=SEQ_LEN, packing=True)


def packed_plan(model: Model) -> Plan:
    return packing(plan_of(model, variants_of(model, MICRO_BATCH, SEQ_LEN)), model)


def open_session(plan: Plan, config: PretrainedConfig) -> Session:
    session = Session(plan, config, CPU, settings=AdamWSettings(), max_grad_norm=1.0, host_limit_bytes=10**9)
    weights = dict(model_of(config, torch.float32).named_parameters())
    session.load(lambda key, target: target.copy_(weights[key].detach()))
    return session


def one_by_one(model: PreTrainedModel, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the samples run alone through transformers' own forward."""
    assert batch.positions is not None
    total = 0.0
    for ids, targets, positions in zip(batch.input_ids, batch.targets, batch.positions, strict=True):
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(ids)]
        for start, end in pairwise(starts):
            if (targets[start:end] == -100).all():
                continue
            logits = model(input_ids=ids[None, start:end], use_cache=False).logits[0]
            wide = logits.double() if logits.dtype == torch.float64 else logits.float()
            loss = F.cross_entropy(wide, targets[start:end], reduction="sum") / batch.num_trained_tokens
            loss.backward()
            total += float(loss.detach())
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_samples_get_the_gradients_that_they_have_alone(name: str) -> None:
    plan = packed_plan(packed_model(CONFIGS[name]))
    batch = packed_batch(plan.batch_size, SEQ_LEN, VOCABULARY, seed=3)
    assert worst_error(CONFIGS[name], plan, batch, one_by_one) <= ERROR_RATIO


@pytest.mark.parametrize("name", ["gemma3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_compiled_for_real(name: str) -> None:
    model = packed_model(CONFIGS[name])
    plan = packing(plan_of(model, compiled_variants(model)), model)
    batch = packed_batch(plan.batch_size, SEQ_LEN, VOCABULARY, seed=3)
    assert worst_error(CONFIGS[name], plan, batch, one_by_one) <= ERROR_RATIO


@pytest.mark.parametrize("name", ["llama", "mistral, sliding", "gemma2", "gemma3", "gpt-neox"])
def test_other_tokens_in_one_sample_change_nothing_for_the_others(name: str) -> None:
    plan = packed_plan(packed_model(CONFIGS[name]))
    batch = packed_batch(plan.batch_size, SEQ_LEN, VOCABULARY, seed=1)
    assert batch.positions is not None
    sample = (batch.positions == 0).cumsum(-1)
    for chosen in (1, 2):
        targets = batch.targets.masked_fill(sample == chosen, -100)
        before = Batch(batch.input_ids, targets, 10, batch.positions)
        other = torch.where(sample == chosen, VOCABULARY - 1 - batch.input_ids % 9, batch.input_ids)
        after = Batch(other, targets, 10, batch.positions)
        assert outcome(plan, CONFIGS[name], before) == outcome(plan, CONFIGS[name], after)


def outcome(plan: Plan, config: PretrainedConfig, batch: Batch) -> tuple[float, float]:
    with open_session(plan, config) as session:
        result = session.executor.step(batch, 0.0)
        return result.loss, result.grad_norm


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_arguments_are_those_that_transformers_makes(name: str, micro_batch: int) -> None:
    """For rows other than the example that the rules were read off."""
    model = packed_model(CONFIGS[name], micro_batch)
    positions = packed_batch(micro_batch, SEQ_LEN, VOCABULARY, seed=5).positions
    assert positions is not None
    ids = torch.zeros_like(positions)
    _, wanted = model.calls._run(ids, position_ids=positions)
    model.pack(0, positions)
    for stage, arguments in zip(model.stages[1:-1], wanted, strict=True):
        same(model.arguments(stage), arguments)


def same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict | list | tuple):
        assert len(ours) == len(theirs)
        for key in ours if isinstance(ours, dict) else range(len(ours)):
            same(ours[key], theirs[key])
    else:
        assert ours == theirs


def chunked_mask(positions: torch.Tensor) -> torch.Tensor:
    """Attention within chunks of 4 positions, counted from a sample's beginning."""
    sample = (positions == 0).cumsum(-1)
    queries, keys = positions[:, None, :, None], positions[:, None, None, :]
    return (queries // 4 == keys // 4) & (keys <= queries) & (sample[:, None, :, None] == sample[:, None, None, :])


def test_a_mask_that_depends_on_the_place_in_the_sample() -> None:
    example, plain = example_positions(2, SEQ_LEN, CPU), torch.arange(SEQ_LEN).expand(2, -1)
    of = PackedArguments([{"mask": chunked_mask(plain)}], [{"mask": chunked_mask(example)}], example)
    buffer, positions = torch.zeros(of.num_bytes, dtype=torch.uint8), packed_batch(2, SEQ_LEN, 9, seed=0).positions
    assert positions is not None
    of.fill(buffer, positions)
    assert torch.equal(of.views(buffer)[0]["mask"], chunked_mask(positions))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_arguments_are_not_saved(name: str) -> None:
    """They stay in their buffer: neither counted among what a forward keeps nor sent to the host with it."""
    model = packed_model(CONFIGS[name])
    buffer = torch.zeros(model.argument_bytes, dtype=torch.uint8)
    model.use_argument_buffers([buffer])
    model.pack(0, example_positions(MICRO_BATCH, SEQ_LEN, CPU))
    stage = model.stages[1]
    form, template = model.block_form(stage, None, keep=True), model.templates[stage.structure]
    template.bind(torch.randn(stage.weight_bytes // 4), stage)
    hidden = torch.randn(model.calls.hidden_shape)
    saved = form.forward(hidden, model.arguments(stage), torch.empty_like(hidden))
    kept = {storage.untyped_storage().data_ptr() for storage in saved.kept.storages}
    assert kept
    assert buffer.untyped_storage().data_ptr() not in kept


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_nothing_in_a_step_depends_on_values(name: str) -> None:
    """On a GPU such an operation would wait for it; fake tensors have no values to ask for."""
    model = packed_model(CONFIGS[name])
    positions = example_positions(MICRO_BATCH, SEQ_LEN, CPU)
    packed = model.calls.packed
    assert packed is not None
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        packed.fill(mode.from_tensor(model._argument_buffers[0]), mode.from_tensor(positions))


def test_buffers_of_arguments_are_in_the_program() -> None:
    model = packed_model(CONFIGS["gemma3"])
    plan = packed_plan(model)
    # A mask for each kind of attention, cosine and sine for each, and the positions.
    assert model.argument_bytes == 2 * 2 * 16 * 16 + 4 * 2 * 16 * 8 * 4 + 2 * 16 * 8
    program = lower(plan, model.stages)
    sizes = {b.id: b.num_bytes for b in program.buffers.values() if b.kind in {"arguments", "batch"}}
    batch_bytes = 3 * 8 * plan.batch_size * SEQ_LEN
    assert sizes == {
        "gpu/arguments/0": model.argument_bytes, "gpu/arguments/1": model.argument_bytes, "gpu/batch": batch_bytes,
        "host/batch": batch_bytes,
    }  # fmt: skip
    for op in program.ops.values():
        if op.stage is not None and op.stage.startswith("block.") and op.kind in {"forward", "backward"}:
            assert f"gpu/arguments/{op.micro_batch}" in op.reads
    assert "gpu/arguments/1" in program.ops["forward/embed/1"].writes


def test_addresses_of_freed_arguments_are_forgotten() -> None:
    model = packed_model(CONFIGS["llama"])
    template = next(iter(model.templates.values()))
    before = set(template.constants)
    example, ours = model._argument_buffers[0], torch.zeros(model.argument_bytes, dtype=torch.uint8)
    model.use_argument_buffers([ours])
    assert template.constants ^ before == {example.untyped_storage().data_ptr(), ours.untyped_storage().data_ptr()}


def test_what_cannot_be_packed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="a row of 1 token holds one sample at most"):
        Model(CONFIGS["llama"], "float32", CPU, micro_batch=1, seq_len=1, packing=True)
    run = architecture.Calls._run
    for changed, message in (
        ({}, "makes nothing of position_ids"),
        ({"position_ids": torch.arange(SEQ_LEN)[None] * 2}, "is not what packed samples need"),
    ):

        def ignore(calls: Any, ids: torch.Tensor, changed: Any = changed, **_: Any) -> Any:
            return run(calls, ids, **(changed if _ else {}))

        monkeypatch.setattr(architecture.Calls, "_run", ignore)
        with pytest.raises(UsageError, match=message):
            packed_model(CONFIGS["llama"])


def test_a_plan_and_its_batches_agree_on_packing() -> None:
    model = packed_model(LlamaConfig(**SMALL))
    plan = packed_plan(model)
    with pytest.raises(ValidationError, match="packing is true and argument_bytes 0"):
        Plan.model_validate(plan.model_dump() | {"argument_bytes": 0})
    with pytest.raises(UsageError, match=r"plan: argument_bytes: 7, packed rows take \d+ here; profile with --packing"):
        open_session(plan.model_copy(update={"argument_bytes": 7}), CONFIGS["llama"])
    with (
        open_session(plan, CONFIGS["llama"]) as session,
        pytest.raises(UsageError, match="positions: missing, the plan packs"),
    ):
        session.executor.step(uneven_batch(plan.batch_size, SEQ_LEN, VOCABULARY, seed=0), 0.0)
    flat = plan.model_copy(update={"packing": False, "argument_bytes": 0})
    with (
        open_session(flat, CONFIGS["llama"]) as session,
        pytest.raises(UsageError, match="positions: given, the plan does not pack"),
    ):
        session.executor.step(packed_batch(plan.batch_size, SEQ_LEN, VOCABULARY, seed=0), 0.0)
