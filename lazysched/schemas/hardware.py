"""Hardware: what one machine can do, without any model; each figure with where it comes from. Bytes and seconds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lazysched.schemas.base import Document, Dtype, Schema
from lazysched.schemas.profile import NOISY_SPREAD

FigureSource = Literal["measured", "datasheet", "published", "derived", "assumed"]
"""``measured`` with lazysched on such a machine; a vendor's ``datasheet``; ``published`` by somebody else; ``derived``
from other figures; ``assumed`` of a machine that people put together or rent themselves."""


class Figure(Schema):
    """A number and its source, or null with a reason."""

    value: float | None = Field(gt=0)
    source: FigureSource | None = None
    """Null where the value is."""
    spread: float | None = Field(default=None, ge=0)
    """Interquartile range over the median of what was measured repeatedly."""
    note: str = ""
    """Which document, how it was derived, or why there is no value."""

    @model_validator(mode="after")
    def _has_source_or_reason(self) -> Figure:
        if self.value is None:
            if self.source is not None or not self.note:
                raise ValueError("a figure that is null needs a note that says why, and no source")
        elif self.source is None:
            raise ValueError("a figure needs its source: measured, datasheet, published, derived or assumed")
        elif not self.note and self.source != "measured":
            raise ValueError(f"a figure that is {self.source} needs a note: which document, or how")
        return self


def unknown(reason: str) -> Figure:
    """A figure that nobody knows."""
    return Figure(value=None, note=reason)


_FROM_BANDWIDTH = "taken from gpu_copy_bytes_per_s when a profile is estimated"


class Hardware(Document):
    """One GPU and its host, or a machine without a GPU, whose tiers ``gpu`` and ``host`` are one memory."""

    version: Literal[1] = 1
    name: str = Field(min_length=1)
    """Of the machine as a person would say it."""
    device: Literal["cuda", "cpu"]
    """What computes."""
    compute_dtype: Dtype
    """Type of weights and activations while computing; the matmul rates are in it."""
    hardware_id: str | None = None
    """Fingerprint of the machine that was measured; null for a kind of machine."""
    gpu_memory_bytes: Figure
    """What programs see of the memory that computes."""
    host_memory_bytes: Figure
    nvme_bytes: Figure
    """Room for files."""
    h2d_bytes_per_s: Figure
    """Large copies between page-locked memory and the GPU, one direction alone."""
    d2h_bytes_per_s: Figure
    h2d_both_bytes_per_s: Figure
    """The same while the other direction is as busy."""
    d2h_both_bytes_per_s: Figure
    nvme_read_bytes_per_s: Figure
    nvme_write_bytes_per_s: Figure
    gpu_bandwidth_bytes_per_s: Figure
    """Of the GPU's memory, as the vendor has it."""
    gpu_copy_bytes_per_s: Figure
    """Reads + writes of a large copy within the GPU's memory."""
    host_copy_bytes_per_s: Figure
    """Bytes copied within host memory, each counted once."""
    peak_matmul_flop_per_s: Figure
    """Dense, as the vendor has it."""
    matmul_flop_per_s: Figure
    """Dense, of large products."""
    cpu_update_hybrid8_per_s: Figure
    """Parameters per second that the host updates beside copies, state in format ``hybrid8``."""
    cpu_update_fp32_per_s: Figure
    gpu_update_hybrid8_per_s: Figure = unknown(_FROM_BANDWIDTH)
    gpu_update_fp32_per_s: Figure = unknown(_FROM_BANDWIDTH)
    context_bytes: Figure
    """GPU memory that the driver's context and libraries take."""
    price_usd_per_hour: Figure
    notes: dict[str, str] = Field(default_factory=dict)
    """What a reader should know."""

    @property
    def figures(self) -> dict[str, Figure]:
        """Every figure by its name, in the order of the schema."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, Figure)}

    def doubts(self) -> list[str]:
        """What a user should know before trusting the figures, one line each; empty when all went as wanted."""
        spreads = {name: figure.spread for name, figure in self.figures.items() if figure.spread is not None}
        noisy = [name for name, spread in spreads.items() if spread > NOISY_SPREAD]
        if not noisy:
            return []
        count = f"{len(noisy)} of {len(spreads)} figures vary by more than {100 * NOISY_SPREAD:.0f} % between repeats"
        return [f"{count} ({', '.join(noisy)}); estimates will be off, measure again when the machine is quiet"]
