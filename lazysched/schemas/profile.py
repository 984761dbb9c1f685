"""Profile: what the machine and the model were measured to do. Bytes, seconds, bytes per second."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lazysched.schemas.base import AttentionBackend, Document, Dtype, Schema, Tier
from lazysched.schemas.model import Stage

UNCOMPILED_NOTE = "compile."
"""Notes of a profile whose key begins so say what could not be compiled, and why."""
NOISY_SPREAD = 0.25
"""Interquartile range over median above which a figure is in doubt."""


def interquartile(values: Sequence[float]) -> float:
    """Distance between the quartiles of ``values``; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


class Timing(Schema):
    """Median over repeats, or null with a reason."""

    median_s: float | None = Field(ge=0)
    """Median duration in seconds."""
    spread_s: float = Field(default=0.0, ge=0)
    """Interquartile range in seconds."""
    repeats: int = Field(default=0, ge=0)
    """Number of timed repeats."""
    reason: str | None = None
    """Why there is no figure."""

    @model_validator(mode="after")
    def _null_has_reason(self) -> Timing:
        if self.median_s is None and not self.reason:
            raise ValueError("a figure that is null needs a reason")
        return self

    @classmethod
    def of(cls, durations_s: Sequence[float]) -> Timing:
        """Median and interquartile range of at least one duration."""
        return cls(
            median_s=statistics.median(durations_s), spread_s=interquartile(durations_s), repeats=len(durations_s)
        )

    @property
    def seconds(self) -> float:
        """The median; a figure that was not measured is a caller's error."""
        if self.median_s is None:
            raise ValueError(f"not measured: {self.reason}")
        return self.median_s


class SaveVariant(Schema):
    """One form of a stage at one micro-batch: what its forward keeps for its backward, and what that costs.

    For a block, ``backward`` includes whatever it recomputes and putting the weight gradients, in the computing dtype,
    where they belong; what summing them in fp32 takes beyond that depends on the accumulation.
    For the head, ``forward`` is the loss alone and ``backward`` the loss with its gradient in one pass, the only
    one that a training step runs. The embedding and the head have one variant, ``all``.
    """

    name: str
    """What it saves: ``all``, ``input``, or values per token, as ``18944x2+3584``."""
    compiled: bool = False
    """Whether the graph is compiled."""
    budget: float | None = None
    """The partitioner's activation memory budget; kept only to rebuild the same graph."""
    saved: dict[str, Annotated[int, Field(ge=0)]]
    """Tensor group -> bytes per micro-batch; a block always has ``input``, its checkpoint."""
    forward: Timing
    backward: Timing
    working_forward_bytes: int = Field(ge=0)
    """Most bytes beyond input, output and what is saved while the forward runs; the embedding's output is counted."""
    working_backward_bytes: int = Field(ge=0)
    """Most bytes beyond what was there before the backward began and the slot of the input's gradient."""

    @property
    def saved_bytes(self) -> int:
        """Bytes of everything saved beside the input, per micro-batch."""
        return sum(size for group, size in self.saved.items() if group != "input")


class Curve(Schema):
    """Throughput of a link by the size of a request."""

    points: list[tuple[int, float]] = Field(default_factory=list)
    """(request bytes, bytes per second), sizes ascending."""
    reason: str | None = None
    """Why there are no points."""
    spread: float | None = Field(default=None, ge=0)
    """Interquartile range over the median of the largest request's repeats; null where it is not known."""

    @classmethod
    def of(cls, durations_s: Mapping[int, Sequence[float]]) -> Curve:
        """The curve of request bytes -> seconds of each repeat, sizes ascending."""
        medians_s = {size: statistics.median(repeats_s) for size, repeats_s in durations_s.items()}
        largest = max(medians_s)
        return cls(
            points=[(size, size / median_s) for size, median_s in medians_s.items()],
            spread=interquartile(durations_s[largest]) / medians_s[largest],
        )

    @model_validator(mode="after")
    def _ascending_or_reason(self) -> Curve:
        sizes = [size for size, _ in self.points]
        if sizes != sorted(set(sizes)) or any(rate <= 0 for _, rate in self.points):
            raise ValueError("points must have ascending sizes and positive rates")
        if not self.points and not self.reason:
            raise ValueError("a curve without points needs a reason")
        return self

    def rate_bytes_per_s(self, num_bytes: int) -> float:
        """Throughput for one request of ``num_bytes``, linear between points, flat outside them.

        Raises:
            ValueError: the curve was not measured.
        """
        if not self.points:
            raise ValueError(f"not measured: {self.reason}")
        position = bisect_left(self.points, (num_bytes, 0.0))
        if position == 0:
            return self.points[0][1]
        if position == len(self.points):
            return self.points[-1][1]
        (low, low_rate), (high, high_rate) = self.points[position - 1 : position + 1]
        return low_rate + (high_rate - low_rate) * (num_bytes - low) / (high - low)

    def seconds(self, num_bytes: int) -> float:
        """Time of one request of ``num_bytes``."""
        return num_bytes / self.rate_bytes_per_s(num_bytes) if num_bytes else 0.0


class Rate(Schema):
    """Work per second, or null with a reason."""

    per_s: float | None = Field(gt=0)
    """Median rate: parameters per second for updates."""
    spread: float = Field(default=0.0, ge=0)
    """Interquartile range over the median."""
    repeats: int = Field(default=0, ge=0)
    reason: str | None = None

    @model_validator(mode="after")
    def _null_has_reason(self) -> Rate:
        if self.per_s is None and not self.reason:
            raise ValueError("a figure that is null needs a reason")
        return self


class Profile(Document):
    """Measurements of one model on one machine; the only source of durations."""

    version: Literal[1] = 1
    hardware_id: str
    """Fingerprint of the machine: device name, its memory, processor, cores."""
    model_id: str
    """Fingerprint of the model: architecture, shapes, ties; not the values of its weights."""
    device: Literal["cuda", "cpu"]
    """What computed."""
    compute_dtype: Dtype
    seq_len: int = Field(ge=1)
    """Tokens of one row."""
    loss_chunk_tokens: int = Field(ge=1)
    """Tokens whose logits exist at once in the head."""
    attention: AttentionBackend = "default"
    """Kernel of torch's attention that was fastest; all variants run with it."""
    full_determinism: bool = False
    """Whether a GPU's blocks kept to attention kernels whose backward adds in one order: equal runs, equal bits."""
    packing: bool = False
    """Whether blocks were measured with rows of several samples, which do not see each other."""
    trainable: list[str] = Field(default_factory=list)
    """Regular expressions: parameters in whose name one is found are trained, ``stages`` says which; none: all."""
    argument_bytes: dict[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Micro-batch -> GPU bytes of the masks and position tables of its packed rows; empty without packing."""
    estimated: bool = False
    """Whether any figure was computed, not measured."""
    stages: list[Stage]
    """In forward order: ``embed``, ``block.0`` ..., ``head``."""
    variants: dict[str, dict[Annotated[int, Field(ge=1)], list[SaveVariant]]]
    """structure -> micro-batch (rows) -> variants."""
    links: dict[str, Curve]
    """``h2d d2h h2d_both d2h_both host gpu nvme_read nvme_write``, and the first four to and from memory that is not
    page-locked: ``h2d_pageable d2h_pageable h2d_pageable_both d2h_pageable_both``; ``gpu``: inside GPU memory, reads +
    writes."""
    update: dict[Literal["cpu", "gpu"], dict[str, Rate]]
    """processor -> state format -> parameters per second, with nothing beside it."""
    update_beside_copies: dict[str, Rate] = Field(default_factory=dict)
    """state format -> parameters per second on the host while copies keep both directions between host and GPU busy,
    which share the host's memory with the update; a format that is absent is updated as fast as alone."""
    collectives: dict[str, Curve] = Field(default_factory=dict)
    """Empty on one GPU."""
    total_bytes: dict[Tier, int | None]
    """Memory of each tier; null where there is none."""
    free_bytes: dict[Tier, int | None]
    """What was free when measuring; control-group limits respected."""
    pin_limit_bytes: int | None = None
    """Most bytes of host memory that can be page-locked; null when no limit was stated or met."""
    context_bytes: int = Field(default=0, ge=0)
    """GPU memory that the driver context and library workspaces take outside any plan."""
    workspace_bytes: int = Field(default=0, ge=0)
    """Of ``context_bytes``, library workspaces that lie inside torch's allocator, as cuBLAS' do."""
    fragmentation_bytes: dict[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Micro-batch -> what the GPU's allocator held beyond what it gave out, while some blocks ran in a row."""
    notes: dict[str, str] = Field(default_factory=dict)
    """Versions, device names, and what a reader should know."""

    @model_validator(mode="after")
    def _packed_sizes_are_known(self) -> Profile:
        measured = {size for by_size in self.variants.values() for size in by_size}
        missing = measured - set(self.argument_bytes) if self.packing else set(self.argument_bytes)
        if missing:
            state = "missing" if self.packing else "given without packing"
            raise ValueError(f"argument_bytes of micro-batch {min(missing)}: {state}; profile again")
        return self

    def copy_slowdown(self, state_format: str) -> float:
        """Seconds that the host's update loses for each second in which one direction copies; 0 where not measured."""
        alone = self.update.get("cpu", {}).get(state_format)
        beside = self.update_beside_copies.get(state_format)
        if alone is None or beside is None or alone.per_s is None or beside.per_s is None:
            return 0.0
        return max(0.0, alone.per_s / beside.per_s - 1) / 2

    def doubts(self) -> list[str]:
        """What a user should know before trusting the figures, one line each; empty when all went as wanted."""
        timings = [
            timing
            for by_size in self.variants.values()
            for variants in by_size.values()
            for variant in variants
            for timing in (variant.forward, variant.backward)
            if timing.median_s is not None
        ]
        rates = [rate for by_format in self.update.values() for rate in by_format.values()]
        noisy = sum(timing.spread_s > NOISY_SPREAD * timing.seconds for timing in timings)
        noisy += sum(rate.spread > NOISY_SPREAD for rate in rates)
        found = [note for key, note in self.notes.items() if key.startswith(UNCOMPILED_NOTE)]
        if not noisy:
            return found
        count = f"{noisy} of {len(timings) + len(rates)} figures vary by more than {100 * NOISY_SPREAD:.0f} %"
        return [*found, f"{count} between repeats; predictions will be off, profile again when the machine is quiet"]
