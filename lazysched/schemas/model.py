"""What the solver and ``lower`` know of a model: its stages, without any tensor."""

from __future__ import annotations

import math

from pydantic import Field, model_validator

from lazysched.schemas.base import Schema


class Stage(Schema):
    """One unit of streaming: the embedding, one decoder block, or the output head with the loss."""

    id: str
    """``embed``, ``block.<i>`` or ``head``."""
    structure: str
    """Key of the block template; equal structure means equal shapes and times."""
    params: dict[str, tuple[int, ...]]
    """Own parameters, checkpoint name -> shape, in the order of the flat store. The final norm sits in ``head``."""
    weight_bytes: int = Field(ge=0)
    """Own weights in the computing dtype, alignment included."""
    shares: str | None = None
    """A tied head says ``embed``: one store, one gradient sum, one update."""
    trainable: bool | tuple[str, ...] = True
    """Own parameters that are trained: all, none, or those of these names. Frozen ones have no gradient, no optimizer
    state and no update."""

    @model_validator(mode="after")
    def _trained_are_own(self) -> Stage:
        odd = [] if isinstance(self.trainable, bool) else [name for name in self.trainable if name not in self.params]
        if odd:
            raise ValueError(f"trainable: {odd[0]!r} is none of the stage's parameters")
        return self

    @property
    def num_params(self) -> int:
        """Number of own parameters, shared ones not counted."""
        return sum(math.prod(shape) for shape in self.params.values())

    @property
    def trained_params(self) -> dict[str, tuple[int, ...]]:
        """Own parameters that are trained, in the order of the flat store."""
        if isinstance(self.trainable, bool):
            return dict(self.params) if self.trainable else {}
        return {name: shape for name, shape in self.params.items() if name in self.trainable}

    @property
    def num_trained(self) -> int:
        """Number of own parameters that are trained."""
        return sum(math.prod(shape) for shape in self.trained_params.values())

    @property
    def is_trained(self) -> bool:
        """Whether any own parameter is trained."""
        return bool(self.trained_params)

    @property
    def is_block(self) -> bool:
        """Whether this is a decoder block."""
        return self.id.startswith("block.")
