"""Peers for checkpoint selection, the part of the schedule that others solve too; no code is shared with the solver.

The problem: blocks in a chain, all weights and states on the GPU, nothing leaves it. Block i keeps exactly one of its
variants v: bytes[i][v] until its backward, and its backward then recomputes for recompute_s[i][v]. All blocks have one
working set, so that memory is highest when forward ends and all that is kept is there: the sum of the chosen bytes may
not exceed a budget. The sum of the recomputations is minimised: a knapsack with one choice per block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lazysched.lower import lower
from lazysched.schemas import Plan, Profile, SaveVariant, Update, variant_key
from lazysched.solver import simulate
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.milp import PlacementProgram
from lazysched.solver.options import EVERYTHING, LENGTHS, StateChoice
from lazysched.solver.plans import Choices, make_plan
from tests.solver.synthetic import FAST, Machine, Shape, large_profile

QUANTUM_BYTES = 1_000_000
"""All sizes of ``checkpoint_profile`` are multiples of it, so that the dynamic program is exact."""
MICRO_BATCH = 8
SCOPE = EVERYTHING.without_files()


def least_recompute_s(
    sizes: Sequence[Sequence[int]], recompute_s: Sequence[Sequence[float]], budget_bytes: int
) -> float:
    """The optimum, by dynamic programming over bytes used in units of ``QUANTUM_BYTES``; infinite if nothing fits.

    Args:
        sizes: block -> variant -> bytes kept, multiples of the quantum.
        recompute_s: block -> variant -> seconds of recomputation.
        budget_bytes: for all that is kept.
    """
    length = max(budget_bytes, -QUANTUM_BYTES) // QUANTUM_BYTES + 1
    best_s: NDArray[np.float64] = np.zeros(length)
    for block_sizes, block_s in zip(sizes, recompute_s, strict=True):
        following = np.full(length, np.inf)
        for size, seconds in zip(block_sizes, block_s, strict=True):
            assert size % QUANTUM_BYTES == 0
            units = size // QUANTUM_BYTES
            if units < length:
                following[units:] = np.minimum(following[units:], best_s[: length - units] + seconds)
        best_s = following
    return float(best_s[-1]) if length else math.inf


def square_root_rule(chain: Chain) -> tuple[int, float]:
    """Bytes that the rule of Chen et al. keeps at once, and its recomputation in seconds.

    Segments of about the square root of the number of blocks keep their first input and recompute all else; the last
    segment, whose backward comes at once, keeps everything. A block's recomputation counts as with its input alone.
    """
    length = len(chain.sizes)
    segment = max(1, round(math.sqrt(length)))
    starts = range(0, length, segment)
    last = starts[-1]
    whole = [sum(max(sizes) for sizes in chain.sizes[s : s + segment]) for s in starts]
    kept_bytes = sum(min(chain.sizes[s]) for s in starts) + max(whole)
    return kept_bytes, sum(max(seconds) for seconds in chain.recompute_s[:last])


@dataclass(frozen=True)
class Chain:
    """The problem's figures, read off a profile."""

    names: list[list[str]]
    """block -> variant -> name."""
    sizes: list[list[int]]
    """block -> variant -> bytes kept."""
    recompute_s: list[list[float]]
    """block -> variant -> backward beyond that of the fastest variant."""

    @classmethod
    def of(cls, profile: Profile) -> Chain:
        """Blocks of ``profile`` at its only micro-batch."""
        listed = [profile.variants[stage.structure][MICRO_BATCH] for stage in profile.stages if stage.is_block]
        least = [min(v.backward.seconds for v in variants) for variants in listed]
        return cls(
            [[v.name for v in variants] for variants in listed],
            [[sum(v.saved.values()) for v in variants] for variants in listed],
            [[v.backward.seconds - low for v in variants] for variants, low in zip(listed, least, strict=True)],
        )

    @property
    def least_bytes(self) -> int:
        """Kept when every block keeps as little as it can."""
        return sum(map(min, self.sizes))

    @property
    def most_bytes(self) -> int:
        """Kept when every block keeps everything."""
        return sum(map(max, self.sizes))

    def recomputed_s(self, plan: Plan) -> float:
        """What a plan recomputes."""
        saves = [choice.save for stage_id, choice in plan.stages.items() if stage_id.startswith("block.")]
        chosen = zip(self.names, self.recompute_s, saves, strict=True)
        return sum(seconds[names.index(save)] for names, seconds, save in chosen)


def square_root_plan(profile: Profile) -> Plan:
    """The rule's plan of equal blocks, as it is executed; all weights and states are on the GPU."""
    num_blocks = len(profile.stages) - 2
    segment = max(1, round(math.sqrt(num_blocks)))
    whole = (num_blocks - 1) // segment * segment
    instance = Instance(profile, Candidate(MICRO_BATCH, 1, segments=(1, segment)), "hybrid8", Update(), (), SCOPE)

    def place(block: int, length: int) -> int:
        options = enumerate(instance.saves[block])
        return next(k for k, o in options if (o.segment, o.variant.name, o.tier) == (length, "all", "gpu"))

    saves = [place(i, segment if i < whole else 1) for i in range(num_blocks)]
    return make_plan(instance, Choices(("gpu",) * num_blocks, tuple(saves), _on_gpu(instance)), budget_bytes={})


def program_plan(profile: Profile, gpu_bytes: int, *, gap: float, time_limit_s: float) -> Plan:
    """The program's plan of equal blocks, with segments among its options, within a GPU budget."""
    candidate = Candidate(MICRO_BATCH, 1, segments=LENGTHS)
    instance = Instance(profile, candidate, "hybrid8", Update(), (), SCOPE)
    return _solved(instance, gpu_bytes, gap, time_limit_s)


def gpu_peak_bytes(plan: Plan, profile: Profile) -> int:
    """Simulated."""
    return simulate(lower(plan, profile.stages), profile, micro_batch=MICRO_BATCH).peak_bytes["gpu"]


def recompute_s(plan: Plan, profile: Profile) -> float:
    """What the blocks compute in a step beyond one forward and their fastest backward each."""
    total_s = 0.0
    for op in lower(plan, profile.stages).ops.values():
        if op.kind in ("forward", "recompute", "backward") and op.stage not in ("embed", "head"):
            assert op.cost is not None
            variant = plan.variants[variant_key(op.cost[1], op.cost[2])]
            total_s += variant.backward.seconds if op.kind == "backward" else variant.forward.seconds
    for stage in profile.stages[1:-1]:
        listed = profile.variants[stage.structure][MICRO_BATCH]
        total_s -= min(v.forward.seconds for v in listed) + min(v.backward.seconds for v in listed)
    return total_s


def equal_blocks_profile(shape: Shape, num_blocks: int, variants: Sequence[str], machine: Machine = FAST) -> Profile:
    """A model of equal blocks with the named variants."""
    profile = large_profile(shape, machine, num_blocks, micro_batches=(MICRO_BATCH,))
    block = {MICRO_BATCH: [v for v in profile.variants["block"][MICRO_BATCH] if v.name in variants]}
    return profile.model_copy(update={"variants": {**profile.variants, "block": block}})


def checkpoint_profile(shape: Shape, num_blocks: int, variants: Sequence[str], machine: Machine = FAST) -> Profile:
    """A model whose blocks differ in size and time, with the named variants."""
    profile = large_profile(shape, machine, num_blocks, micro_batches=(MICRO_BATCH,))
    stages, by_structure = [], {name: profile.variants[name] for name in ("embed", "head")}
    for stage in profile.stages:
        index = len(stages) - 1
        name = f"block{index}" if stage.is_block else stage.structure
        stages.append(stage.model_copy(update={"structure": name}))
        if stage.is_block:
            factor = 1 + 0.2 * math.sin(7 * index)
            listed = profile.variants["block"][MICRO_BATCH]
            by_structure[name] = {MICRO_BATCH: [_scaled(v, factor) for v in listed if v.name in variants]}
    return profile.model_copy(update={"stages": stages, "variants": by_structure})


def _scaled(variant: SaveVariant, factor: float) -> SaveVariant:
    """Sizes rounded to the quantum; a block's input has one size throughout."""
    rest = {
        name: round(size * (factor if name != "input" else 1) / QUANTUM_BYTES) * QUANTUM_BYTES
        for name, size in variant.saved.items()
    }
    times = {
        name: timing.model_copy(update={"median_s": timing.seconds * factor})
        for name, timing in (("forward", variant.forward), ("backward", variant.backward))
    }
    return variant.model_copy(update={"saved": rest, **times})


def plan_keeping(profile: Profile, chain: Chain, kept_bytes: int, *, gap: float, time_limit_s: float) -> Plan:
    """The plan of the placement program whose blocks keep at most ``kept_bytes``, all else fixed as in the problem.

    The memory for all that is not kept comes from the simulator, so that both sides of a comparison have one budget.
    """
    instance = Instance(profile, Candidate(MICRO_BATCH, 1), "hybrid8", Update())
    least = [min(range(len(own)), key=lambda k, own=own: own[k].kept_gb) for own in instance.saves]
    states: tuple[StateChoice, ...] = ("gpu",) * instance.num_blocks
    plan = make_plan(instance, Choices(states, tuple(least), _on_gpu(instance)), budget_bytes={})
    gpu_bytes = gpu_peak_bytes(plan, profile) - chain.least_bytes + kept_bytes
    return _solved(instance, gpu_bytes, gap, time_limit_s)


def _on_gpu(instance: Instance) -> int:
    return next(k for k, o in enumerate(instance.vocabulary_options) if o.embed == o.head == "gpu")


def _solved(instance: Instance, gpu_bytes: int, gap: float, time_limit_s: float) -> Plan:
    program = PlacementProgram(instance, Budgets(instance.usable_gpu_gb(gpu_bytes), 1e3))
    for fixed in (program.decisions.v[_on_gpu(instance)], *(block["gpu"] for block in program.decisions.y)):
        fixed.lowBound = 1
    outcome = program.solve(gap=gap, time_limit_s=time_limit_s, seed=0)
    assert outcome.has_solution, outcome
    return make_plan(instance, program.choices(), budget_bytes={})
