"""One block template: kept graphs survive a move of the weights, and leave no memory behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from lazysched.runtime.blocks import BlockTemplate, EagerForm
from lazysched.runtime.flat import flat_views
from lazysched.runtime.model import Model
from lazysched.schemas import Stage
from tests.runtime.tiny import CPU, SEQ_LEN, llama


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(llama(tied=False), "float32", CPU, micro_batch=2, seq_len=SEQ_LEN)


def parts(model: Model) -> tuple[BlockTemplate, Stage, torch.Tensor, torch.Tensor]:
    stage = model.stages[1]
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(stage.weight_bytes // 4, generator=generator) * 0.1
    hidden = torch.randn(2, SEQ_LEN, 32, generator=generator)
    return model.templates[stage.structure], stage, weights, hidden


def test_the_backward_of_a_kept_graph_reads_the_weights_where_they_are_then(model: Model) -> None:
    template, stage, weights, hidden = parts(model)
    form = EagerForm(template, keep=True)
    arguments, output_grad = model.arguments(stage), torch.ones_like(hidden)
    template.bind(weights, stage)
    expected_grad, hidden_grad = torch.empty_like(hidden), torch.empty_like(hidden)
    recomputed = EagerForm(template, keep=False).forward(hidden, arguments, torch.empty_like(hidden))
    expected = torch.full_like(weights, float("nan"))
    targets = list(flat_views(expected, stage, 4).values())
    EagerForm(template, keep=False).backward(recomputed, arguments, output_grad, expected_grad, targets, first=True)
    slot = weights.clone()
    template.bind(slot, stage)
    saved = form.forward(hidden, arguments, torch.empty_like(hidden))
    slot.fill_(float("nan"))  # another block's weights came in
    template.bind(weights.clone(), stage)
    found = [torch.full_like(view, float("nan")) for view in targets]
    form.backward(saved, arguments, output_grad, hidden_grad, found, first=True)
    assert torch.equal(hidden_grad, expected_grad)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, targets, strict=True))


def test_a_dropped_input_takes_its_memory_with_it(model: Model) -> None:
    template, stage, weights, hidden = parts(model)
    form = EagerForm(template, keep=True)
    template.bind(weights, stage)
    saved = form.forward(hidden, model.arguments(stage), torch.empty_like(hidden))
    storage = weakref.ref(hidden.untyped_storage())
    again = hidden.clone()
    saved.drop_input()
    del hidden
    assert storage() is None
    saved.kept.input = again
    hidden_grad = torch.full_like(again, torch.nan)
    targets = [torch.empty_like(view) for view in template.views]
    form.backward(saved, model.arguments(stage), torch.ones_like(again), hidden_grad, targets, first=True)
    assert hidden_grad.isfinite().all()


def test_a_forward_without_its_backward_is_freed_without_the_garbage_collector(model: Model) -> None:
    """Autograd holds the hooks; a way from them back to the graph would be a cycle that nobody can collect."""
    template, stage, weights, hidden = parts(model)
    form = EagerForm(template, keep=True)
    template.bind(weights, stage)
    gc.disable()
    try:
        saved = form.forward(hidden, model.arguments(stage), torch.empty_like(hidden))
        kept = [weakref.ref(storage) for storage in saved.kept.storages]
        assert kept
        del saved
        assert all(reference() is None for reference in kept)
    finally:
        gc.enable()
