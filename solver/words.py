"""Plans and differences in words that fit a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lazysched.schemas import Engine, StagePlan, Tier
from lazysched.trainable import FROZEN, Training
from lazysched.units import format_bytes, format_seconds


def stages_in_words(names: Sequence[str]) -> str:
    """``block.1..4, 7, head``: stages in forward order, runs of blocks joined."""
    parts: list[str] = []
    run: list[int] = []
    for name in [*names, ""]:
        number = int(name.removeprefix("block.")) if name.startswith("block.") else None
        if run and number != run[-1] + 1:
            is_first = not any(part.startswith("block.") for part in parts)
            span = f"{run[0]}" if len(run) == 1 else f"{run[0]}..{run[-1]}"
            parts.append(f"block.{span}" if is_first else span)
            run = []
        if number is not None:
            run.append(number)
        elif name:
            parts.append(name)
    return ", ".join(parts)


def weights_in_words(choice: StagePlan) -> str:
    """Where a stage's weights are."""
    return "on gpu" if choice.weights == "gpu" else f"streamed from {choice.weights}"


def saves_in_words(choice: StagePlan, training: Training = "trained") -> str:
    """What a block saves for its backward, and where."""
    if training == "no backward":
        return "nothing"
    rest = sorted(set(choice.saved_tiers.values()))
    place = f"on {' + '.join(rest or [choice.input_tier])}"
    if rest and rest != [choice.input_tier]:
        place += f", its input on {choice.input_tier}"
    segment = "" if choice.segment == 1 else f", segments of {choice.segment}"
    return f"{choice.save} {place}{segment}"


def state_in_words(choice: StagePlan, training: Training = "trained") -> str:
    """The optimizer state of a stage, and where it is."""
    if training in FROZEN:
        return "none: frozen"
    part = ", of a part" if training == "partly trained" else ""
    return f"{choice.state_format} on {choice.state}{part}"


def choice_in_words(choice: StagePlan, is_block: bool, training: Training = "trained") -> str:
    """All decisions about one stage that mean something."""
    part = " of the trained part" if training == "partly trained" else ""
    state = f"{choice.state_format} state{part} on {choice.state}"
    words = f"weights {weights_in_words(choice)}, {'frozen: no gradients, no state' if training in FROZEN else state}"
    return f"{words}, saves {saves_in_words(choice, training)}" if is_block else words


def sizes_in_words(num_bytes: Mapping[str, int] | Mapping[Engine, int] | Mapping[Tier, int]) -> str:
    """``gpu 1.2 GB, host 30 MB``; what is 0 is left out."""
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in num_bytes.items() if size) or "nothing"


def times_in_words(seconds: Mapping[Engine, float]) -> str:
    """``d2h 31 ms, h2d 8.5 ms``; what is 0 is left out."""
    return ", ".join(f"{engine} {format_seconds(s)}" for engine, s in seconds.items() if s > 0) or "nothing"


def join(parts: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    listed = list(parts)
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}" if listed else ""
