"""Weight gradients that go straight where they are summed: which do, with the same bits, whatever lay there before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PretrainedConfig, Qwen2Config

from lazysched.runtime import graphs, straight
from lazysched.runtime.ends import Gradients
from lazysched.runtime.flat import flat_views
from lazysched.runtime.graphs import JointGraph
from lazysched.runtime.model import Model
from lazysched.runtime.straight import FIRST, LATER, mm_into, put_straight, sums_in_place
from lazysched.schemas import Dtype, Stage
from tests.runtime.tiny import CPU, SEQ_LEN, llama

ROWS, NUM_MICRO_BATCHES = 2, 3
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def qwen2() -> PretrainedConfig:
    """With biases, whose gradients are sums."""
    return Qwen2Config(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        vocab_size=97, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def block_of(config: PretrainedConfig, dtype: Dtype) -> tuple[Model, Stage]:
    model = Model(config, dtype, CPU, micro_batch=ROWS, seq_len=SEQ_LEN)
    return model, model.stages[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [llama(tied=False), qwen2()], ids=["llama", "qwen2"])
def test_matrices_go_straight_and_the_rest_is_returned(config: PretrainedConfig, dtype: Dtype) -> None:
    model, stage = block_of(config, dtype)
    joint = model.joint_graph(stage)
    for budget in (1.0, 0.0):
        assert joint.split(budget)[2] == tuple(
            index for index, shape in enumerate(stage.params.values()) if len(shape) == 2
        )
        returned = [tuple(grad.shape) for grad in joint.returned(budget)]
        assert returned == [shape for shape in stage.params.values() if len(shape) != 2]


def sums(dtype: Dtype, sum_dtype: torch.dtype, budget: float | None) -> list[torch.Tensor]:
    """Input gradients and the summed weight gradients of some micro-batches of one block."""
    model, stage = block_of(qwen2(), dtype)
    generator = torch.Generator().manual_seed(0)
    num_elements = stage.weight_bytes // model.dtype.itemsize
    weights = (torch.randn(num_elements, generator=generator) * 0.2).to(model.dtype)
    model.templates[stage.structure].bind(weights, stage)
    form, arguments = model.block_form(stage, budget, keep=budget != 0.0), model.arguments(stage)
    poisoned = torch.full((num_elements,), float("nan"), dtype=sum_dtype)
    targets = list(flat_views(poisoned, stage, model.dtype.itemsize).values())
    found = []
    for m in range(NUM_MICRO_BATCHES):
        hidden = torch.randn(model.calls.hidden_shape, generator=generator).to(model.dtype)
        output_grad = torch.randn(model.calls.hidden_shape, generator=generator).to(model.dtype)
        saved = form.forward(hidden, arguments, torch.empty_like(hidden))
        found.append(torch.empty_like(hidden))
        form.backward(saved, arguments, output_grad, found[-1], targets, first=m == 0)
    return [*found, *targets]


@pytest.mark.parametrize(
    ("dtype", "sum_dtype"),
    [("float32", torch.float32), ("bfloat16", torch.float32), ("bfloat16", torch.bfloat16)],
)
@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_straight_and_returned_gradients_have_the_same_bits(
    dtype: Dtype, sum_dtype: torch.dtype, budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "compile_graph", graphs.interpret_graph)
    written = sums(dtype, sum_dtype, budget)
    monkeypatch.setattr(graphs, "put_straight", lambda backward, num_params, skip: ())
    returned = sums(dtype, sum_dtype, budget)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(written, returned, strict=True))


def loss_sums(dtype: Dtype) -> list[torch.Tensor]:
    """Loss, gradient of the hidden states and the weights' sums over chunks of 12, 12 and 8 tokens."""
    model = Model(llama(tied=False), dtype, CPU, micro_batch=ROWS, seq_len=SEQ_LEN)
    head, generator = model.stages[-1], torch.Generator().manual_seed(0)
    num_elements = head.weight_bytes // model.dtype.itemsize
    model.ends.bind_head((torch.randn(num_elements, generator=generator) * 0.2).to(model.dtype), head)
    model.compile_loss(12)
    hidden = torch.randn(model.calls.hidden_shape, generator=generator).to(model.dtype)
    labels = torch.randint(97, hidden.shape[:-1], generator=generator)
    poisoned = torch.full((num_elements,), float("nan"))
    norm, *output = flat_views(poisoned, head, model.dtype.itemsize).values()
    found = model.ends.loss_and_gradient(hidden, labels, 0.1, 12, Gradients([norm], output, fresh=True))
    return [*found, norm, *output]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_output_embeddings_gradient_goes_straight_too(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "compile_graph", graphs.interpret_graph)
    found: list[tuple[int, ...]] = []

    def noted(*arguments: Any, **options: Any) -> tuple[int, ...]:
        found.append(put_straight(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(graphs, "put_straight", noted)
    written = loss_sums(dtype)
    assert found == [(0,), (0,)]  # for chunks of two sizes
    monkeypatch.setattr(graphs, "put_straight", lambda *_, **__: ())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(written, loss_sums(dtype), strict=True))


class Mlp(nn.Module):
    """Two matrices; the first may serve twice."""

    def __init__(self, width: int, *, twice: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.twice = twice

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.first(hidden))
        result: torch.Tensor = hidden + self.second(self.first(inner) if self.twice else inner)
        return result


def joint_of(module: nn.Module, width: int, dtype: torch.dtype = torch.float32) -> JointGraph:
    shapes = [tuple(param.shape) for param in module.parameters()]
    return JointGraph(module, shapes, (ROWS, SEQ_LEN, width), {}, dtype, CPU)


def test_a_matrix_that_is_used_twice_is_returned() -> None:
    assert joint_of(Mlp(8, twice=False), 8).split(0.0)[2] == (0, 1)
    assert joint_of(Mlp(8, twice=True), 8).split(0.0)[2] == (1,)


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def test_a_gradient_with_another_user_or_place_is_returned() -> None:
    left, right = torch.randn(3, 5), torch.randn(5, 4)
    for function in (
        lambda a, b: (a, *[a @ b] * 2),
        lambda a, b: (a, product := a @ b, product * 2),
        lambda a, b: (a, (product := a @ b), product.t()),
        lambda a, b: (a, (a @ b).view(4, 3), (a @ b) + 1),
    ):
        graph = traced(function, left, right)
        assert put_straight(graph, num_params=2) == ()
        assert all(torch.equal(x, y) for x, y in zip(graph(left, right), function(left, right), strict=True))


@pytest.mark.parametrize(("first", "expected"), [(FIRST, 0.0), (LATER, 1.0)])
def test_transposed_products_are_made_the_other_way_round(first: torch.Tensor, expected: float) -> None:
    left, right = (torch.randint(-4, 5, shape).float() for shape in ((3, 5), (5, 4)))  # whole numbers: exact

    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a, (a @ b).permute(1, 0), b, (a @ b).permute(1, 0).permute(1, 0), (a @ b).view(3, 4)

    graph = traced(function, left, right)
    assert put_straight(graph, num_params=4) == (0, 2, 3)
    targets = [torch.ones(4, 3), torch.ones(3, 4), torch.ones(3, 4)]
    results = graph(left, right, *targets, first)
    assert [result is None for result in results] == [False, True, False, True, True]
    product = left @ right + expected
    assert all(torch.equal(x, y) for x, y in zip(targets, (product.t(), product, product), strict=True))


def test_compiled_for_real() -> None:
    """Inductor keeps the operator, with its operands transposed or not, in one graph for all dtypes of the target."""
    width, module = 16, Mlp(16, twice=False).bfloat16()
    graph = joint_of(module, width, torch.bfloat16).compile(0.0)
    assert graph.straight == (0, 1)
    params = [param.detach() for param in module.parameters()]
    hidden, output_grad = (torch.randn(ROWS, SEQ_LEN, width).bfloat16() for _ in range(2))
    leaf = hidden.clone().requires_grad_()
    expected = torch.autograd.grad(module(leaf), [leaf, *module.parameters()], output_grad)
    for dtype in (torch.bfloat16, torch.float32):
        targets = [torch.full_like(param, float("nan"), dtype=dtype) for param in params[:2]]
        for count in (1, 2):
            hidden_grad = torch.full_like(hidden, torch.nan)
            kept = graph.forward([hidden, *params, torch.empty_like(hidden)])
            first = FIRST if count == 1 else LATER
            found = graph.backward([*kept, output_grad, hidden_grad, *targets, first])
            assert [grad is None for grad in found] == [True, True, False]
            for ours, theirs in zip([hidden_grad, *targets, found[2]], expected, strict=True):
                factor = count if any(ours is target for target in targets) else 1
                # bf16 rounds each step of the chain anew: some units of its 8 bits, beside the largest value.
                torch.testing.assert_close(
                    ours.float(), factor * theirs.float(), rtol=0, atol=4 * 2.0**-8 * factor * float(theirs.abs().max())
                )


def test_a_gpu_that_cannot_sum_in_place_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not sums_in_place(CPU)
    assert not straight._sums_bf16_in_fp32(CPU)  # these kernels exist on GPUs only: trying them is no error
    monkeypatch.setattr(straight, "_sums_bf16_in_fp32", lambda device: False)
    with pytest.warns(RuntimeWarning, match="cannot add bf16 matrix products to fp32 sums"):
        assert not sums_in_place.__wrapped__(torch.device("cuda"))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_bf16_products_are_summed_in_fp32_in_place(transposed: bool) -> None:
    device = torch.device("cuda")
    assert sums_in_place(device)
    rows, inner, columns = 1024, 512, 2048
    generator = torch.Generator(device).manual_seed(0)
    left = torch.rand(rows, inner, generator=generator, device=device).bfloat16()
    right = torch.rand(inner, columns, generator=generator, device=device).bfloat16()
    if transposed:
        left, right = left.t().contiguous().t(), right.t().contiguous().t()
    target = torch.full((rows, columns), float("nan"), device=device)
    mm_into(target, left, right, FIRST)  # takes the library's workspace
    before = target.double()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated_bytes = torch.cuda.memory_allocated()
    mm_into(target, left, right, LATER)
    # A gradient of its own would take 2 bytes an element.
    assert torch.cuda.max_memory_allocated() - allocated_bytes < 2 * target.numel()
    product = left.double() @ right.double()
    # Products of bf16 are exact in fp32. All is positive, so that rounding each of the sums by at most two units makes
    # this relative error; rounding a product to bf16 would make one of 2^-9.
    limit = (inner + 1) * 2.0**-22
    assert limit < 2.0**-9 / 8
    assert ((before - product).abs() <= limit * product).all()
    assert ((target.double() - 2 * product).abs() <= limit * 2 * product).all()


@pytest.mark.gpu
@needs_gpu
def test_bf16_targets_are_written_in_place_on_a_gpu() -> None:
    left, right = torch.ones(256, 64, device="cuda").bfloat16(), torch.ones(64, 512, device="cuda").bfloat16()
    target = torch.full((256, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    mm_into(target, left, right, FIRST)
    assert (target == 64).all()
