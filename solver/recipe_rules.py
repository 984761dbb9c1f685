"""The fixed recipes that a solved plan is compared with, each as a rule for every block alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from lazysched.schemas import Tier
from lazysched.solver.options import Scope


@dataclass(frozen=True)
class Rule:
    """What a recipe prescribes.

    Attributes:
        name: shown to the user.
        saves: ``most`` or ``least`` that a variant can save in every block, or any ``one`` variant for all blocks.
        tiers: where that may go; with several, any number of blocks may use each.
        streams_all: every stage has its state on the host, and every block its weights.
        segment: blocks of a segment, or the ``root`` of their number; those left over checkpoint every block.
    """

    name: str
    saves: Literal["most", "least", "one"]
    tiers: tuple[Tier, ...] = ("gpu",)
    streams_all: bool = False
    segment: int | Literal["root"] = 1

    def length(self, num_blocks: int) -> int:
        """Blocks of a segment."""
        return max(1, round(math.sqrt(num_blocks))) if self.segment == "root" else min(self.segment, num_blocks)

    def within(self, scope: Scope) -> Rule | None:
        """The rule with the tiers of ``scope``; None where it has none or no segments."""
        tiers = tuple(tier for tier in self.tiers if tier in scope.saved)
        whole = self.segment == 1 or max(scope.segments) > 1
        return replace(self, tiers=tiers) if tiers and whole else None


RULES = (
    Rule("keep all activations", "most"),
    Rule("checkpoint every block", "least"),
    Rule("checkpoint every block, inputs on host", "least", ("host",)),
    Rule("segments of the square root of the number of blocks", "one", segment="root"),
    Rule("one variant for all blocks", "one"),
    Rule("everything streamed, inputs kept", "least", streams_all=True),
    Rule("everything streamed, segments of four blocks", "one", streams_all=True, segment=4),
    Rule("everything streamed, inputs anywhere", "least", ("gpu", "host", "nvme"), streams_all=True),
)
"""The last but one is MegaTrain's, the last LazyTrain's."""


def rules_within(scope: Scope) -> list[Rule]:
    """Those of ``RULES`` whose plans are in ``scope``."""
    return [rule for rule in (rule.within(scope) for rule in RULES) if rule is not None]
