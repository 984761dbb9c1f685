"""Ctrl-C and SIGTERM while a run trains: the first finishes the step and saves, the second ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StopSignals:
    """Notes the first signal while it is entered; as soon as it came, signals do what they did before.

    Args:
        tell: called with one line when the signal comes.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._before: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None
        """The signal that came."""

    @property
    def exit_code(self) -> int:
        """What a shell shows of a program that the signal ended."""
        assert self.received is not None
        return 128 + self.received

    @property
    def name(self) -> str:
        """The signal as people know it."""
        assert self.received is not None
        return SIGNALS[self.received]

    def __call__(self) -> bool:
        """Whether the run has to stop."""
        return self.received is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # other threads get no signals
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()
        self._tell(f"{self.name}: finishing the step, then saving; a second one ends at once")

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # A handler that was not set from Python cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
