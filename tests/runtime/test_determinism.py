"""With full determinism the backward of attention adds in one order; torch's flag for it is set there alone."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from lazysched.profiles.attention import fastest_attention
from lazysched.profiles.random_data import random_normal, random_weights
from lazysched.runtime.attention import ANY_ORDER, attention, in_one_order
from lazysched.runtime.blocks import BlockForm, EagerForm
from lazysched.runtime.compiled import CompiledForm
from lazysched.runtime.model import Model

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SEQ_LEN, ROWS = 1024, 4


def flags() -> tuple[bool, bool, bool]:
    settings: Any = torch.utils.deterministic
    return (
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.fill_uninitialized_memory,
    )  # fmt: skip


@pytest.mark.parametrize("before", [(False, False), (True, True)])
def test_torchs_flag_is_set_inside_alone(before: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        outside = flags()
        with in_one_order(True):
            assert flags() == (True, False, False)
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert flags() == outside
        with pytest.raises(KeyError), in_one_order(True):
            raise KeyError
        assert flags() == outside
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_set_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    outside = flags()
    with in_one_order(False):
        assert flags() == outside
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(("found", "inside"), [(":16:8", ":16:8"), (":0:0", ":4096:8")])
def test_workspaces_that_keep_an_order_are_left(monkeypatch: pytest.MonkeyPatch, found: str, inside: str) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", found)
    with in_one_order(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == inside


def block(full_determinism: bool, device: str) -> Model:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=64,
    )  # fmt: skip
    return Model(
        config, "bfloat16", torch.device(device), micro_batch=ROWS, seq_len=SEQ_LEN, full_determinism=full_determinism,
        attention_backend="default" if device == "cpu" else "flash",
    )  # fmt: skip


def test_a_cpu_needs_none_of_it() -> None:
    assert not block(True, "cpu").full_determinism


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_forms_keep_to_it_in_their_backward_alone(
    compiled: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    model, seen = block(False, "cpu"), dict[str, bool]()
    stage = model.stages[1]
    template = model.templates[stage.structure]
    template.full_determinism = wanted  # as on a GPU
    template.bind(random_weights(stage, model.dtype, model.device), stage)

    def note(phase: str, result: Any) -> Any:
        seen[phase] = torch.are_deterministic_algorithms_enabled()
        return result

    hidden = torch.zeros(model.calls.hidden_shape, dtype=model.dtype)
    form: BlockForm
    if compiled:
        graph: Any = SimpleNamespace(
            forward=lambda tensors: note("forward", []), backward=lambda tensors: note("backward", []), straight=()
        )
        form = CompiledForm(template, graph)
    else:
        form, gradient_of, run = EagerForm(template, keep=True), torch.autograd.grad, template.run
        monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: note("backward", gradient_of(*a, **k)))
        monkeypatch.setattr(template, "run", lambda *a: note("forward", run(*a)))
    saved = form.forward(hidden, model.arguments(stage), hidden)
    targets = [] if compiled else [torch.empty_like(view) for view in template.views]
    form.backward(saved, model.arguments(stage), hidden, torch.empty_like(hidden), targets, first=True)
    assert seen == {"forward": False, "backward": wanted}


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")  # the first product of autograd's thread
@pytest.mark.parametrize("budget", [pytest.param(budget, marks=ON_GPU) for budget in (None, 1.0, 0.0)])
def test_backwards_have_the_same_bits_whenever_they_run(budget: float | None) -> None:
    model = block(True, "cuda")
    stage = model.stages[1]
    template, form, arguments = (
        model.templates[stage.structure],
        model.block_form(stage, budget, True),
        model.arguments(stage),
    )
    template.bind(random_weights(stage, model.dtype, model.device), stage)
    hidden, output_grad = (random_normal(model.calls.hidden_shape, model.dtype, model.device) for _ in range(2))

    def gradients() -> list[torch.Tensor]:
        output, input_grad = torch.empty_like(hidden), torch.empty_like(hidden)
        targets = [torch.empty_like(view) for view in template.views]
        saved = form.forward(hidden, arguments, output)
        form.backward(saved, arguments, output_grad, input_grad, targets, first=True)
        return [input_grad, *targets]

    first = gradients()
    for _ in range(10):
        assert all(torch.equal(one, other) for one, other in zip(first, gradients(), strict=True))


@pytest.mark.parametrize("backend", [pytest.param("default", marks=ON_GPU)])
def test_kernels_that_add_in_any_order_are_left_out(backend: Any) -> None:
    model = block(True, "cuda")
    assert fastest_attention(model).backend not in ANY_ORDER
    assert all(name not in fastest_attention(model).note for name in ANY_ORDER)
    query = torch.zeros(2, 4, 128, 64, dtype=torch.bfloat16, device="cuda")
    with attention(backend, full_determinism=True):
        chosen = torch.nn.attention.SDPBackend(torch.ops.aten._fused_sdp_choice(query, query, query))  # type: ignore[call-arg]
        assert chosen.name != "CUDNN_ATTENTION"
    with attention("cudnn", full_determinism=True, only=True), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(query, query, query)
