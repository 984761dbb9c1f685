"""Errors that a user can meet, each carrying the exit code of the command that shows it.

    LazyschedError            exit 1   anything below; one line: what, value, remedy
    ├── UsageError            exit 2   input that can be named and mended before anything runs (also a ValueError)
    ├── InfeasibleError       exit 1   no plan fits the budgets; carries what is missing and what would help
    ├── TimeLimitError        exit 1   the solver stopped before it found any plan
    ├── StoppedError          exit 130 training was stopped by Ctrl-C, 143 by SIGTERM
    └── RunError              exit 1   training or measuring could not go on
        └── PinError          exit 1   host memory cannot be page-locked; carries how much was

A broken invariant of our own stays an ``AssertionError``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


class LazyschedError(Exception):
    """Base of every error that the command line prints as one line."""

    exit_code = 1


class UsageError(LazyschedError, ValueError):
    """The user's input is wrong; the message names field, value and remedy."""

    exit_code = 2


UNREADABLE_JSON = (OSError, ValueError, RecursionError)
"""What reading and parsing a JSON file raises: no file, no text, no JSON, brackets without end."""


@dataclass(frozen=True)
class MoreMemory:
    """Budgets larger by these bytes; where both of GPU and host are given, neither helps alone."""

    gpu_bytes: int = 0
    host_bytes: int = 0
    nvme_bytes: int = 0
    executable: bool = True
    """False where it takes plans that the runtime does not execute yet, which were not asked for."""


@dataclass(frozen=True)
class SmallerBatch:
    """The largest batch below the one asked for that fits, in rows."""

    batch_size: int


@dataclass(frozen=True)
class SmallerState:
    """Another format of the optimizer state."""

    optimizer_state: str


@dataclass(frozen=True)
class FewerPins:
    """Decisions not fixed by hand."""

    dropped: tuple[str, ...]
    """As they were written."""


Remedy: TypeAlias = MoreMemory | SmallerBatch | SmallerState | FewerPins
"""One change to what was asked, after which a plan was found."""


class InfeasibleError(LazyschedError):
    """No plan fits the memory budgets.

    Attributes:
        missing_bytes: tier -> bytes by which that tier's budget alone would have to grow;
            a tier that cannot help alone is absent.
        remedies: changes each of which suffices; memory that the machine does not have is none.
    """

    def __init__(
        self, message: str, missing_bytes: dict[str, int] | None = None, remedies: Sequence[Remedy] = ()
    ) -> None:
        """Keep shortfall and remedies as data beside the message."""
        super().__init__(message)
        self.missing_bytes = dict(missing_bytes or {})
        self.remedies = tuple(remedies)


class TimeLimitError(LazyschedError):
    """The solver's time limit passed without any feasible plan."""


class StoppedError(LazyschedError):
    """A signal stopped training after a step; the message says what was saved.

    Attributes:
        exit_code: 128 and the signal's number.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        """Keep the exit code beside the message."""
        super().__init__(message)
        self.exit_code = exit_code


class RunError(LazyschedError):
    """Training, measuring or writing failed while it ran."""


class PinError(RunError):
    """The system refuses to page-lock host memory.

    Attributes:
        locked_bytes: what it had locked before.
    """

    def __init__(self, message: str, locked_bytes: int) -> None:
        """Keep what could be locked as data beside the message."""
        super().__init__(message)
        self.locked_bytes = locked_bytes


_MAX_SHOWN_CHARACTERS = 60
_MAX_SHOWN_NUMBER = 10**21


def short_repr(value: Any) -> str:
    """``value`` as a line can show it; an integer of thousands of digits cannot even be written out by Python."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and abs(value) >= _MAX_SHOWN_NUMBER:
        return f"{'-' if value < 0 else ''}1e{math.floor(math.log10(abs(value)))} or more"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "..."


def flag_of(name: str) -> str:
    """The setting as a flag."""
    return f"--{name.replace('_', '-')}"
