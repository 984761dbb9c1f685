"""Random instances in parallel processes, and checkpoint selection beside its peers."""

from __future__ import annotations

import itertools
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from lazysched.solver.workers import usable_cores
from tests.solver.checkpointing import (
    Chain,
    checkpoint_profile,
    equal_blocks_profile,
    gpu_peak_bytes,
    least_recompute_s,
    plan_keeping,
    program_plan,
    recompute_s,
    square_root_plan,
    square_root_rule,
)
from tests.solver.random_instances import Scenario, broken_promises
from tests.solver.synthetic import SHAPE_3B

NUM_PROCESSES = usable_cores()
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

    def add(self, seed: int, future: Future[list[str] | None]) -> None:
        """Count what became of one instance; an exception is a broken promise too."""
        error = future.exception()
        broken = [f"{type(error).__name__}: {error}"] if error else future.result()
        self.infeasible += broken is None
        self.solved += broken is not None and error is None
        self.broken += [f"seed {seed}: {line}" for line in broken or []]


def check_instances(count: int, minutes: float) -> Checked:
    """Instances of seeds from 0 on, until ``count`` or until the time is up."""
    until_s, checked = time.monotonic() + 60 * minutes, Checked()
    seeds = iter(range(count))
    running: dict[Future[list[str] | None], int] = {}
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        while True:
            for seed in itertools.islice(seeds, 2 * NUM_PROCESSES - len(running)):
                if time.monotonic() < until_s:
                    running[pool.submit(check_seed, seed)] = seed
            if not running:
                return checked
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                checked.add(running.pop(future), future)


def check_seed(seed: int) -> list[str] | None:
    """What is broken of one instance; None where no plan fits."""
    scenario = Scenario.of_seed(seed)
    solution = scenario.solved(time_limit_s=TIME_LIMIT_S, gap=GAP)
    return None if solution is None else broken_promises(solution, scenario)


@dataclass(frozen=True)
class Selection:
    """Seconds recomputed with one budget: ours and a peer's."""

    options: str
    num_blocks: int
    kept_bytes: int
    ours_s: float
    peer_s: float


def select_checkpoints(num_blocks: int, options: str) -> list[Selection]:
    """Unequal blocks, none in segments, beside the dynamic program.

    At the memory of the square-root rule and at one, two and three quarters of all memory.
    """
    profile = checkpoint_profile(SHAPE_3B, num_blocks, SETS[options])
    chain = Chain.of(profile)
    rule_bytes, _ = square_root_rule(chain)
    between = [chain.least_bytes + (chain.most_bytes - chain.least_bytes) * k // 4 for k in (1, 2, 3)]
    selections = []
    for kept_bytes in (rule_bytes, *between):
        if kept_bytes < chain.least_bytes:
            continue
        plan = plan_keeping(profile, chain, kept_bytes, gap=PROGRAM_GAP, time_limit_s=PROGRAM_LIMIT_S)
        optimum_s = least_recompute_s(chain.sizes, chain.recompute_s, kept_bytes)
        selections.append(Selection(options, num_blocks, kept_bytes, chain.recomputed_s(plan), optimum_s))
    return selections


def beside_square_root_rule(num_blocks: int, options: str) -> Selection:
    """Ours with segments of 2 and 4, and the rule's plan, of equal blocks; both lowered, at the rule's GPU peak."""
    profile = equal_blocks_profile(SHAPE_3B, num_blocks, SETS[options])
    rule = square_root_plan(profile)
    gpu_bytes = gpu_peak_bytes(rule, profile)
    ours = program_plan(profile, gpu_bytes, gap=PROGRAM_GAP, time_limit_s=PROGRAM_LIMIT_S)
    return Selection(options, num_blocks, gpu_bytes, recompute_s(ours, profile), recompute_s(rule, profile))
