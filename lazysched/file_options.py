"""Options of ``solve`` about files: ``--nvme-dir DIR --nvme SIZE``, and ``--not-executable``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lazysched.errors import UsageError
from lazysched.lines import plain_console, warn
from lazysched.schemas import Plan
from lazysched.schemas.executable import check_executable, executes_files
from lazysched.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from lazysched.solver.sweep import Sweep


def file_settings(nvme: str | None, folder: Path | None, not_executable: bool, sweep: Sweep | None) -> dict[str, Any]:
    """The keyword arguments ``nvme_bytes`` and ``executable_only`` of ``solve``.

    Args:
        nvme: most bytes of files; None: none.
        folder: where they are to lie; None leaves that open, as for another machine.
        not_executable: whether plans that the runtime does not execute yet are wanted too.
        sweep: the budgets that are solved for; None for one alone.

    Raises:
        UsageError: the size cannot be read, the folder cannot hold it, or only files are swept and none is executed.
    """
    swept = sweep is not None and sweep.flag == "nvme"
    if swept and not not_executable and not executes_files():
        raise UsageError(
            "--sweep: nvme: the runtime does not execute files yet, so all budgets would have the same plan; "
            "add --not-executable to look at such plans"
        )
    num_bytes = 0 if nvme is None else parse_bytes(nvme, "--nvme")
    if folder is not None:
        _check_folder(folder, sweep.budgets[-1] if sweep is not None and swept else num_bytes)
    return {"nvme_bytes": num_bytes, "executable_only": not not_executable}


def _check_folder(folder: Path, num_bytes: int) -> None:
    if not num_bytes:
        raise UsageError(f"--nvme-dir: {folder}: how much of it may be used is missing; add for example --nvme 200GB")
    if not folder.is_dir():
        raise UsageError(f"--nvme-dir: {folder}: no such folder; make it first, or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--nvme-dir: {folder}: cannot be written; name a folder you may write")
    free_bytes = shutil.disk_usage(folder).free
    if num_bytes > free_bytes:
        raise UsageError(
            f"--nvme: {format_bytes(num_bytes)} is more than the {format_bytes(free_bytes)} that are free in {folder}; "
            f"give less, make room, or name another --nvme-dir"
        )


def without_unexecuted_files(settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` as ``solve`` can use them; says so where they allow files that the runtime does not execute yet."""
    num_bytes = settings["nvme_bytes"]
    if not num_bytes or not settings["executable_only"] or executes_files():
        return settings
    warn(
        plain_console(stderr=True),
        f"--nvme {format_bytes(num_bytes)}: the runtime does not execute files yet, so this plan uses none; "
        f"--not-executable shows one that does",
    )
    return {**settings, "nvme_bytes": 0}


def say_if_not_executable(plan: Plan, console: Console) -> None:
    """A line for a plan that ``train`` would refuse."""
    try:
        check_executable(plan)
    except UsageError as error:
        reason = str(error).removeprefix("plan: ").partition(";")[0]
        console.print(f"only to look at, train refuses it: {reason}", highlight=False, markup=False, soft_wrap=True)
