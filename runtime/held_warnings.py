"""What transformers warns of while it reads a configuration that may turn out to be bad: told once the model is built.

Where it cannot be built, the error says in one line what is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils.logging import get_logger

_held: list[logging.LogRecord] = []


class _Holding(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _held.append(record)


@contextmanager
def warnings_held() -> Iterator[None]:
    """Hold what transformers warns of within, and forget what it warned of before."""
    _held.clear()
    logger = get_logger("transformers")
    handlers, propagates = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [_Holding()], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagates


def tell_held_warnings() -> None:
    """Pass on what is held, as transformers would have."""
    records = [*_held]
    _held.clear()
    for record in records:
        get_logger("transformers").handle(record)
