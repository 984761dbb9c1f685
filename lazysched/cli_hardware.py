"""What the command line does with hardware files: ``solve --hardware`` and ``profile --hardware-only``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from lazysched.errors import UsageError, flag_of
from lazysched.lines import plain_console, say, warn
from lazysched.machine_memory import memories_of
from lazysched.schemas import Hardware, Profile, Tier
from lazysched.units import format_bytes

DEFAULT_SEQ_LEN = 1024
DEFAULT_MICRO_BATCHES = (1, 2, 4, 8)
TIERS: tuple[Tier, ...] = ("gpu", "host")


def profile_to_solve(
    profile_file: Path | None,
    hardware: str | None,
    model: str | None,
    seq_len: int | None,
    micro_batches: Sequence[int] | None,
    trainable: Sequence[str] | None,
) -> Profile:
    """The profile in a file, cut to ``micro_batches``, or a model's estimate on a kind of machine; never loads torch.

    Raises:
        UsageError: neither or both were asked for, or one of their files is wrong.
    """
    estimating = {"--hardware": hardware, "--model": model, "--seq-len": seq_len, "--trainable": trainable}
    if profile_file is not None:
        given = [flag for flag, value in estimating.items() if value]
        if given:
            raise UsageError(f"{given[0]}: means nothing beside PROFILE {profile_file}; leave one of them out")
        profile = Profile.load(profile_file)
        return _of_sizes(profile, micro_batches) if micro_batches else profile
    if hardware is None:
        raise UsageError("PROFILE: missing; name what `lazysched profile` wrote, or --hardware with --model")
    if model is None:
        raise UsageError("--model: missing; --hardware needs the config.json of a model")
    from lazysched.profiles.estimate import estimate
    from lazysched.profiles.library_files import hardware_path
    from lazysched.profiles.shapes import load_shape

    path = hardware_path(hardware)
    machine = Hardware.load(path)
    shape = load_shape(model, machine.compute_dtype)
    estimated = estimate(
        machine, shape, seq_len=seq_len or DEFAULT_SEQ_LEN, micro_batches=micro_batches or DEFAULT_MICRO_BATCHES,
        trainable=trainable or None,
    )  # fmt: skip
    _note(f"{machine.name}: {_host_in_words(machine)}; figures and their sources: {path}")
    return estimated


def say_if_beyond_the_machine(profile: Profile, gpu_bytes: int | None, host_bytes: int | None) -> None:
    """A line on stderr for budgets that the machine of ``profile`` does not have; None: not given."""
    from lazysched.solver.input_checks import MAX_BYTES

    given: dict[Tier, int] = {tier: size for tier, size in zip(TIERS, (gpu_bytes, host_bytes), strict=True) if size}
    for memory in memories_of(profile):
        budget, flags = memory.bytes_of(given), [f"--{tier}-memory" for tier in memory.tiers if tier in given]
        if memory.num_bytes < budget <= MAX_BYTES:  # more than that is refused
            size = format_bytes(memory.num_bytes)
            _note(f"{' and '.join(flags)} {format_bytes(budget)} is more than the {memory.name}'s {size}")


def _host_in_words(machine: Hardware) -> str:
    """Memory of the host, and what the file says of its cores."""
    figure = machine.host_memory_bytes
    size = "unknown" if figure.value is None else f"{format_bytes(figure.value)} ({figure.source})"
    host = machine.notes.get("host")
    return f"host memory {size}" + (f"; {host}" if host else "")


def _note(text: str) -> None:
    plain_console(stderr=True).print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)


def _of_sizes(profile: Profile, micro_batches: Sequence[int]) -> Profile:
    """``profile`` without the figures of other micro-batches, so that a plan has one of these."""
    known = {size for by_size in profile.variants.values() for size in by_size}
    for size in micro_batches:
        if size not in known:
            listed = ", ".join(map(str, sorted(known))) or "none"
            raise UsageError(f"--micro-batch: {size}: the profile has figures for {listed}; profile this one too")

    variants = {
        structure: {size: found for size, found in by_size.items() if size in micro_batches}
        for structure, by_size in profile.variants.items()
    }
    arguments = {size: num_bytes for size, num_bytes in profile.argument_bytes.items() if size in micro_batches}
    return profile.model_copy(update={"variants": variants, "argument_bytes": arguments})


def show_machine(machine: Hardware, console: Console) -> None:
    """Show what was measured, with units and how much it varied, and what is not known; warn where much varied."""
    table = Table(title=machine.name, title_justify="left")
    for column in ("figure", "value", "varies by", "how"):
        table.add_column(column, no_wrap=column != "how", overflow="fold")
    unknown: dict[str, list[str]] = {}
    for name, figure in machine.figures.items():
        label, unit = _label_and_unit(name)
        if figure.value is None:
            unknown.setdefault(figure.note, []).append(label)
        else:
            spread = "" if figure.spread is None else f"{100 * figure.spread:.0f} %"
            table.add_row(label, _with_unit(figure.value, unit), spread, _DATE.sub("", figure.note))
    console.print(table)
    for reason, labels in unknown.items():
        say(console, f"no figure for {', '.join(labels)}: {reason}")
    for name, note in machine.notes.items():
        say(console, f"{name}: {note}")
    for doubt in machine.doubts():
        warn(plain_console(stderr=True), doubt)


_UNITS = {
    "_bytes_per_s": "B/s", "_flop_per_s": "FLOP/s", "_per_s": " parameters/s", "_bytes": "B", "_usd_per_hour": "USD/h",
}  # fmt: skip
"""End of a figure's name -> unit; the first that fits."""
_DATE = re.compile(r"(, )?[0-9]{4}-[0-9]{2}-[0-9]{2}$")
"""At the end of a note; today's says nothing."""


def _label_and_unit(name: str) -> tuple[str, str]:
    suffix = next(suffix for suffix in _UNITS if name.endswith(suffix))
    return name.removesuffix(suffix).replace("_", " "), _UNITS[suffix]


def _with_unit(value: float, unit: str) -> str:
    if unit.startswith("B"):
        return format_bytes(value) + unit.removeprefix("B")
    if unit == "USD/h":
        return f"{value:g} {unit}"
    prefixes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))
    factor, prefix = next(pair for pair in prefixes if value >= pair[0] or pair[0] == 1)
    return f"{value / factor:.3g} {prefix}{unit}"


_OF_THE_MODEL = (
    "model", "dtype", "seq_len", "micro_batch", "compiled", "packing", "full_determinism", "trainable", "from_run",
    "profile_file",
)  # fmt: skip


def measure_machine(
    context: typer.Context, device: str | None, storage: Path | None, pin_limit_bytes: int | None
) -> Hardware:
    """Measure this machine without a model; arguments that are about one are refused.

    Raises:
        UsageError: such an argument was given, or one is wrong.
    """
    for name in _OF_THE_MODEL:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            shown = {"model": "MODEL", "compiled": "--compile", "profile_file": "--profile"}
            raise UsageError(
                f"{shown.get(name, flag_of(name))}: means nothing with --hardware-only, which "
                f"measures no model; leave it out"
            )
    from lazysched.profiles.hardware import measure_hardware

    return measure_hardware(
        device=device, storage_dir=None if storage is None else str(storage), pin_limit_bytes=pin_limit_bytes
    )
