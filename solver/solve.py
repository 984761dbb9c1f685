"""``solve``: from a profile to the fastest plan that fits. Arguments are checked here, ``outer_search`` searches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import get_args

from lazysched.errors import UsageError
from lazysched.schemas import Profile, StateFormat, Tier, Update
from lazysched.solver.input_checks import check_arguments, check_file_links, check_model
from lazysched.solver.measured import check_profile, host_memories
from lazysched.solver.options import EVERYTHING, EXECUTABLE, Scope
from lazysched.solver.outer_search import Search
from lazysched.solver.pin_checks import check_pins
from lazysched.solver.pins import parse_pins
from lazysched.solver.solution import Progress, Solution, sought_gap
from lazysched.solver.space import Settings

UNPLANNED_BYTES: dict[Tier, int] = {"gpu": 5 * 10**8, "host": 8 * 10**9}
"""Left out of what was free when that is the budget: beside a plan's buffers the driver takes some of the GPU for what
is page-locked and loaded later, and the process some of the host for libraries, compiler workers and data."""


def solve(
    profile: Profile,
    *,
    batch_size: int,
    gpu_memory_bytes: int | None = None,
    host_memory_bytes: int | None = None,
    nvme_bytes: int = 0,
    executable_only: bool = True,
    pins: Sequence[str] = (),
    max_grad_norm: float | None = 1.0,
    check_finite: bool = True,
    optimizer_state: StateFormat = "hybrid8",
    time_limit_s: float = 30.0,
    gap: float | None = None,
    seed: int = 0,
    report: Callable[[Progress], None] | None = None,
) -> Solution:
    """Find the fastest plan for ``batch_size`` rows a step within the memory budgets.

    Where the profile's ``pin_limit_bytes`` is below the host's budget, a plan page-locks no more than that, or nothing.

    Args:
        profile: measurements of model and machine.
        batch_size: rows of one step; micro-batches of the profile that divide it are considered.
        gpu_memory_bytes: budget, driver context included; None: what was free, beside a GPU less 0.5 GB.
        host_memory_bytes: likewise for the host; None: what was free, beside a GPU less 8 GB.
        nvme_bytes: budget of files; 0 keeps everything out of them.
        executable_only: with False also plans that no runtime executes yet, to look at.
        pins: decisions fixed by hand, as ``block[0:4].weights=gpu``; see ``lazysched.solver.pins``.
        max_grad_norm: global gradient norm to clip to; None gives clipping up.
        check_finite: skip steps whose gradient is not finite; False, which needs no clipping, lets updates start during
            the backward.
        optimizer_state: ``hybrid8`` has 8-bit moments, ``fp32`` is the exact reference.
        time_limit_s: wall-clock seconds for the search. A simulation that has begun comes to its end, and saying why
            nothing fits may take as long again, five seconds at least.
        gap: a plan within this share of the lower bound is good enough, and the time limit is used up to prove it.
            None: 1 %, and a proof that takes half as long again as the search for plans is given up.
        seed: of the search and of HiGHS; the same seed gives the same plan unless a wall-clock limit cut in.
        report: called whenever a faster plan is found or a bound raised.

    Raises:
        UsageError: an argument is out of range, or the profile lacks a figure that is needed.
        InfeasibleError: no plan fits; says which budget binds and by how many bytes.
        TimeLimitError: nothing was found in time.
        KeyboardInterrupt: Ctrl-C came before any plan was found; after that it ends the search, and a second one all.
    """
    scope = _scope(profile, nvme_bytes, EXECUTABLE if executable_only else EVERYTHING)
    given: dict[Tier, int | None] = {"gpu": gpu_memory_bytes, "host": host_memory_bytes, "nvme": nvme_bytes or None}
    check_arguments(time_limit_s, sought_gap(gap), seed, given)
    if optimizer_state not in get_args(StateFormat):
        raise UsageError(f"optimizer_state: {optimizer_state!r} is not known; use {' or '.join(get_args(StateFormat))}")
    check_model(profile)
    budget_bytes: dict[Tier, int] = {
        "gpu": _budget(profile, "gpu", gpu_memory_bytes),
        "host": _budget(profile, "host", host_memory_bytes),
        "nvme": nvme_bytes,
    }
    memories = host_memories(profile, budget_bytes["host"])
    check_profile(profile, optimizer_state, memories)
    update = _update(max_grad_norm, check_finite)
    fixed = parse_pins(pins, profile.stages)
    check_pins(fixed, profile, scope)
    settings = Settings(
        profile, batch_size, budget_bytes, memories, update, optimizer_state, fixed, scope, time_limit_s,
        sought_gap(gap), seed, proves_to_the_end=gap is not None,
    )  # fmt: skip
    return Search(settings, report).run()


def _scope(profile: Profile, nvme_bytes: int, scope: Scope) -> Scope:
    """Where things may be within a budget of files."""
    if not nvme_bytes:
        return scope.without_files()
    if not scope.has_files:
        raise UsageError(
            f"nvme_bytes: {nvme_bytes}: the runtime does not execute files yet; use 0, or executable_only=False for a "
            f"plan to look at"
        )
    check_file_links(profile)
    return scope


def _update(max_grad_norm: float | None, check_finite: bool) -> Update:
    if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
        raise UsageError(f"max_grad_norm: {max_grad_norm} is not a positive number; give 0 to clip nothing")
    if max_grad_norm is not None and not check_finite:
        raise UsageError(
            f"check_finite: clipping to max_grad_norm {max_grad_norm} waits for the gradient norm, so that giving the "
            f"check up gains nothing; give up both with --max-grad-norm 0 --no-finite-check"
        )
    return Update(clip_norm=max_grad_norm, check_finite=check_finite)


def _budget(profile: Profile, tier: Tier, given: int | None) -> int:
    budget = profile.free_bytes.get(tier) if given is None else given
    if budget is None:
        raise UsageError(f"profile: free_bytes.{tier}: null; give --{tier}-memory")
    if given is None and profile.device == "cuda":
        budget = max(budget - UNPLANNED_BYTES[tier], budget // 2)
    if budget <= 0:
        raise UsageError(f"{tier}_memory: {budget} bytes is no budget; use a positive size")
    return budget
