"""Wall-clock time of a search, held against its limit; every part of the search asks the same one."""

from __future__ import annotations

import time


class Stopwatch:
    """Starts when it is made.

    Args:
        limit_s: seconds after which the time is up.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    @property
    def remaining_s(self) -> float:
        """Seconds up to the limit, negative after it."""
        return self.limit_s - self.elapsed_s

    def has_time(self) -> bool:
        """Whether the limit is still to come."""
        return self.remaining_s > 0


def always() -> bool:
    """There is always time."""
    return True


def never() -> bool:
    """There is no time left."""
    return False
