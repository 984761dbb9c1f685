"""Random small models on random machines with random budgets, from one seed each, and what must hold of their plans."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from lazysched.errors import InfeasibleError
from lazysched.schemas import Curve, Profile, Rate, SaveVariant, StateFormat, Timing
from lazysched.solver import Solution, simulate_plan, solve
from tests.solver.synthetic import tiny_profile

MB = 1_000_000


@dataclass(frozen=True)
class Scenario:
    """A problem for ``solve``; ``profile`` and ``solved`` make it."""

    num_blocks: int
    two_structures: bool
    tied: bool
    block_params: int
    vocabulary_params: int
    saved_bytes: int
    link_bytes_per_s: float
    cpu_params_per_s: float
    copy_slowdown: float
    """Update on the host beside copies: this many times slower."""
    batch_size: int
    gpu_bytes: int
    host_bytes: int
    exact_update: bool
    optimizer_state: StateFormat
    file_bytes_per_s: float | None = None
    """None: only plans that the runtime executes; else plans with files of that speed and with segments too."""
    nvme_bytes: int = 0
    time_scale: float = 1.0

    @classmethod
    def of_seed(cls, seed: int) -> Scenario:
        """The scenario number ``seed``."""
        draw = random.Random(seed)
        num_blocks = draw.randint(1, 5)
        block_params, vocabulary_params = draw.randint(1, 30) * 100_000, draw.randint(1, 30) * 100_000
        saved_bytes = draw.randint(1, 60) * MB
        batch_size = draw.choice((1, 2, 3, 4))
        num_params = num_blocks * block_params + 2 * vocabulary_params
        # Between what the largest stage needs and what all would fill.
        least_bytes = 16 * (block_params + 2 * vocabulary_params) + 4 * MB
        most_bytes = 20 * num_params + batch_size * num_blocks * (saved_bytes + MB) + 4 * MB
        return cls(
            num_blocks,
            two_structures=draw.random() < 0.4,
            tied=draw.random() < 0.4,
            block_params=block_params,
            vocabulary_params=vocabulary_params,
            saved_bytes=saved_bytes,
            link_bytes_per_s=10 ** draw.uniform(7.5, 10),
            cpu_params_per_s=10 ** draw.uniform(7, 9),
            copy_slowdown=draw.choice((1.0, 1.0, 2.0)),
            batch_size=batch_size,
            gpu_bytes=round(least_bytes + draw.random() ** 2 * (most_bytes - least_bytes)),
            host_bytes=round(draw.uniform(4, 40) * num_params),
            exact_update=draw.random() < 0.7,
            optimizer_state=draw.choice(("hybrid8", "fp32")),
            file_bytes_per_s=draw.choice((None, 10 ** draw.uniform(7.5, 10))),
            nvme_bytes=round(draw.uniform(0, 40) * num_params),
        )

    def profile(self) -> Profile:
        """Measurements as they might be."""
        profile = tiny_profile(
            self.num_blocks,
            micro_batches=(1, 2),
            block_params=self.block_params,
            vocabulary_params=self.vocabulary_params,
            saved_bytes=self.saved_bytes,
            tied=self.tied,
            link_bytes_per_s=self.link_bytes_per_s,
            cpu_params_per_s=self.cpu_params_per_s,
        )
        beside = {f: Rate(per_s=(rate.per_s or 0) / self.copy_slowdown) for f, rate in profile.update["cpu"].items()}
        profile = profile.model_copy(update={"update_beside_copies": beside})
        if self.file_bytes_per_s is not None:
            files = Curve(points=[(1, self.file_bytes_per_s)])
            links = {**profile.links, "nvme_read": files, "nvme_write": files}
            profile = profile.model_copy(update={"links": links})
        if self.two_structures:
            profile = with_two_structures(profile)
        return scaled(profile, self.time_scale)

    def solved(self, profile: Profile | None = None, *, time_limit_s: float, gap: float) -> Solution | None:
        """The plan, or None where none fits."""
        update: dict[str, Any] = {} if self.exact_update else {"max_grad_norm": None, "check_finite": False}
        try:
            return solve(
                profile or self.profile(), batch_size=self.batch_size, gpu_memory_bytes=self.gpu_bytes,
                host_memory_bytes=self.host_bytes, optimizer_state=self.optimizer_state, time_limit_s=time_limit_s,
                nvme_bytes=self.allowed_nvme_bytes, executable_only=self.file_bytes_per_s is None, gap=gap, **update,
            )  # fmt: skip
        except InfeasibleError:
            return None

    @property
    def allowed_nvme_bytes(self) -> int:
        """Budget of files."""
        return 0 if self.file_bytes_per_s is None else self.nvme_bytes

    def more(self, **factors: float) -> Scenario:
        """The same with some figures multiplied."""
        changed = {name: type(getattr(self, name))(getattr(self, name) * factor) for name, factor in factors.items()}
        return replace(self, **changed)


BOUND_ERROR = 2e-3
"""What a bound may be above a plan, as a share of its step; the program is that far off in corners (NOTES.md)."""


def broken_promises(solution: Solution, scenario: Scenario) -> list[str]:
    """What does not hold of a solution that always must, one line each."""
    plan, again = solution.plan, simulate_plan(solution.plan, steps=4)
    budgets = {"gpu": scenario.gpu_bytes, "host": scenario.host_bytes, "nvme": scenario.allowed_nvme_bytes}
    broken = [
        f"{tier} peak {again.peak_bytes[tier]} is over the budget {budget}"
        for tier, budget in budgets.items()
        if again.peak_bytes[tier] > budget
    ]
    if plan.predicted != again.prediction():
        broken.append("the prediction is not the simulator's")
    bound_s = min(combination.bound_s for combination in solution.tried)
    if bound_s > again.step_s * (1 + BOUND_ERROR):
        broken.append(f"the lower bound {bound_s} s is above the plan's {again.step_s} s")
    for recipe in solution.recipes:
        seen = recipe.timeline
        fits = seen and all(seen.peak_bytes[tier] <= budget for tier, budget in budgets.items())
        if seen and fits and seen.step_s < again.step_s * (1 - 1e-9):
            broken.append(f"{recipe.name} takes {seen.step_s} s, the plan {again.step_s} s")
    return broken


def with_two_structures(profile: Profile) -> Profile:
    """Every other block is of a structure that takes half as long again and saves half as much."""
    stages = [
        stage.model_copy(update={"structure": "other"}) if stage.is_block and index % 2 == 0 else stage
        for index, stage in enumerate(profile.stages)
    ]
    other = {size: [_slower(variant) for variant in listed] for size, listed in profile.variants["block"].items()}
    return profile.model_copy(update={"stages": stages, "variants": {**profile.variants, "other": other}})


def _slower(variant: SaveVariant) -> SaveVariant:
    saved = {name: size if name == "input" else size // 2 for name, size in variant.saved.items()}
    times = {"forward": _times(variant.forward, 1.5), "backward": _times(variant.backward, 1.5)}
    return variant.model_copy(update={"saved": saved, **times})


def _times(timing: Timing, factor: float) -> Timing:
    return timing.model_copy(update={"median_s": timing.seconds * factor})


def scaled(profile: Profile, factor: float) -> Profile:
    """The same machine and model with everything ``factor`` times as slow."""
    if factor == 1:
        return profile

    def slower(rates: dict[StateFormat, Rate]) -> dict[StateFormat, Rate]:
        return {name: rate.model_copy(update={"per_s": (rate.per_s or 0) / factor}) for name, rate in rates.items()}

    def curve(old: Curve) -> Curve:
        return old.model_copy(update={"points": [(size, rate / factor) for size, rate in old.points]})

    variants = {
        structure: {
            size: [
                v.model_copy(update={n: _times(getattr(v, n), factor) for n in ("forward", "backward")}) for v in listed
            ]
            for size, listed in by_size.items()
        }
        for structure, by_size in profile.variants.items()
    }
    return profile.model_copy(
        update={
            "variants": variants,
            "links": {name: curve(old) for name, old in profile.links.items()},
            "update": {processor: slower(rates) for processor, rates in profile.update.items()},
            "update_beside_copies": slower(profile.update_beside_copies),
        }
    )
