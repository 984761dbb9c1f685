"""What a block, the embedding and the head can be decided to do, and what each choice costs. Seconds; GB is 1e9 bytes.

Nothing here depends on the rest of the model; ``instance`` works the figures out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lazysched.schemas import SaveVariant, StagePlan, Tier
from lazysched.schemas.executable import INPUT_TIERS, SAVED_TIERS, STATE_TIERS, WEIGHT_TIERS

StateChoice = Literal["gpu", "resident", "streamed", "resident_nvme", "streamed_nvme", "nvme"]
"""``gpu``: weights and state on the GPU. ``resident``: weights there, state on the host. ``streamed``: both on host.
With ``_nvme`` the state is in files instead; ``nvme``: weights and state in files."""
PLACES: dict[StateChoice, tuple[Tier, Tier]] = {
    "gpu": ("gpu", "gpu"), "resident": ("gpu", "host"), "streamed": ("host", "host"),
    "resident_nvme": ("gpu", "nvme"), "streamed_nvme": ("host", "nvme"), "nvme": ("nvme", "nvme"),
}  # fmt: skip
"""Tier of the weights and of the state."""
STATE_CHOICES: tuple[StateChoice, ...] = tuple(PLACES)
RESIDENT: tuple[StateChoice, ...] = ("resident", "resident_nvme")
STREAMED: tuple[StateChoice, ...] = ("streamed", "streamed_nvme", "nvme")
ON_HOST: tuple[StateChoice, ...] = RESIDENT + STREAMED
"""The host updates them."""
IN_FILES: tuple[StateChoice, ...] = ("resident_nvme", "streamed_nvme", "nvme")


@dataclass(frozen=True)
class Scope:
    """Tiers that weights, optimizer state and saved tensors may be in."""

    weights: tuple[Tier, ...]
    state: tuple[Tier, ...]
    saved: tuple[Tier, ...]

    def without_files(self) -> Scope:
        """The same but for ``nvme``."""

        def kept(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
            return tuple(tier for tier in tiers if tier != "nvme")

        return Scope(kept(self.weights), kept(self.state), kept(self.saved))

    @property
    def has_files(self) -> bool:
        """Whether anything may be in ``nvme``."""
        return "nvme" in (*self.weights, *self.state, *self.saved)


EXECUTABLE = Scope(WEIGHT_TIERS, STATE_TIERS, tuple(tier for tier in SAVED_TIERS if tier in INPUT_TIERS))
"""What the runtime executes."""
EVERYTHING = Scope(*(get_args(Tier) for _ in range(3)))
"""What ``lower`` and the simulator know."""


@dataclass(frozen=True)
class SaveOption:
    """One save variant in one tier; times and sizes are those of one micro-batch."""

    variant: SaveVariant
    tier: Tier
    forward_s: float
    backward_s: float
    kept_gb: float
    """On the GPU until the backward, input included."""
    kept_input_gb: float
    """The input's part of it."""
    offloaded_gb: float
    save_s: float
    fetch_s: float
    working_gb: float
    """Most GB beyond what is kept, in the worse of forward and backward."""
    write_s: float = 0.0
    """Of what goes on from the host into files, and back."""
    read_s: float = 0.0

    @property
    def host_gb(self) -> float:
        """What waits on the host for the backward."""
        return self.offloaded_gb if self.tier == "host" else 0.0

    @property
    def nvme_gb(self) -> float:
        """What waits in files for the backward."""
        return self.offloaded_gb if self.tier == "nvme" else 0.0

    def dominates(self, other: SaveOption) -> bool:
        """Whether nobody would choose ``other`` when this option exists."""
        mine, theirs = self._costs(), other._costs()
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))

    def _costs(self) -> tuple[float, ...]:
        return (self.forward_s + self.backward_s, self.kept_gb, self.host_gb, self.nvme_gb, self.working_gb)


@dataclass(frozen=True)
class StageCosts:
    """What moving, holding and updating one stage costs, whatever is chosen for it."""

    weight_gb: float
    """Also the size of the gradient in the computing dtype."""
    state_gb: float
    accumulator_gb: float
    load_s: float
    grads_s: float
    norm_s: float
    cpu_update_s: float
    gpu_update_s: float
    gpu_update_working_gb: float
    read_weights_s: float = 0.0
    """From files, as all that follows."""
    read_state_s: float = 0.0
    write_state_s: float = 0.0
    read_both_s: float = 0.0
    """State and weights in one request."""
    write_both_s: float = 0.0

    @property
    def stored_gb(self) -> float:
        """Weights, gradient and optimizer state together."""
        return 2 * self.weight_gb + self.state_gb

    def on_gpu_gb(self, choice: StateChoice) -> float:
        """Buffers of its own on the GPU."""
        if choice == "gpu":
            return self.stored_gb
        return self.weight_gb if choice in RESIDENT else 0.0

    def on_host_gb(self, choice: StateChoice) -> float:
        """What it has on the host."""
        return self.moved_gb(choice) + (self.state_gb if choice in ("resident", "streamed") else 0.0)

    def moved_gb(self, choice: StateChoice) -> float:
        """Of that, what copies read and write: weights and gradient."""
        if choice == "gpu":
            return 0.0
        return self.weight_gb if choice == "nvme" else 2 * self.weight_gb

    def in_files_gb(self, choice: StateChoice) -> float:
        """What it has in files; an update reads and writes all of it."""
        weight_gb = self.weight_gb if choice == "nvme" else 0.0
        return weight_gb + self.state_gb if choice in IN_FILES else 0.0

    def read_update_s(self, choice: StateChoice) -> float:
        """Reading from files what an update changes."""
        return {"nvme": self.read_both_s}.get(choice, self.read_state_s) if choice in IN_FILES else 0.0

    def write_update_s(self, choice: StateChoice) -> float:
        """Writing it back."""
        return {"nvme": self.write_both_s}.get(choice, self.write_state_s) if choice in IN_FILES else 0.0


@dataclass(frozen=True)
class VocabularyOption:
    """Joint choice for the embedding and the head, which may share a slot and a store."""

    embed: StateChoice
    head: StateChoice
    gpu_gb: float
    host_gb: float
    moved_gb: float
    """Of ``host_gb``, weights and gradients, and the buffer through which weights come from files."""
    grads_slot_gb: float
    nvme_gb: float = 0.0
    record_gb: float = 0.0
    """The larger of what an update of either reads from files."""


def stage_plan(state: StateChoice, save: str) -> StagePlan:
    """Decisions for the embedding or the head."""
    weights, optimizer_state = PLACES[state]
    return StagePlan(weights=weights, state=optimizer_state, save=save)


def block_plan(state: StateChoice, option: SaveOption) -> StagePlan:
    """Decisions for one block: all that it saves goes to the option's tier."""
    ends = stage_plan(state, option.variant.name)
    groups = {group: option.tier for group in option.variant.saved if group != "input"}
    return ends.model_copy(update={"saved_tiers": groups, "input_tier": option.tier})
