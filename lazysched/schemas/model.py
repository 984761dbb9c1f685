"""What the solver and ``lower`` know of a model: its stages, without any tensor."""

from __future__ import annotations

import math

from pydantic import Field

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
    trainable: bool = True
    """A frozen stage has no gradient, no optimizer state and no update."""

    @property
    def num_params(self) -> int:
        """Number of own parameters, shared ones not counted."""
        return sum(math.prod(shape) for shape in self.params.values())

    @property
    def is_block(self) -> bool:
        """Whether this is a decoder block."""
        return self.id.startswith("block.")
