"""Recording: how long the operations of a run took, by what they did."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lazysched.schemas.base import Document, Dtype, Schema
from lazysched.schemas.profile import Timing

RECORDING_FILE = "measured_ops.json"
"""Its name in the folder that a run writes."""


class TimedOp(Schema):
    """What operations took that do the same: equal cost key, bytes and parameters."""

    cost: tuple[str, ...]
    """The operation's key into a profile."""
    num_bytes: int = Field(ge=0)
    """Bytes that one of them moves."""
    num_params: int = Field(ge=0)
    """Parameters that one of them updates."""
    duration: Timing

    @model_validator(mode="after")
    def _was_timed(self) -> TimedOp:
        if self.duration.median_s is None:
            raise ValueError("duration must have a median")
        return self


class Recording(Document):
    """Durations of the operations of some steps of a run."""

    version: Literal[1] = 1
    model_id: str
    hardware_id: str
    """Of the machine that ran, which need not be the plan's."""
    compute_dtype: Dtype
    seq_len: int = Field(ge=1)
    """Tokens of one row."""
    micro_batch: int = Field(ge=1)
    """Rows that went through a stage at once."""
    loss_chunk_tokens: int = Field(ge=1)
    """Tokens whose logits exist at once in the head."""
    full_determinism: bool = False
    """The plan's."""
    packing: bool = False
    """Whether rows held several samples."""
    trainable: list[str] = Field(default_factory=list)
    """Patterns of the parameters that were trained; none: all."""
    both_ways: bool
    """Whether host and GPU copied both ways at once."""
    steps: list[int]
    """Steps that were timed, counted from 0."""
    durations: list[TimedOp]
