"""A plan that is still to be made: what is known of it before, so that all that needs no more is checked first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lazysched.schemas import Plan


@dataclass(frozen=True)
class PlanToMake:
    """Stands for a plan until the run's arguments, model, data and checkpoint are known to be usable.

    Attributes:
        batch_size: rows of a step.
        seq_len: tokens of a row.
        packing: whether rows hold several samples.
        trainable: patterns of what is trained; none: everything.
        make: makes the plan, which may take minutes; it has the values above.
    """

    batch_size: int
    seq_len: int
    packing: bool
    trainable: tuple[str, ...]
    make: Callable[[], Plan]
