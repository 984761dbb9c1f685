"""Decisions fixed by hand, ``block[0:4].weights=gpu``: the solver finds the rest.

A pin names stages, a field of ``StagePlan`` and its value. Blocks are chosen by index or Python slice; ``saved_tiers``
means the tier of everything that a block saves beside its input. ``block.3``, as tables call it, is ``block[3]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from lazysched.errors import UsageError
from lazysched.schemas import Plan, Stage, StagePlan, Tier
from lazysched.units import parse_slice

FIELDS = ("weights", "state", "save", "input_tier", "saved_tiers")
_PIN = re.compile(r"\s*(embed|head|block)\s*(?:\[([^\]]*)\]|\.(\d+))?\s*\.\s*(\w+)\s*=\s*(\S+)\s*")
_OF_THE_STEP = re.compile(r"\s*(micro_batch|accumulation|batch_size)\s*=.*")
_EXAMPLE = "write for example block[0:4].weights=gpu"


@dataclass(frozen=True)
class Pin:
    """One field of the stages ``stage_ids``, as the user wrote it in ``text``."""

    text: str
    stage_ids: frozenset[str]
    field: str
    value: str

    @property
    def of_saving(self) -> bool:
        """Whether it fixes what a block saves, and where."""
        return self.field not in ("weights", "state")

    def allows(self, choice: StagePlan) -> bool:
        """Whether ``choice`` has the pinned value."""
        if self.field == "saved_tiers":
            return set(choice.saved_tiers.values()) <= {self.value}
        return str(getattr(choice, self.field)) == self.value


def parse_pins(texts: Iterable[str], stages: Sequence[Stage]) -> tuple[Pin, ...]:
    """Pins on the stages of a model.

    Args:
        texts: as ``block[0:4].weights=gpu``, ``block[7].save=input``, ``block.state=host`` or ``head.weights=gpu``.
        stages: of the model.

    Raises:
        UsageError: a text is no pin, names no stage of the model, an unknown field, or no tier where one is meant.
    """
    return tuple(_parse_pin(text, stages) for text in texts)


def kept_pins(plan: Plan, stages: Sequence[Stage]) -> tuple[Pin, ...]:
    """The plan's pins that it still keeps to: who edits against a pin by hand has given it up.

    Raises:
        UsageError: as ``parse_pins``.
    """
    pins = parse_pins(plan.pins, stages)
    return tuple(pin for pin in pins if all(pin.allows(plan.stages[stage_id]) for stage_id in pin.stage_ids))


def of_stage(pins: Iterable[Pin], stage: Stage) -> tuple[Pin, ...]:
    """Those of ``pins`` that fix something of ``stage``."""
    return tuple(pin for pin in pins if stage.id in pin.stage_ids)


def _parse_pin(text: str, stages: Sequence[Stage]) -> Pin:
    match = _PIN.fullmatch(text)
    if match is None:
        raise UsageError(f"pin: {text!r} is no decision{_remedy(text)}")
    kind, where, number, field, value = match.groups()
    where = number if where is None else where
    if field not in FIELDS:
        raise UsageError(f"pin: {text!r}: field {field!r} cannot be fixed; use one of {', '.join(FIELDS)}")
    if field not in ("weights", "state") and kind != "block":
        raise UsageError(f"pin: {text!r}: only blocks save tensors; fix weights or state of {kind}")
    if field != "save" and value not in get_args(Tier):
        raise UsageError(f"pin: {text!r}: {value!r} is no tier; use {', '.join(get_args(Tier))}")
    return Pin(text.strip(), frozenset(_stage_ids(text, kind, where, stages)), field, value)


def _remedy(text: str) -> str:
    step = _OF_THE_STEP.fullmatch(text)
    if step is None:
        return f"; {_EXAMPLE}"
    if step[1] == "batch_size":
        return " about a stage; use --batch-size"
    return " about a stage; --micro-batch fixes how many rows go through at once, and with --batch-size how often"


def _stage_ids(text: str, kind: str, where: str | None, stages: Sequence[Stage]) -> list[str]:
    blocks = [stage.id for stage in stages if stage.is_block]
    if kind != "block":
        if where is not None:
            raise UsageError(f"pin: {text!r}: there is one {kind}; leave [{where}] out")
        return [kind]
    if where is None:
        return blocks
    if re.fullmatch(r"\s*-?[0-9]{1,18}\s*", where):
        index = int(where)
        chosen = blocks[index : index + 1 or None]
    else:
        chosen = blocks[_slice_within(text, where, len(blocks))]
    if not chosen:
        raise UsageError(f"pin: {text!r}: names none of the {len(blocks)} blocks; count them from 0")
    return chosen


def _slice_within(text: str, where: str, num_blocks: int) -> slice:
    """The slice, whose ends are among the blocks: one of too many was meant for another model."""
    chosen = parse_slice(where, f"pin: {text!r}")
    for end in (chosen.start, chosen.stop):
        if end is not None and not -num_blocks <= end <= num_blocks:
            raise UsageError(f"pin: {text!r}: {end} is out of range, there are {num_blocks} blocks, counted from 0")
    return chosen
