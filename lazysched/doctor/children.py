"""Child processes of the doctor: they load torch, and may hang, die or spoil their CUDA context."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError

from lazysched.doctor.looking import CannotLook
from lazysched.schemas import Schema

F = TypeVar("F", bound=Schema)
_LEAVE_S = 5.0
"""A killed process that a driver holds may take for ever to go."""
_CRASHES = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT}


class Crashed(CannotLook):
    """The process died of what it ran; somebody who only stopped it sends other signals."""


def run_program(command: Sequence[str], timeout_s: float) -> str:
    """What a program prints.

    Raises:
        CannotLook: there is no such program, it fails, or takes longer and is killed.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # a probe asks no network
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", env=environment, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise CannotLook(f"{command[0]} cannot be run ({error.strerror})") from None
    try:
        printed, complaints = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise CannotLook(f"no answer within {timeout_s:g} s") from None
    finally:
        if process.poll() is None:  # too late, or Ctrl-C
            _kill(process)
    if process.returncode:
        raise _failure(process.returncode, complaints.strip() or printed.strip())
    return printed


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process with those that it has started, compilers perhaps."""
    os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LEAVE_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def ask_child(task: str, arguments: Sequence[str], kind: type[F], timeout_s: float) -> F:
    """Have a child do one task of :mod:`lazysched.doctor.child`.

    Raises:
        CannotLook: it fails or takes too long.
        Crashed: it dies.
    """
    # The child finds lazysched where this process did.
    code = f"import sys; sys.path[:] = {sys.path!r}; from lazysched.doctor.child import main; main(sys.argv[1:])"
    printed = run_program([sys.executable, "-c", code, task, *arguments], timeout_s)
    try:
        return kind.model_validate_json(printed.splitlines()[-1] if printed else "")
    except ValidationError:
        raise CannotLook("the process that looked gave no readable answer") from None


def _failure(code: int, complaints: str) -> CannotLook:
    last = complaints.splitlines()[-1] if complaints else "without a word"
    if code >= 0:
        return CannotLook(f"failed: {last}")
    kind = Crashed if -code in _CRASHES else CannotLook
    return kind(f"the process was ended by {signal.Signals(-code).name}")
