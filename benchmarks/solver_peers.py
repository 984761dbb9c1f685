"""Random instances in parallel processes, and checkpoint selection beside its peers."""

from __future__ import annotations

import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.solver.checkpointing import (
    Chain,
    checkpoint_profile,
    least_recompute_s,
    plan_keeping,
    square_root_rule,
)
from tests.solver.random_instances import Scenario, broken_promises
from tests.solver.synthetic import SHAPE_3B

NUM_PROCESSES = 2
CHUNK = 10
TIME_LIMIT_S, GAP = 0.1, 0.01
"""Of one random instance: promises must hold wherever the search stops."""
SETS = {"two options": ("all", "input"), "all variants": ("all", "half", "tenth", "input")}
PROGRAM_GAP, PROGRAM_LIMIT_S = 1e-6, 30.0


@dataclass
class Checked:
    """How many random instances were solved, had no plan that fits, and what was broken, with the seed before it."""

    solved: int = 0
    infeasible: int = 0
    broken: list[str] = field(default_factory=list)

    def add(self, other: Checked) -> None:
        """Sum up."""
        self.solved += other.solved
        self.infeasible += other.infeasible
        self.broken += other.broken


def check_instances(count: int, minutes: float) -> Checked:
    """Instances of seeds from 0 on, until ``count`` or until the time is up."""
    until_s, total = time.monotonic() + 60 * minutes, Checked()
    starts = iter(range(0, count, CHUNK))
    running: set[Future[Checked]] = set()
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        while True:
            while len(running) < 2 * NUM_PROCESSES and time.monotonic() < until_s:
                start = next(starts, None)
                if start is None:
                    break
                running.add(pool.submit(check_seeds, start, min(start + CHUNK, count)))
            if not running:
                return total
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                total.add(future.result())


def check_seeds(start: int, stop: int) -> Checked:
    """Instances of seeds ``start`` to ``stop`` (exclusive), in this process."""
    checked = Checked()
    for seed in range(start, stop):
        scenario = Scenario.of_seed(seed)
        try:
            solution = scenario.solved(time_limit_s=TIME_LIMIT_S, gap=GAP)
        except Exception as error:  # the benchmark counts what escapes, whatever it is
            checked.broken.append(f"seed {seed}: {type(error).__name__}: {error}")
            continue
        if solution is None:
            checked.infeasible += 1
            continue
        checked.solved += 1
        checked.broken += [f"seed {seed}: {line}" for line in broken_promises(solution, scenario)]
    return checked


@dataclass(frozen=True)
class Selection:
    """Seconds recomputed with one budget: ours, the dynamic program's, and, at its own budget, the square-root rule's.

    The rule shares a segment's input among blocks, which no plan does yet.
    """

    options: str
    num_blocks: int
    kept_bytes: int
    ours_s: float
    dynamic_program_s: float
    rule_s: float | None


def select_checkpoints(num_blocks: int, options: str) -> list[Selection]:
    """Ours and the peers', at the memory of the square-root rule and at one, two and three quarters of all memory."""
    profile = checkpoint_profile(SHAPE_3B, num_blocks, SETS[options])
    chain = Chain.of(profile)
    rule_bytes, rule_s = square_root_rule(chain)
    between = [chain.least_bytes + (chain.most_bytes - chain.least_bytes) * k // 4 for k in (1, 2, 3)]
    selections = []
    for kept_bytes in (rule_bytes, *between):
        if kept_bytes < chain.least_bytes:
            continue
        plan = plan_keeping(profile, chain, kept_bytes, gap=PROGRAM_GAP, time_limit_s=PROGRAM_LIMIT_S)
        optimum_s = least_recompute_s(chain.sizes, chain.recompute_s, kept_bytes)
        at_rule = rule_s if kept_bytes == rule_bytes else None
        selections.append(Selection(options, num_blocks, kept_bytes, chain.recomputed_s(plan), optimum_s, at_rule))
    return selections
