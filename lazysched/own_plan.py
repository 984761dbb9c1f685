"""``lazysched train`` without a plan: profile the model on this machine, once, and solve.

Profiles are kept in the user's cache, by model, machine, number of threads and shape, and used again as long as they
are readable there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lazysched.cli_hardware import say_if_beyond_the_machine
from lazysched.errors import UsageError
from lazysched.lines import say, warn
from lazysched.outputs import free_number
from lazysched.progress import profile_shown
from lazysched.schemas import Plan, Profile
from lazysched.train_config import TrainConfig
from lazysched.trainable import patterns_of
from lazysched.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:  # they load torch and transformers
    from lazysched.runtime.plan_to_make import PlanToMake
    from lazysched.runtime.sources import ModelSource

DEFAULT_ROWS, DEFAULT_LENGTH = 8, 1024
"""Rows of a step, as transformers has it, and tokens of a row."""
NUM_SIZES = 4
"""Micro-batches that are profiled at most: the largest powers of two that divide the step, up to 32."""
LARGEST_SIZE = 32


@dataclass(frozen=True)
class Budgets:
    """Memory to solve for; None takes what is free."""

    gpu_bytes: int | None
    host_bytes: int | None


def plan_to_make(settings: TrainConfig, console: Console) -> PlanToMake:
    """What is known of the plan; made, the profile is measured, or taken from the cache, solved, and the plan saved.

    Args:
        settings: of the run; the batch is ``per_device_train_batch_size`` times ``gradient_accumulation_steps``.
        console: what is done is said there.

    Raises:
        UsageError: a budget or a pattern is none, or the plan could not be saved beside the output folder.
    """
    rows = (settings.per_device_train_batch_size or DEFAULT_ROWS) * settings.gradient_accumulation_steps
    budgets = Budgets(*(_bytes(getattr(settings, name), name) for name in ("gpu_memory", "host_memory")))
    path = plan_path(settings)
    if path.exists() and not path.is_file():
        raise UsageError(f"output_dir: {settings.output_dir}: the plan goes to {path}, which is no file; move it away")
    from lazysched.runtime.plan_to_make import PlanToMake

    return PlanToMake(
        batch_size=rows, seq_len=settings.max_length or DEFAULT_LENGTH, packing=bool(settings.packing),
        trainable=patterns_of(settings.trainable), make=lambda: _make_plan(settings, rows, budgets, console),
    )  # fmt: skip


def _make_plan(settings: TrainConfig, rows: int, budgets: Budgets, console: Console) -> Plan:
    from lazysched.runtime.sources import resolve_model
    from lazysched.solver import solve

    profile = _profile(settings, resolve_model(settings.model), rows, console)
    say_if_beyond_the_machine(profile, budgets.gpu_bytes, budgets.host_bytes)
    clip_norm = 1.0 if settings.max_grad_norm is None else settings.max_grad_norm or None
    solution = solve(
        profile, batch_size=rows, max_grad_norm=clip_norm, gpu_memory_bytes=budgets.gpu_bytes,
        host_memory_bytes=budgets.host_bytes,
    )  # fmt: skip
    if solution.interrupted:  # `solve` takes Ctrl-C for "that is enough"; here it ends the run
        raise KeyboardInterrupt
    plan, peaks, path = solution.plan, solution.timeline.peak_bytes, plan_path(settings)
    _keep_other(path, plan, console)
    plan.save(path)
    step = f"{plan.accumulation} times {plan.micro_batch} rows, {format_seconds(solution.timeline.step_s)} a step"
    memory = f"gpu {format_bytes(peaks['gpu'])}, host {format_bytes(peaks['host'])}"
    say(console, f"solved: {step}, {memory}; the plan is in {path}")
    return plan


def _decisions(plan: Plan) -> Plan:
    """``plan`` without how its solve went."""
    return plan.model_copy(update={"solver": None})


def _keep_other(path: Path, plan: Plan, console: Console) -> None:
    """Give another plan that is there, which may have been edited by hand, the first free number."""
    with contextlib.suppress(UsageError):
        if not os.path.lexists(path) or _decisions(Plan.load(path)) == _decisions(plan):
            return
    kept = path.rename(free_number(path))
    say(console, f"the plan that was there is now {kept}; --plan {kept} trains as it says")


def plan_path(settings: TrainConfig) -> Path:
    """Where the plan is saved: beside the output folder, which a run replaces as a whole."""
    folder = Path(settings.output_dir)
    return folder.with_name(f"{folder.name}-plan.json")


def sizes_of(rows: int) -> list[int]:
    """Micro-batches to profile for a step of ``rows``, ascending; of an odd number single rows alone."""
    powers = (1 << k for k in range(LARGEST_SIZE.bit_length()))
    return [size for size in powers if rows % size == 0][-NUM_SIZES:]


def _profile(settings: TrainConfig, source: ModelSource, rows: int, console: Console) -> Profile:
    seq_len, packing = settings.max_length or DEFAULT_LENGTH, bool(settings.packing)
    device = None if settings.device == "auto" else settings.device
    dtype = {True: "bfloat16", False: "float32", None: None}[settings.bf16]
    arguments: dict[str, Any] = {
        "device": device, "dtype": dtype, "seq_len": seq_len, "micro_batches": sizes_of(rows), "packing": packing,
        "full_determinism": bool(settings.full_determinism),
    }  # fmt: skip
    if settings.trainable is not None:
        arguments["trainable"] = patterns_of(settings.trainable)
    path = _cached(source, arguments)
    known = _load(path)
    if known is not None:
        say(console, f"profile: measured before, {path}; remove that file to measure anew")
        return known
    from lazysched.profiles.measure import profile

    path.parent.mkdir(parents=True, exist_ok=True)  # what cannot be kept should not take minutes first
    say(console, f"profile: {settings.model} on this machine, {seq_len} tokens a row; it takes some minutes")
    with profile_shown(console) as report:
        measured = profile(settings.model, **arguments, report=report)
    measured.save(path)
    say(console, f"profile: kept in {path}")
    for warning in measured.doubts():
        warn(console, warning)
    return measured


def _load(path: Path) -> Profile | None:
    """The profile there; one of another version of lazysched, or a damaged one, is measured anew."""
    try:
        return Profile.load(path)
    except UsageError:
        return None


def _cached(source: ModelSource, arguments: dict[str, Any]) -> Path:
    """Where the profile of this model, machine, number of threads and shape is kept."""
    from lazysched.runtime.arguments import choose_device
    from lazysched.runtime.engines import cpu_threads
    from lazysched.runtime.machine import hardware_id
    from lazysched.runtime.sources import default_cache_dir

    device = choose_device(arguments["device"])
    machine = [hardware_id(device), cpu_threads(device)]
    text = repr([source.config.to_json_string(), machine, sorted(arguments.items())])
    folder = Path(os.environ.get("LAZYSCHED_PROFILES") or default_cache_dir() / "profiles")
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _bytes(text: str | None, field: str) -> int | None:
    return None if text is None else parse_bytes(text, field)
