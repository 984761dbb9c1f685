"""What the runtime executes of all that a plan can say: the one list that ``solve`` and the runtime go by.

``lower`` and the simulator know every plan that is consistent; ``solve`` emits only what is listed here, and a session
refuses the rest when it opens. What the runtime learns is switched on by one more entry.
"""

from __future__ import annotations

from lazysched.errors import UsageError
from lazysched.schemas.base import Tier
from lazysched.schemas.plan import Plan, StagePlan

WEIGHT_TIERS: tuple[Tier, ...] = ("gpu", "host")
STATE_TIERS: tuple[Tier, ...] = ("gpu", "host")
INPUT_TIERS: tuple[Tier, ...] = ("gpu", "host")
SAVED_TIERS: tuple[Tier, ...] = ("gpu", "host")
SEGMENTS: tuple[int, ...] = (1,)
"""Lengths of segments of blocks."""
UPDATE_MODES: tuple[str, ...] = ("exact",)


def executes_files() -> bool:
    """Whether the runtime executes plans that have anything in files, the tier ``nvme``."""
    return "nvme" in {*WEIGHT_TIERS, *STATE_TIERS} | (set(SAVED_TIERS) & set(INPUT_TIERS))


def check_executable(plan: Plan) -> None:
    """Refuse decisions that the runtime does not execute.

    Raises:
        UsageError: the first of them, with what to use instead.
    """
    if plan.update.mode not in UPDATE_MODES:
        raise UsageError(f"plan: update.mode: {plan.update.mode!r} is not executable; use {_either(UPDATE_MODES)}")
    for stage_id, choice in plan.stages.items():
        _check_choice(f"plan: stages.{stage_id}", choice)


def _check_choice(where: str, choice: StagePlan) -> None:
    found = [
        ("weights", choice.weights, WEIGHT_TIERS), ("state", choice.state, STATE_TIERS),
        ("input_tier", choice.input_tier, INPUT_TIERS), ("segment", choice.segment, SEGMENTS),
        *((f"saved_tiers.{group}", tier, SAVED_TIERS) for group, tier in choice.saved_tiers.items()),
    ]  # fmt: skip
    for field, value, executable in found:
        if value not in executable:
            raise UsageError(f"{where}.{field}: {value} is not executable yet; use {_either(executable)}")


def _either(values: tuple[object, ...]) -> str:
    return " or ".join(map(str, values))
