"""How fast the 8-bit update is, beside torch, bitsandbytes, torchao and the memory's own limit.

    python benchmarks/optimizer.py --case 1g_16threads
    python benchmarks/optimizer.py --case 2threads
    python benchmarks/optimizer.py --case gpu_1g
    python benchmarks/optimizer.py --case 7b

All figures of a case come from one run: rounds in which each contestant steps once, medians over the rounds. The limit
is a stream in place that reads 7 and writes 5 bytes a parameter, as the update does. bitsandbytes and torchao step over
fewer parameters, because they are slow; where one is not installed its figure is null.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rows import make_row, save_rows

from lazysched.optimizer_state import FP32_STATE_ELEMENTS, hybrid8_layout
from lazysched.runtime.architecture import Architecture
from lazysched.runtime.hybrid8 import BlockState, coefficients, num_blocks
from lazysched.runtime.hybrid8_backends import prepare
from lazysched.runtime.machine import hardware_id

BF16_BYTES = 2
FIXED = {"learning_rate": 1e-5, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}
Figures = dict[str, tuple[float | None, str]]


@dataclass(frozen=True)
class Case:
    """One measurement; ``slow_params`` are for bitsandbytes and torchao."""

    name: str
    device: str
    params: int
    threads: int
    slow_params: int
    rounds: int


CASES = {
    case.name: case
    for case in (
        Case("1g_16threads", "cpu", 10**9, 16, 1 << 25, 11),
        Case("2threads", "cpu", 1 << 27, 2, 1 << 23, 15),
        Case("gpu_1g", "cuda", 10**9, 0, 0, 21),
        Case("smoke", "cpu", 1 << 20, 1, 1 << 16, 3),
    )
}
SHAPE_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


def main() -> None:
    """Run one case, print it and save its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "7b"], default="2threads")
    parser.add_argument("--results", type=Path, default=None, help="folder of optimizer.json")
    arguments = parser.parse_args()
    device = torch.device("cuda" if arguments.case == "gpu_1g" else "cpu")
    figures = bytes_of_7b() if arguments.case == "7b" else measure(CASES[arguments.case])
    command = f"python benchmarks/optimizer.py --case {arguments.case}"
    rows = [
        make_row(arguments.case, metric, value, unit, hardware_id(device), command)
        for metric, (value, unit) in figures.items()
    ]
    table = Table("metric", "value", "unit", title=f"{arguments.case} on {hardware_id(device)}")
    for metric, (value, unit) in figures.items():
        table.add_row(metric, "not measured" if value is None else f"{value:.4g}", unit)
    Console(width=110).print(table)
    if arguments.case != "smoke":
        print("wrote", save_rows("optimizer", rows, **({"folder": arguments.results} if arguments.results else {})))


def measure(case: Case) -> Figures:
    """Parameters per second of every contestant, and their ratios."""
    if case.device == "cpu":
        torch.set_num_threads(case.threads)
    state = random_state(case.params, case.device)
    update = prepare([state], threads=case.threads or None)
    plain, clipped = (step_coefficients(factor, case.device) for factor in (1.0, 0.5))
    contestants = {
        "hybrid8": lambda: update.update(plain),
        "hybrid8_clipped": lambda: update.update(clipped),
        "torch_fused_fp32": torch_step(case.params, case.device),
        "stream_limit": stream(state),
    }
    timed = timed_on_gpu if case.device == "cuda" else timed_on_cpu
    seconds = rounds(contestants, case.rounds, timed)
    rates: dict[str, float | None] = {name: case.params / s for name, s in seconds.items()}
    for name, make in (("bitsandbytes_8bit", bitsandbytes_step), ("torchao_8bit", torchao_step)):
        step = make(case.slow_params) if case.slow_params else None
        rates[name] = None if step is None else case.slow_params / rounds({name: step}, 3, timed)[name]
    figures: Figures = {f"{name}_params_per_s": (rate, "1/s") for name, rate in rates.items()}
    ratios = {"torch_fused_fp32": "speedup_vs_torch_fused_fp32", "bitsandbytes_8bit": "speedup_vs_bitsandbytes_8bit",
              "torchao_8bit": "speedup_vs_torchao_8bit", "stream_limit": "share_of_stream_limit"}  # fmt: skip
    for name, metric in ratios.items():
        figures[metric] = (None if rates[name] is None else case.params / seconds["hybrid8"] / rates[name], "1")
    figures["clipped_over_unclipped"] = (seconds["hybrid8_clipped"] / seconds["hybrid8"], "1")
    return figures


def rounds(contestants: dict[str, Callable[[], object]], count: int, timed: Callable[..., float]) -> dict[str, float]:
    """Median seconds of each contestant over rounds in which each steps once; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(count + 1):
        for name, step in contestants.items():
            duration_s = timed(step)
            if index:
                seconds[name].append(duration_s)
    return {name: statistics.median(times) for name, times in seconds.items()}


def timed_on_cpu(step: Callable[[], object]) -> float:
    """Seconds of one call."""
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s


def timed_on_gpu(step: Callable[[], object]) -> float:
    """Seconds of one call on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def random_state(params: int, device: str) -> BlockState:
    """Weights, gradients and moments of the sizes that training has, far more than caches hold."""
    generator = torch.Generator(device).manual_seed(0)
    piece = 1 << 20
    repeats = -(-params // piece)

    def filled(scale: float) -> torch.Tensor:
        values = (torch.randn(piece, generator=generator, device=device) * scale).bfloat16()
        return values.repeat(repeats)[:params].clone()

    def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    return BlockState(
        weight=filled(0.02), grad=filled(1e-3), correction=zeros(params, torch.int8), first=zeros(params, torch.int8),
        second=zeros(params, torch.uint8), first_scale=zeros(num_blocks(params), torch.float32),
        second_scale=zeros(num_blocks(params), torch.float32), stream=1, decays=True,
    )  # fmt: skip


def step_coefficients(factor: float, device: str) -> torch.Tensor:
    """Numbers of the tenth step, gradients multiplied by ``factor``."""
    return coefficients(*(torch.tensor(value, device=device) for value in (factor, 0.0, 10.0)), **FIXED)


def torch_step(params: int, device: str) -> Callable[[], object]:
    """torch.optim.AdamW(fused=True) in fp32, as people use it."""
    param = torch.nn.Parameter(torch.full((params,), 0.02, device=device))
    param.grad = torch.full((params,), 1e-3, device=device)
    return torch.optim.AdamW([param], lr=1e-5, fused=True).step


def bitsandbytes_step(params: int) -> Callable[[], object] | None:
    """AdamW8bit of bitsandbytes on the CPU; None where it is not installed."""
    if find_spec("bitsandbytes") is None:
        return None
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit([_matrix(params)], lr=1e-5).step


def torchao_step(params: int) -> Callable[[], object] | None:
    """AdamW8bit of torchao on the CPU; None where it is not installed."""
    if find_spec("torchao") is None:
        return None
    from torchao.optim import AdamW8bit

    return AdamW8bit([_matrix(params)], lr=1e-5).step


def _matrix(params: int) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.full((params // 4096, 4096), 0.02))
    param.grad = torch.full_like(param, 1e-3)
    return param


def stream(state: BlockState) -> Callable[[], object]:
    """Reads 7 and writes 5 bytes a parameter in place."""
    params = state.weight.numel()
    if state.weight.is_cuda:
        from gpu_stream import stream_step

        return stream_step(params)
    changed, read = torch.zeros(5 * params // 8, dtype=torch.int64), torch.zeros(2 * params // 8, dtype=torch.int64)
    return lambda: (changed.bitwise_not_(), read.sum())


def bytes_of_7b() -> Figures:
    """Bytes per parameter of a 7B shape, weights and gradients included, from the layout that the runtime allocates."""
    from transformers import Qwen2Config

    stages = Architecture(Qwen2Config(**SHAPE_7B)).stages("bfloat16")
    num_bytes = sum(
        2 * stage.weight_bytes + hybrid8_layout(stage, BF16_BYTES, FP32_STATE_ELEMENTS)[1] for stage in stages
    )
    params = sum(stage.num_params for stage in stages)
    return {"bytes_per_parameter": (num_bytes / params, "bytes"), "parameters": (float(params), "1")}


if __name__ == "__main__":
    main()
