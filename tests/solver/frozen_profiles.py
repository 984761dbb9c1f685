"""Synthetic profiles of models of which some parameters are frozen."""

from __future__ import annotations

import random
import re

from lazysched.schemas import Profile, SaveVariant
from lazysched.trainable import first_trained, select_trained
from tests.solver.synthetic import timing

BACKWARD_SHARE = {"frozen": 0.5, "part": 0.75}
"""Of the time of a backward with all weight gradients."""


def with_two_matrices(profile: Profile) -> Profile:
    """Every stage has two parameters, ``w`` and ``v``, of half the size."""
    stages = []
    for stage in profile.stages:
        half = stage.num_params // 2
        params = {f"{stage.id}.w": (half, 1), f"{stage.id}.v": (stage.num_params - half, 1)}
        stages.append(stage.model_copy(update={"params": params}))
    return profile.model_copy(update={"stages": stages})


def with_frozen(profile: Profile, trained: list[str]) -> Profile:
    """The profile of the same model with only the parameters of these names trained."""
    patterns = [f"^{re.escape(name)}$" for name in trained]
    stages = select_trained(profile.stages, patterns)
    variants = dict(profile.variants)
    for stage in stages[1:-1]:
        whole, _, kind = stage.structure.partition("-")
        if kind:
            variants[stage.structure] = {
                size: _without_gradients(listed, kind) for size, listed in profile.variants[whole].items()
            }
    if first_trained(stages) > 0:
        ends = {"backward": timing(0.0), "working_backward_bytes": 0}
        variants["embed"] = {size: [v.model_copy(update=ends) for v in all] for size, all in variants["embed"].items()}
    return profile.model_copy(update={"stages": stages, "variants": variants, "trainable": patterns})


def _without_gradients(variants: list[SaveVariant], kind: str) -> list[SaveVariant]:
    if kind == "forward":
        least = {"backward": timing(0.0), "working_backward_bytes": 0}
        return [v.model_copy(update=least) for v in variants if list(v.saved) == ["input"]]
    share = BACKWARD_SHARE[kind.rstrip("0123456789")]
    return [v.model_copy(update={"backward": timing(share * v.backward.seconds)}) for v in variants]


def randomly_frozen(profile: Profile, generator: random.Random) -> Profile:
    """Some parameters frozen, as often as not all of the first stages."""
    profile = with_two_matrices(profile)
    stages = profile.stages[generator.choice([0, generator.randrange(len(profile.stages))]) :]
    names = [name for stage in stages for name in stage.params]
    trained = [name for name in names if generator.random() < generator.choice([0.2, 0.5, 1.0])]
    return with_frozen(profile, trained or names[-1:])
