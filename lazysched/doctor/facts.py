"""What child processes find out for the doctor: torch is loaded, and may hang or die, only there."""

from __future__ import annotations

from lazysched.schemas import Schema


class GpuFacts(Schema):
    """The GPU that lazysched would take: the first that ``CUDA_VISIBLE_DEVICES`` leaves."""

    name: str
    bus_id: str | None
    """PCI address as sysfs writes it, ``0000:65:00.0``; None where the driver does not say."""
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    num_visible: int
    """GPUs that torch sees."""


class TorchFacts(Schema):
    """What torch says of itself and of the GPU."""

    version: str
    cuda_build: str | None
    """CUDA version that torch was built for; None for other builds."""
    hip_build: str | None
    driver_cuda: str | None
    """Newest CUDA version that the driver runs; None without a driver or a CUDA build."""
    gpu: GpuFacts | None
    problem: str | None
    """Torch's words on why it has no GPU."""


class Link(Schema):
    """A PCI Express link."""

    generation: int
    max_generation: int
    """Of the card."""
    slot_generation: int | None
    """Most that the port above the card can do; None where the system does not say."""
    width: int
    """Lanes."""
    max_width: int


class PinningFacts(Schema):
    """What could be page-locked."""

    limit_bytes: int | None
    """Where the system refused more; None: it did not."""
    tried_bytes: int


class GraphFacts(Schema):
    """Whether a function could be compiled for the GPU."""

    problem: str | None


class SelfTestFacts(Schema):
    """What the optimizer's self-test found."""

    built: bool
    """Whether the compiled library is there."""
    variants: list[str]
    """Of the library, that run on this processor; the last is used."""
    threads: int
    on_gpu: str | None
    """Backend that updates on the GPU; None without one."""
    wrong: list[str]
    """Backends whose results are not those of the reference, to the bit."""


class TokenizerFacts(Schema):
    """What the tokenizer of a model folder does."""

    problem: str | None
    """Why model or tokenizer cannot be read, as ``field: value; remedy``."""
    has_template: bool = False
    bos: str | None = None
    template_adds_bos: bool = False
    tokenizer_adds_bos: bool = False
    num_leading_bos: int = 0
    """In a row as lazysched trains it."""
    max_token_id: int = 0
    embedding_rows: int | None = None
