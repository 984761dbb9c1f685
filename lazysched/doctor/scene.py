"""What probes look at: the system's files, the environment, and facts that children find out once for all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lazysched.doctor.children import ask_child
from lazysched.doctor.facts import GpuFacts, GraphFacts, Link, PinningFacts, SelfTestFacts, TokenizerFacts, TorchFacts
from lazysched.doctor.looking import CannotLook, Later, read_text

Device = Literal["auto", "cuda", "cpu"]
NVIDIA, DISPLAY_CLASS = "0x10de", "0x03"
_TORCH_S, _LINK_S, _PINNING_S, _OPTIMIZER_S, _GRAPHS_S, _TOKENIZER_S = 120, 120, 180, 300, 300, 180
"""Loading torch from a slow disk takes a minute; compiling for a GPU the first time another."""


@dataclass(frozen=True)
class Scene:
    """One examination.

    Attributes:
        folder: where training would write.
        model: folder of a model; None: its probes are left out.
        device: as ``train --device``.
        root: where ``proc``, ``sys`` and ``dev`` are found.
        environment: of this process.
    """

    folder: Path
    model: Path | None = None
    device: Device = "auto"
    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    torch: Later[TorchFacts] = field(default_factory=lambda: Later(_ask_torch))
    pinning: Later[PinningFacts] = field(default_factory=lambda: Later(_try_pinning))

    def gpu(self) -> GpuFacts:
        """The GPU that torch takes.

        Raises:
            CannotLook: torch has none, or cannot be asked.
        """
        gpu = self.torch().gpu
        if gpu is None:
            raise CannotLook("torch sees no GPU")
        return gpu

    def bus_id(self) -> str:
        """PCI address of that GPU.

        Raises:
            CannotLook: torch has none, or the driver does not say.
        """
        address = self.gpu().bus_id
        if address is None:
            raise CannotLook("the driver does not tell the GPU's PCI address")
        return address

    def uses_gpu(self) -> bool:
        """Whether probes of a GPU mean something: everywhere but where none is wanted, or none is found anywhere."""
        if self.device != "auto":
            return self.device == "cuda"
        try:
            return self.torch().gpu is not None or nvidia_hardware(self.root)
        except CannotLook:
            return self._may_have_gpu()

    def _may_have_gpu(self) -> bool:
        try:
            return nvidia_hardware(self.root)
        except CannotLook:
            return True

    def link(self) -> Link:
        """The GPU's link while it copies."""
        return ask_child("link", [self.bus_id(), str(self.root)], Link, _LINK_S)

    def self_test(self) -> SelfTestFacts:
        """The optimizer's self-test on what there is."""
        has_gpu = self.device != "cpu" and self.torch().gpu is not None
        return ask_child("optimizer", ["cuda" if has_gpu else "cpu"], SelfTestFacts, _OPTIMIZER_S)

    def compile_on_gpu(self) -> GraphFacts:
        """Compile for the GPU."""
        return ask_child("graphs", [], GraphFacts, _GRAPHS_S)

    def tokenizer(self) -> TokenizerFacts:
        """What the model's tokenizer does."""
        return ask_child("tokenizer", [str(self.model)], TokenizerFacts, _TOKENIZER_S)


def _ask_torch() -> TorchFacts:
    return ask_child("torch", [], TorchFacts, _TORCH_S)


def _try_pinning() -> PinningFacts:
    return ask_child("pinning", [], PinningFacts, _PINNING_S)


def nvidia_hardware(root: Path) -> bool:
    """Whether the system shows a graphics card of NVIDIA's, with a driver or without.

    Raises:
        CannotLook: it shows no PCI devices at all.
    """
    if any((root / "dev" / name).exists() for name in ("nvidia0", "nvidiactl", "dxg")):  # dxg: WSL
        return True
    bus = root / "sys/bus/pci/devices"
    try:
        devices = list(bus.iterdir())
    except OSError as error:
        raise CannotLook(f"{bus} cannot be read ({error.strerror}), so PCI devices do not show") from None
    return any(
        read_text(device / "vendor") == NVIDIA and read_text(device / "class").startswith(DISPLAY_CLASS)
        for device in devices
    )
