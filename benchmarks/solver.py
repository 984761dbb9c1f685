"""Time and quality of ``solve`` on synthetic profiles of 32 blocks; nothing here needs a GPU.

    python benchmarks/solver.py --machine "2 shared cores"

Profiles are those of ``tests/solver/synthetic.py``: shapes of 3B and 7B models on a fast GPU and on a 24 GB card.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rows import make_row, save_rows

from lazysched.schemas import Profile
from lazysched.solver import Solution, solve

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.solver.synthetic import CARD, FAST, SHAPE_3B, SHAPE_7B, Machine, Shape, large_profile

NUM_BLOCKS = 32
HOST_BYTES = 200_000_000_000


@dataclass(frozen=True)
class Case:
    """A synthetic model on a synthetic machine, a batch and a GPU budget."""

    name: str
    shape: Shape
    machine: Machine
    batch_size: int
    gpu_bytes: int


CASES = (
    Case("3b_fast_32x1k_20gb", SHAPE_3B, FAST, 32, 20_000_000_000),
    Case("3b_fast_32x1k_80gb", SHAPE_3B, FAST, 32, 80_000_000_000),
    Case("7b_fast_32x1k_120gb", SHAPE_7B, FAST, 32, 120_000_000_000),
    Case("7b_fast_8x1k_60gb", SHAPE_7B, FAST, 8, 60_000_000_000),
    Case("7b_card_16x1k_24gb", SHAPE_7B, CARD, 16, 24_000_000_000),
)


def main() -> None:
    """Solve every case and save its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", required=True, help="name of the machine that solves, shown beside each figure")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this one")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for case in CASES:
        if arguments.case in (None, case.name):
            rows += measure(case, arguments.machine)
    print(save_rows("solver", rows))


def measure(case: Case, machine: str) -> list[dict[str, object]]:
    """Rows of one case."""
    profile: Profile = large_profile(case.shape, case.machine, NUM_BLOCKS)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    solution = solve(profile, batch_size=case.batch_size, gpu_memory_bytes=case.gpu_bytes, host_memory_bytes=HOST_BYTES)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    report = solution.plan.solver
    assert report is not None
    figures = [
        ("solve wall", wall_s, "s"),
        ("solve cpu", cpu_s, "s"),
        ("predicted step", report.objective_s, "s"),
        ("gap to lower bound", 100 * report.gap, "%"),
        ("best recipe over plan", 100 * (_best_recipe_s(solution) / report.objective_s - 1), "%"),
        ("combinations searched", float(sum(tried.step_s is not None for tried in solution.tried)), ""),
    ]
    print(case.name, {name: round(value, 3) for name, value, _ in figures}, flush=True)
    command = "python benchmarks/solver.py"
    return [make_row(case.name, name, value, unit, machine, command) for name, value, unit in figures]


def _best_recipe_s(solution: Solution) -> float:
    return min(recipe.timeline.step_s for recipe in solution.recipes if recipe.timeline is not None)


if __name__ == "__main__":
    main()
