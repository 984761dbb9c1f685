"""What a block, the embedding and the head can be decided to do, and what each choice costs. Seconds; GB is 1e9 bytes.

Nothing here depends on the rest of the model; ``instance`` works the figures out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from lazysched.schemas import SaveVariant, StagePlan, Tier
from lazysched.schemas.executable import INPUT_TIERS, SAVED_TIERS, SEGMENTS, STATE_TIERS, WEIGHT_TIERS

GB = 1e9

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
    """Tiers that weights, optimizer state and saved tensors may be in, and lengths that segments may have."""

    weights: tuple[Tier, ...]
    state: tuple[Tier, ...]
    saved: tuple[Tier, ...]
    segments: tuple[int, ...] = (1,)

    def without_files(self) -> Scope:
        """The same but for ``nvme``."""

        def kept(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
            return tuple(tier for tier in tiers if tier != "nvme")

        return Scope(kept(self.weights), kept(self.state), kept(self.saved), self.segments)

    @property
    def has_files(self) -> bool:
        """Whether anything may be in ``nvme``."""
        return "nvme" in (*self.weights, *self.state, *self.saved)


LENGTHS = (1, 2, 4)
"""Of segments among which the program chooses."""
EXECUTABLE = Scope(
    WEIGHT_TIERS, STATE_TIERS, tuple(tier for tier in SAVED_TIERS if tier in INPUT_TIERS),
    tuple(length for length in LENGTHS if length in SEGMENTS),
)  # fmt: skip
"""What the runtime executes."""
EVERYTHING = Scope(get_args(Tier), get_args(Tier), get_args(Tier), LENGTHS)
"""What ``lower`` and the simulator know."""


@dataclass(frozen=True)
class SaveOption:
    """One save variant in one tier; times and sizes are those of one micro-batch.

    Where only the input leaves, the rest stays on the GPU, ``tier`` is the input's.
    In a segment of several blocks each block has an option of its own, by its place there. The first has what the
    segment keeps, its input in ``tier``; the last has the forwards that run again, which come just before its backward.
    """

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
    rest_stays: bool = False
    """Whether all but the input is on the GPU until the backward; in segments it is."""
    segment: int = 1
    """Blocks of the segment."""
    place: int = 0
    """Of the block among them."""
    recompute_s: float = 0.0
    """Of ``backward_s``, forwards of the segment that run again before it."""
    remade_gb: float = 0.0
    """What these keep until the backward of each block, all blocks together, inputs aside."""
    inner_inputs_gb: float = 0.0
    """Inputs of all but the first block of the segment, while its backward runs."""
    segment_slot_gb: float = 0.0
    """One slot for the segment's input on its way back."""

    @property
    def leaves(self) -> bool:
        """Whether the block's forward sends something away."""
        return self.tier != "gpu" and self.place == 0

    @property
    def leaves_early(self) -> bool:
        """Whether what leaves is the input alone, which is there before the forward and needs no slot for it."""
        return self.leaves and (self.rest_stays or len(self.variant.saved) == 1)

    @property
    def returns(self) -> bool:
        """Whether something is fetched for the block's backward, or for what runs again before it."""
        return self.tier != "gpu" and self.place == self.segment - 1

    @property
    def host_gb(self) -> float:
        """What waits on the host for the backward."""
        return self.offloaded_gb if self.tier == "host" else 0.0

    @property
    def nvme_gb(self) -> float:
        """What waits in files for the backward."""
        return self.offloaded_gb if self.tier == "nvme" else 0.0

    @property
    def still_remade_gb(self) -> float:
        """Of what the segment's forwards made again, what is left after the block's backward: that of those before."""
        inner = sum(self.variant.saved.values()) - self.variant.saved["input"]
        return self.place * inner / GB

    def dominates(self, other: SaveOption) -> bool:
        """Whether nobody would choose ``other``, of a segment of the same length, when this option exists."""
        mine, theirs = self._costs(), other._costs()
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))

    def _costs(self) -> tuple[float, ...]:
        # Apart, because updates on the host hide under the forward and wait for the backward; so do inputs, which have
        # slots in every window, and the rest of what is kept.
        working_gb = self.working_gb + self.remade_gb
        memory_gb = (self.kept_gb, self.kept_input_gb, self.host_gb, self.nvme_gb, working_gb)
        return (self.forward_s, self.backward_s, *memory_gb)


def mean_option(options: Sequence[SaveOption]) -> SaveOption:
    """The blocks of a segment, each with its mean share."""
    numbers = [f.name for f in fields(SaveOption) if f.type == "float"]
    means = {name: sum(getattr(option, name) for option in options) / len(options) for name in numbers}
    return replace(options[0], **means)


@dataclass(frozen=True)
class StageCosts:
    """What moving, holding and updating one stage costs, whatever is chosen for it."""

    weight_gb: float
    grads_gb: float
    """The gradient of what is trained, in the computing dtype."""
    state_gb: float
    accumulator_gb: float
    load_s: float
    reload_s: float
    """The same for the backward; 0 where it does not run."""
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
        return self.weight_gb + self.grads_gb + self.state_gb

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
        return self.grads_gb + (0.0 if choice == "nvme" else self.weight_gb)

    @property
    def is_trained(self) -> bool:
        """Whether anything of it has a gradient, state and an update."""
        return self.grads_gb > 0

    def copied_gb(self, choice: StateChoice) -> float:
        """What a step copies of weights, for both passes, and of the gradient."""
        passes = 1 + (self.reload_s > 0) * (choice in STREAMED)
        return 0.0 if choice == "gpu" else passes * self.weight_gb + self.grads_gb

    def in_files_gb(self, choice: StateChoice) -> float:
        """What it has in files."""
        weight_gb = self.weight_gb if choice == "nvme" else 0.0
        return weight_gb + self.state_gb if choice in IN_FILES else 0.0

    def record_gb(self, choice: StateChoice) -> float:
        """Of that, what an update reads and writes."""
        return self.in_files_gb(choice) if self.is_trained else 0.0

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
    """Decisions for one block: all that it saves goes to the option's tier, or its input, of a segment the first."""
    ends = stage_plan(state, option.variant.name)
    tier: Tier = "gpu" if option.rest_stays else option.tier
    groups = {group: tier for group in option.variant.saved if group != "input"}
    input_tier = option.tier if option.place == 0 else "gpu"
    return ends.model_copy(update={"saved_tiers": groups, "input_tier": input_tier, "segment": option.segment})
