"""Ctrl-C while a plan is searched: it stops the search, not the answer.

Python delivers a signal between two of its own instructions, so a program that HiGHS solves in C++ would run to its end
first, and an exception out of a callback would cross C++. Therefore, while a search runs, Ctrl-C raises
``KeyboardInterrupt`` as ever, but inside ``held_back`` it is only noted, for HiGHS' callback to see, and raised after.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """What became of Ctrl-C; there is one handler in a process, and so one object of this class."""

    def __init__(self) -> None:
        self.pending = False
        """Whether Ctrl-C came while it was held back."""
        self._held = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Let ``held_back`` work. A handler of somebody else's is left alone; threads get no signals."""
        mine = threading.current_thread() is threading.main_thread()
        if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._note_or_raise)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Note Ctrl-C in ``pending`` instead of raising it; raise it at the end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            noted, self.pending = self.pending, False
            if noted:
                raise KeyboardInterrupt

    def _note_or_raise(self, _signal: int, _frame: FrameType | None) -> None:
        if not self._held:
            raise KeyboardInterrupt
        self.pending = True


INTERRUPTS = Interrupts()
