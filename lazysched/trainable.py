"""Which parameters are trained: patterns over their names, and what that makes of the stages of a model.

A frozen parameter keeps its bits: it has no gradient, no optimizer state and no update, and counts for nothing in the
gradient norm. Blocks before the first trained parameter have no backward either.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from lazysched.errors import UsageError
from lazysched.flat_store import flat_bytes
from lazysched.schemas import Plan, Stage

Training = Literal["trained", "partly trained", "frozen", "no backward"]
"""Of a stage: all or some of its parameters are trained; or none, and gradients pass through it or end before it."""
FROZEN: tuple[Training, ...] = ("frozen", "no backward")


def select_trained(stages: Sequence[Stage], patterns: Sequence[str]) -> list[Stage]:
    """``stages`` of which only the parameters are trained in whose name a pattern is found.

    Blocks of one structure that are not trained alike get structures of their own: ``X-frozen`` has a backward and
    trains nothing, ``X-forward`` has none, ``X-part0`` and so on train some of their parameters.

    Args:
        stages: of the model, all trained.
        patterns: regular expressions, looked for anywhere in the name of a parameter; none trains everything.

    Raises:
        UsageError: a pattern is empty or no regular expression, or no name has it.
    """
    if not patterns:
        return list(stages)
    names = [name for stage in stages for name in stage.params]
    expressions = [_compiled(pattern) for pattern in patterns]
    for expression in expressions:
        if not any(map(expression.search, names)):
            raise _matches_nothing(expression.pattern, stages)
    chosen = {name for name in names if any(expression.search(name) for expression in expressions)}
    marked = [stage.model_copy(update={"trainable": _trainable(stage, chosen)}) for stage in stages]
    return _with_structures(marked)


def patterns_of(given: Sequence[str] | None) -> tuple[str, ...]:
    """Patterns as a user gives them; None, for everything, becomes none.

    Raises:
        UsageError: an empty list, which would train nothing, an empty pattern, or one that is no regular expression.
    """
    if given is not None and not given:
        raise UsageError("trainable: no pattern, so that nothing would be trained; leave it out to train everything")
    for pattern in given or ():
        _compiled(pattern)
    return tuple(given or ())


def trained_part(stage: Stage, element_bytes: int) -> Stage:
    """The trained parameters of ``stage`` as a stage: gradients and optimizer state are laid out as its flat store.

    Args:
        stage: of which some parameters may be frozen.
        element_bytes: of the computing dtype.
    """
    if stage.trainable is True:
        return stage
    params = stage.trained_params
    size = flat_bytes(params, element_bytes)
    return stage.model_copy(update={"params": params, "weight_bytes": size, "trainable": True})


def first_trained(stages: Sequence[Stage]) -> int:
    """Where in ``stages`` the first is that trains anything, at which the backward ends; their number if none does."""
    return next((place for place, stage in enumerate(stages) if stage.is_trained), len(stages))


def training_of(stages: Sequence[Stage]) -> dict[str, Training]:
    """What training does with each stage of a model, by its name."""
    first = first_trained(stages)
    return {stage.id: _training(stage, place >= first) for place, stage in enumerate(stages)}


def _training(stage: Stage, has_backward: bool) -> Training:
    if not stage.is_trained:
        return "frozen" if has_backward else "no backward"
    return "trained" if len(stage.trained_params) == len(stage.params) else "partly trained"


def check_trained(patterns: Sequence[str], plan: Plan) -> None:
    """Refuse ``patterns`` that train other parameters than ``plan`` does.

    Without the profile in the plan, nobody knows the names yet: the patterns must be the plan's then.

    Raises:
        UsageError: they do, or a pattern is in no name.
    """
    if set(patterns) == set(plan.trainable):
        return
    if plan.profile is not None and trains(patterns, plan.profile.stages):
        return
    planned = ", ".join(plan.trainable) or "everything"
    raise UsageError(
        f"trainable: {', '.join(patterns)}, the plan trains {planned}; profile and solve for it, or leave it out"
    )


def trains(patterns: Sequence[str], stages: Sequence[Stage]) -> bool:
    """Whether ``patterns`` choose what is trained of ``stages``."""
    whole = [stage.model_copy(update={"trainable": True}) for stage in stages]
    chosen = select_trained(whole, patterns)
    return [stage.trained_params for stage in chosen] == [stage.trained_params for stage in stages]


def trained_share(stages: Sequence[Stage]) -> str:
    """How many parameters are trained, of how many, for people to read."""
    trained, total = (sum(getattr(stage, name) for stage in stages) for name in ("num_trained", "num_params"))
    return f"{trained:,} of {total:,} parameters ({100 * trained / total:.3g} %)"


def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern:
        raise UsageError("trainable: '' is in every name; leave trainable out to train everything")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"trainable: {pattern!r} is no regular expression ({error}); mend it") from None


def _matches_nothing(pattern: str, stages: Sequence[Stage]) -> UsageError:
    tied = any(stage.shares is not None for stage in stages)
    example = next(name for stage in stages if stage.is_block for name in stage.params)
    matrix = next(iter(stages[0].params))
    hint = f"; the output embedding is tied, it is {matrix}" if tied else ""
    return UsageError(f"trainable: {pattern!r} is in no parameter's name; they look like {example}{hint}")


def _trainable(stage: Stage, chosen: set[str]) -> bool | tuple[str, ...]:
    names = tuple(name for name in stage.params if name in chosen)
    return names if 0 < len(names) < len(stage.params) else bool(names)


def _with_structures(stages: Sequence[Stage]) -> list[Stage]:
    first, parts = first_trained(stages), dict[tuple[str, tuple[bool, ...]], int]()
    result = []
    for place, stage in enumerate(stages):
        if stage.is_block and stage.trainable is not True:
            places = tuple(name in stage.trained_params for name in stage.params)
            kind = f"part{parts.setdefault((stage.structure, places), len(parts))}" if any(places) else "frozen"
            kind = "forward" if place < first else kind
            stage = stage.model_copy(update={"structure": f"{stage.structure}-{kind}"})
        result.append(stage)
    return result
