"""How a probe looks at one thing and says what it found: ok, a problem with its remedy, or unknown with why.

A probe that raises, or does not answer in time, is unknown: never ok when it could not look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from lazysched.doctor.report import Finding, Status

T = TypeVar("T")
LOOK_TIMEOUT_S = 20.0
"""A file on a network that has gone, or of a driver that is stuck, may never answer."""


class CannotLook(Exception):
    """What a probe wanted to see cannot be seen; the message says why."""


@dataclass(frozen=True)
class Verdict:
    """What a probe found."""

    status: Status
    detail: str
    remedy: str | None = None


def ok(detail: str) -> Verdict:
    """It was looked at and is as it should be."""
    return Verdict("ok", detail)


def problem(detail: str, remedy: str) -> Verdict:
    """It was looked at and should be otherwise; ``remedy`` says what to do."""
    return Verdict("problem", detail, remedy)


@dataclass(frozen=True)
class Probe:
    """One thing to look at.

    Attributes:
        name: by which the report calls it.
        look: returns a verdict; raises :class:`CannotLook`, or anything else, where it could not look.
        timeout_s: after which it counts as unknown; None for a probe that ends by itself, as one in a child process.
    """

    name: str
    look: Callable[[], Verdict]
    timeout_s: float | None = LOOK_TIMEOUT_S

    def run(self) -> Finding:
        """Look, whatever happens."""
        try:
            verdict = self.look() if self.timeout_s is None else within(self.timeout_s, self.look)
        except CannotLook as reason:
            verdict = Verdict("unknown", str(reason))
        except Exception as error:  # whatever a machine may do to a probe, the others still run
            verdict = Verdict("unknown", f"the probe failed: {type(error).__name__}: {error}")
        detail = " ".join(verdict.detail.split())
        return Finding(probe=self.name, status=verdict.status, detail=detail, remedy=verdict.remedy)


class Later(Generic[T]):
    """A fact that several probes want and that is found out once, when the first one asks."""

    def __init__(self, find: Callable[[], T]) -> None:
        self._find = find
        self._found: list[T] = []
        self._reason: CannotLook | None = None

    def __call__(self) -> T:
        """The fact.

        Raises:
            CannotLook: it could not be found out; every time, for the same reason.
        """
        if self._reason is not None:
            raise self._reason
        if not self._found:
            try:
                self._found.append(self._find())
            except CannotLook as reason:
                self._reason = reason
                raise
        return self._found[0]


def within(timeout_s: float, work: Callable[[], T]) -> T:
    """What ``work`` returns or raises.

    Raises:
        CannotLook: it takes longer; it is left behind on a thread that does not keep the process alive.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # carried over to the thread that asked
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise CannotLook(f"no answer within {timeout_s:g} s")
    return results[0]


def read_text(path: Path) -> str:
    """Content of a small file of the system, without white space around it.

    Raises:
        CannotLook: it is absent or cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise CannotLook(f"{path} cannot be read ({error.strerror or error})") from None
