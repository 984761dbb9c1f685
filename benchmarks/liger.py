"""Liger kernels beside our compiled graphs: one block of a 7B Qwen2 shape, and the loss of its vocabulary.

    python benchmarks/liger.py
    python benchmarks/liger.py --device cpu --smoke

Parity first: the relative error of output and gradients against the model's own code in fp32, beside that of the
model's own code in bf16. Then the time of forward and backward, everything kept: the model's own code, the same with
Liger's RMSNorm, SwiGLU and rotary embedding, and our compiled graph. For the loss, final norm included: Liger's fused
linear cross entropy with an fp32 sum, and our compiled chunks, which add to an fp32 accumulator. Liger has no kernels
for a CPU: there its figures are null.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rows import make_row, save_rows
from step import SHAPES
from transformers import Qwen2Config

from lazysched.profiles.attention import fastest_attention
from lazysched.profiles.clock import durations_of
from lazysched.profiles.random_data import random_normal, random_tokens, random_weights
from lazysched.runtime.ends import Gradients
from lazysched.runtime.flat import flat_views
from lazysched.runtime.machine import hardware_id
from lazysched.runtime.model import Model
from lazysched.schemas import Dtype, Stage

Tensors = list[torch.Tensor]
Figures = dict[tuple[str, str], tuple[float | None, str]]
"""(case, metric) -> value and unit."""
CONTESTANTS = ("plain", "compiled", "liger")
HEAT_S, TIMED_S = 0.5, 1.0
CHUNK_TOKENS = 4096


class Contestant:
    """One way to compute: a model, its block's weights, and what block and loss give.

    Args:
        model: built for the benchmark's rows.
        weights: of block and head, fp32, one tensor a parameter.
        compiled: whether block and loss run as compiled graphs.
    """

    def __init__(self, model: Model, weights: Sequence[Tensors], compiled: bool) -> None:
        self.model, self.block, self.head = model, model.stages[1], model.stages[-1]
        self.block_weights, self.head_weights = (
            self._store(stage, each) for stage, each in zip((self.block, self.head), weights, strict=True)
        )
        self.form = model.block_form(self.block, 1.0 if compiled else None, True)
        if compiled:
            model.compile_loss(CHUNK_TOKENS)
        model.ends.bind_head(self.head_weights, self.head)

    def run_block(self, hidden: torch.Tensor, output_grad: torch.Tensor) -> Tensors:
        """Output, gradient of the input, gradients of the weights."""
        self.model.templates[self.block.structure].bind(self.block_weights, self.block)
        targets = self._targets(self.block, self.model.dtype)
        output, hidden_grad = torch.empty_like(hidden), torch.empty_like(hidden)
        arguments = self.model.arguments(self.block)
        saved = self.form.forward(hidden, arguments, output)
        self.form.backward(saved, arguments, output_grad, hidden_grad, targets, first=True)
        return [output, hidden_grad, *targets]

    def run_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> Tensors:
        """Loss, gradient of the hidden states, gradients of final norm and output embedding."""
        targets = self._targets(self.head, torch.float32)
        num_norm = len(self.model.ends.norm_params)
        sums = Gradients(targets[:num_norm], targets[num_norm:], fresh=True)
        return [*self.model.ends.loss_and_gradient(hidden, labels, 1.0 / labels.numel(), CHUNK_TOKENS, sums), *targets]

    def run_liger_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> Tensors:
        """The same with Liger's fused linear cross entropy."""
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss_of = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)
        leaf, params = hidden.detach().requires_grad_(), self.model.ends.head_params
        normed = self.model.ends.architecture.norm(leaf).flatten(0, 1)
        loss = loss_of(params[-1], normed, labels.flatten()) / labels.numel()
        return [loss.detach(), *torch.autograd.grad([loss], [leaf, *params])]

    def _views(self, flat: torch.Tensor, stage: Stage) -> Tensors:
        return list(flat_views(flat, stage, self.model.dtype.itemsize).values())

    def _targets(self, stage: Stage, dtype: torch.dtype) -> Tensors:
        num_elements = stage.weight_bytes // self.model.dtype.itemsize
        return self._views(torch.empty(num_elements, dtype=dtype, device=self.model.device), stage)

    def _store(self, stage: Stage, weights: Tensors) -> torch.Tensor:
        num_elements = stage.weight_bytes // self.model.dtype.itemsize
        flat = torch.zeros(num_elements, dtype=self.model.dtype, device=self.model.device)
        torch._foreach_copy_(self._views(flat, stage), weights)
        return flat


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, nothing is saved")
    parser.add_argument("--results", type=Path, default=None, help="folder of liger.json")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and find_spec("liger_kernel") is None:
        sys.exit("error: liger-kernel is not installed; pip install liger-kernel")
    figures = measure(device, *(("smoke", 2, 32) if arguments.smoke else ("7b", 8, 1024)))
    table = Table("case", "metric", "value", "unit", title=f"on {hardware_id(device)}")
    rows = []
    for (case, metric), (value, unit) in figures.items():
        table.add_row(case, metric, "not measured" if value is None else f"{value:.4g}", unit)
        rows.append(make_row(case, metric, value, unit, hardware_id(device), "python benchmarks/liger.py"))
    Console(width=110).print(table)
    if not arguments.smoke:
        for row in rows:
            row["versions"] |= {"liger_kernel": version("liger_kernel")} if device.type == "cuda" else {}  # type: ignore[operator]
        print("wrote", save_rows("liger", rows, **({"folder": arguments.results} if arguments.results else {})))


def measure(device: torch.device, shape: str, rows: int, seq_len: int) -> Figures:
    """Errors and times of block and loss."""
    config = Qwen2Config(**SHAPES[shape] | {"num_hidden_layers": 1, "tie_word_embeddings": False})

    def build(dtype: Dtype) -> Model:
        return Model(config, dtype, device, micro_batch=rows, seq_len=seq_len)

    model = build("float32")
    weights = [_rounded(stage, device) for stage in (model.stages[1], model.stages[-1])]
    hidden, output_grad = (random_normal((rows, seq_len, config.hidden_size), torch.bfloat16, device) for _ in range(2))
    labels = random_tokens((rows, seq_len), config.vocab_size, device)
    exact = Contestant(model, weights, compiled=False)
    expected = {
        "block": exact.run_block(hidden.float(), output_grad.float()), "loss": exact.run_loss(hidden.float(), labels)
    }  # fmt: skip
    del exact, model
    backend = fastest_attention(build("bfloat16")).backend
    figures: Figures = {}
    for name in CONTESTANTS[: 3 if device.type == "cuda" else 2]:
        if name == "liger":  # last: it changes the functions that the model's own code calls
            from liger_kernel.transformers import apply_liger_kernel_to_qwen2

            apply_liger_kernel_to_qwen2(fused_linear_cross_entropy=False)
        model = build("bfloat16")
        model.use_attention(backend)
        contestant = Contestant(model, weights, compiled=name == "compiled")
        run_loss = contestant.run_liger_loss if name == "liger" else contestant.run_loss
        works = {"block": partial(contestant.run_block, hidden, output_grad), "loss": partial(run_loss, hidden, labels)}
        for case, work in works.items():
            for part, error in relative_errors(work(), expected[case]).items():
                figures[case, f"{name}_{part}_error"] = (error, "1")
            figures[case, f"{name}_s"] = (seconds(work, device), "s")
    for case in expected:
        liger_s = figures.get((case, "liger_s"), (None, ""))[0]
        for name in CONTESTANTS[:2]:
            other_s = figures[case, f"{name}_s"][0]
            ratio = liger_s / other_s if liger_s is not None and other_s is not None else None
            figures[case, f"liger_over_{name}"] = (ratio, "1")
    return figures


def relative_errors(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Norm of the difference over the norm: of the output, of the input's gradient, of all weights' gradients."""
    parts = {"output": slice(0, 1), "input_gradient": slice(1, 2), "weight_gradient": slice(2, None)}
    return {
        part: _norm([a.double() - b.double() for a, b in zip(found[where], expected[where], strict=True)])
        / _norm(expected[where])
        for part, where in parts.items()
    }


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of repeats, after a while of the same work: a rested GPU is faster than it stays."""
    durations_of(work, device, None, HEAT_S)
    return statistics.median(durations_of(work, device, None, TIMED_S))


def _rounded(stage: Stage, device: torch.device) -> Tensors:
    """Random weights of ``stage`` that bf16 holds exactly, one fp32 tensor a parameter."""
    flat = random_weights(stage, torch.float32, device).bfloat16().float()
    return list(flat_views(flat, stage, flat.element_size()).values())


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())


if __name__ == "__main__":
    main()
