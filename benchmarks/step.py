"""One training step of a model shape under a memory budget: profile, solve, train on random tokens, compare.

    python benchmarks/step.py --case 3b_32x1k_20gb
    python benchmarks/step.py --device cpu --smoke

One case per process. Weights and tokens are random; update and exact clipping are in the step. Medians of the steps
after warm-up. Model TFLOP/s = (6 * parameters * tokens + 3 * blocks * 2 * tokens * seq * hidden) / time: recomputation
is not counted, the head is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rows import make_row, save_rows

from lazysched.chrome_trace import save_chrome_trace
from lazysched.lower import lower
from lazysched.profiles.measure import profile
from lazysched.runtime import machine
from lazysched.runtime.batch import Batch
from lazysched.runtime.engines import seconds_between
from lazysched.runtime.recorder import Recorder
from lazysched.runtime.session import Session
from lazysched.runtime.sources import resolve_model
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Profile, Program
from lazysched.solver import Solution, solve
from lazysched.solver.report import print_solution
from lazysched.solver.simulate import simulate
from lazysched.timeline import Interval, timed_steps

SHAPES: dict[str, dict[str, Any]] = {
    "3b": {
        "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
        "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "14b": {
        "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "intermediate_size": 13824, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "smoke": {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip
WARM_UP_STEPS = 2
"""Intervals between steps that are left out."""
TIMED_STEPS = 3
"""Steps after these whose operations are timed."""


@dataclass(frozen=True)
class Case:
    """A shape, a batch and budgets; None is all there is."""

    name: str
    shape: str
    batch_size: int
    seq_len: int
    gpu_gb: int | None
    micro_batches: tuple[int, ...]
    num_steps: int = 10
    chunk_tokens: int = 4096
    """Tokens whose logits exist at once."""
    resident: bool = False
    """Whether the plan's variants run with everything on the GPU instead of where the plan puts it."""

    @property
    def gpu_bytes(self) -> int | None:
        """GPU budget."""
        return None if self.gpu_gb is None else self.gpu_gb * 10**9


CASES = [
    Case("7b_32x1k", "7b", 32, 1024, None, (8, 16, 32)),
    Case("7b_8x1k", "7b", 8, 1024, None, (4, 8), num_steps=14),
    Case("7b_8x1k_resident", "7b", 8, 1024, None, (4, 8), num_steps=14, resident=True),
    Case("7b_32x1k_24gb", "7b", 32, 1024, 24, (8, 16)),
    Case("7b_64x1k_24gb", "7b", 64, 1024, 24, (8, 16)),
    Case("7b_64x1k_resident", "7b", 64, 1024, 24, (8, 16), resident=True),
    Case("7b_144x1k_68gb", "7b", 144, 1024, 68, (8, 16), num_steps=8),
    Case("7b_8x1k_24gb", "7b", 8, 1024, 24, (4, 8), num_steps=14),
    Case("3b_32x1k", "3b", 32, 1024, None, (8, 16, 32)),
    Case("3b_192x1k_68gb", "3b", 192, 1024, 68, (8, 16), num_steps=8),
    Case("3b_32x1k_20gb", "3b", 32, 1024, 20, (8, 16)),
    Case("14b_32x1k", "14b", 32, 1024, None, (8, 16)),
    Case("smoke", "smoke", 4, 32, None, (1, 2), num_steps=5),
]


def main() -> None:
    """Run one case and save its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[case.name for case in CASES], default="3b_32x1k_20gb")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, nothing is saved")
    parser.add_argument("--host-memory-gb", type=float, default=None)
    parser.add_argument("--profile", type=Path, default=None, help="use this profile of the case, measure none")
    parser.add_argument("--save-profile", type=Path, default=None)
    parser.add_argument("--save-plan", type=Path, default=None)
    parser.add_argument("--trace", type=Path, default=None, help="Chrome trace of the steps after warm-up")
    parser.add_argument("--results", type=Path, default=None, help="folder of step.json")
    arguments = parser.parse_args()
    case = next(case for case in CASES if case.name == ("smoke" if arguments.smoke else arguments.case))
    rows = run(case, arguments)
    print(json.dumps({row["metric"]: row["value"] for row in rows}, indent=1))
    if not arguments.smoke:
        folder = {} if arguments.results is None else {"folder": arguments.results}
        print("wrote", save_rows("step", rows, **folder))


def run(case: Case, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Profile, solve, train; the rows of the case."""
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        settings = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **SHAPES[case.shape]}
        path.write_text(json.dumps(settings))
        config = resolve_model(str(path)).config
        measured, profile_s = profiled(case, path, arguments)
    if arguments.save_profile is not None:
        measured.save(arguments.save_profile)
    host_bytes = None if arguments.host_memory_gb is None else round(arguments.host_memory_gb * 1e9)
    solution = solve(
        measured, batch_size=case.batch_size, gpu_memory_bytes=case.gpu_bytes, host_memory_bytes=host_bytes
    )
    print_solution(solution, measured, Console(width=120))
    if case.resident:
        solution = all_on_gpu(solution, measured)
    if arguments.save_plan is not None:
        solution.plan.save(arguments.save_plan)
    figures = measure(case, solution, config, measured, device, arguments.trace)
    figures["profile_s"] = (profile_s, "s")
    given = "" if arguments.profile is None else f" --profile {arguments.profile.name}"
    command, where = f"python benchmarks/step.py --case {case.name}{given}", measured.hardware_id
    return [make_row(case.name, metric, value, unit, where, command) for metric, (value, unit) in figures.items()]


def all_on_gpu(solution: Solution, measured: Profile) -> Solution:
    """The same micro-batches and save variants with weights, state and everything saved on the GPU."""
    stages = {
        stage_id: choice.model_copy(
            update={
                "weights": "gpu", "state": "gpu", "input_tier": "gpu",
                "saved_tiers": dict.fromkeys(choice.saved_tiers, "gpu"),
            }
        )
        for stage_id, choice in solution.plan.stages.items()
    }  # fmt: skip
    plan = solution.plan.model_copy(update={"stages": stages, "budget_bytes": {}, "predicted": None})
    timeline = simulate(lower(plan, measured.stages), measured, micro_batch=plan.micro_batch)
    return replace(solution, plan=plan.model_copy(update={"predicted": timeline.prediction()}), timeline=timeline)


def profiled(case: Case, config_path: Path, arguments: argparse.Namespace) -> tuple[Profile, float | None]:
    """The profile of the case, and the seconds that measuring took; None where it was read from a file."""
    if arguments.profile is not None:
        return Profile.load(arguments.profile), None
    started_s = time.perf_counter()
    measured = profile(
        str(config_path), device=arguments.device, seq_len=case.seq_len, micro_batches=case.micro_batches,
        loss_chunk_tokens=case.chunk_tokens,
    )  # fmt: skip
    return measured, time.perf_counter() - started_s


def measure(
    case: Case, solution: Solution, config: Any, measured: Profile, device: torch.device, trace: Path | None
) -> dict[str, tuple[float | None, str]]:
    """Train some steps as the plan says; metric -> (value, unit)."""
    on_gpu, plan = device.type == "cuda", solution.plan
    machine.reset_peaks(device)
    machine.configure_allocator(device)
    limit = machine.host_memory()[1]
    recorder = Recorder(range(WARM_UP_STEPS, WARM_UP_STEPS + TIMED_STEPS), device)
    started_s = time.perf_counter()
    with Session(plan, config, device, settings=AdamWSettings(), max_grad_norm=1.0, host_limit_bytes=limit) as session:
        opened_s = time.perf_counter()
        session.initialise(seed=0)
        print(f"opened in {opened_s - started_s:.1f} s, weights drawn in {time.perf_counter() - opened_s:.1f} s")
        times_s = list(step_times(session, case, config.vocab_size, recorder))[WARM_UP_STEPS:]
        reserved = torch.cuda.max_memory_reserved() + machine.context_bytes(device) if on_gpu else None
        if on_gpu:
            stats = torch.cuda.memory_stats()
            print(
                f"GB: allocated {stats['allocated_bytes.all.peak'] / 1e9:.2f}, reserved {(reserved or 0) / 1e9:.2f} "
                f"with context {machine.context_bytes(device) / 1e9:.2f}, retries {stats['num_alloc_retries']}"
            )
        intervals = recorder.intervals()
        timed = timed_steps(session.program, intervals, in_line=not on_gpu)
        print_by_kind(session.program, intervals, solution.timeline.intervals)
        if trace is not None:
            save_chrome_trace(trace, session.program, intervals)
    step_s, tokens = statistics.median(times_s), case.batch_size * case.seq_len
    assert plan.predicted is not None
    assert timed is not None
    predicted_s = plan.predicted.step_s
    return {
        "step_s": (step_s, "s"),
        "predicted_step_s": (predicted_s, "s"),
        "predicted_over_measured": (predicted_s / step_s, "1"),
        "tokens_per_s": (tokens / step_s, "1/s"),
        "model_tflops": (model_flops(case, measured) / step_s / 1e12, "TFLOP/s"),
        "exposed_share": (timed.idle_s / step_s, "1"),
        "gpu_update_share": (gpu_update_s(session.program, intervals) / step_s, "1"),
        "peak_gpu_bytes": (reserved, "bytes"),
        "predicted_peak_gpu_bytes": (plan.predicted.peak_bytes["gpu"], "bytes"),
        "gpu_budget_bytes": (plan.budget_bytes.get("gpu"), "bytes"),
        "slowest_step_s": (max(times_s), "s"),
    }


def gpu_update_s(program: Program, intervals: Sequence[Interval]) -> float:
    """Time per step in which ``compute`` updates."""
    updates = [i for i in intervals if i.engine == "compute" and program.ops[i.op].kind == "update"]
    return sum(interval.duration_s for interval in updates) / TIMED_STEPS


def step_times(session: Session, case: Case, vocabulary: int, recorder: Recorder) -> Iterator[float]:
    """Seconds from the end of one step on ``compute`` to the next one's."""
    executor = session.executor
    results = [
        executor.step(random_batch(case, vocabulary, step), 1e-5, recorder.of(step)) for step in range(case.num_steps)
    ]
    executor.drain()
    for before, after in pairwise(results):
        print(f"loss {after.loss:.4f} norm {after.grad_norm:.3f}", flush=True)
        yield seconds_between(before.end, after.end)


def print_by_kind(program: Program, measured: Sequence[Interval], predicted: Sequence[Interval]) -> None:
    """Seconds per step by kind of operation, measured beside predicted."""
    table = Table("engine", "kind", "cost", "count", "predicted ms", "measured ms", title="Per step")
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for column, intervals in enumerate((predicted, measured), start=1):
        num_steps = len({interval.step for interval in intervals})
        for interval in intervals:
            op = program.ops[interval.op]
            row = sums[op.engine, op.kind, " ".join(op.cost[2:])]
            row[column] += 1e3 * interval.duration_s / num_steps
            row[0] += 1 / num_steps if column == 1 else 0
    for key, (count, predicted_ms, measured_ms) in sorted(sums.items()):
        table.add_row(*key, f"{count:.0f}", f"{predicted_ms:.2f}", f"{measured_ms:.2f}")
    Console(width=120).print(table)


def random_batch(case: Case, vocabulary: int, seed: int) -> Batch:
    """Full rows of random tokens, all trained but the last of each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (case.batch_size, case.seq_len), generator=generator)
    targets = torch.roll(ids, -1, dims=1)
    targets[:, -1] = -100
    return Batch(ids, targets, int((targets != -100).sum()))


def model_flops(case: Case, measured: Profile) -> float:
    """Floating-point operations of one step, recomputation not counted."""
    shape, tokens = SHAPES[case.shape], case.batch_size * case.seq_len
    params = sum(stage.num_params for stage in measured.stages)
    attention = 3 * shape["num_hidden_layers"] * 2 * tokens * case.seq_len * shape["hidden_size"]
    return float(6 * params * tokens + attention)


if __name__ == "__main__":
    main()
