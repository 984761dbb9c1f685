"""Plan: the decisions, as JSON that a person can read, compare and edit. Bytes and seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from lazysched.schemas.base import AttentionBackend, Document, Dtype, Engine, Schema, Tier
from lazysched.schemas.plan_variants import check_against, check_sizes, missing_variants
from lazysched.schemas.profile import Profile, SaveVariant

if TYPE_CHECKING:
    import pandas as pd

StateFormat = Literal["fp32", "hybrid8"]
"""Format of optimizer state: the exact reference, or 8-bit moments with fp32 ones for small tensors."""
MAX_AHEAD = 512
"""Most of ``prefetch_depth`` and ``d2h_lag``: as many blocks as can be solved for."""
FP32_STATE_ELEMENTS = 4096
"""By default tensors with at most so many elements keep fp32 state in format ``hybrid8``."""
HostMemory = Literal["pinned", "pageable"]
"""Page-locked host memory, which a GPU copies from and to by itself, or ordinary memory, where the driver stages every
copy and keeps the thread that asked for it."""


class StagePlan(Schema):
    """Decisions for one stage."""

    weights: Tier
    """``gpu`` is resident; otherwise they are streamed from that tier for each pass. ``nvme`` needs state there too."""
    state: Tier
    """Where the optimizer state lives; its tier fixes the processor that updates: the host's for ``host`` and
    ``nvme``."""
    state_format: StateFormat = "fp32"
    save: str = "all"
    """Name of a save variant of the stage's structure: one form of its forward and backward, called by what it keeps
    from the one for the other. What it does not keep is computed again."""
    saved_tiers: dict[str, Tier] = Field(default_factory=dict)
    """Tier per saved tensor group of that variant, the input excepted. What a block sends away goes to one tier."""
    segment: int = Field(default=1, ge=1)
    """Length of the run of consecutive blocks, all of one structure and variant, that the block is part of; all of them
    say it, and one run follows the other. From its forward a segment of several blocks keeps the input of its first
    alone, in that block's ``input_tier``. Its backward first runs the blocks forward again, in order, each for all
    micro-batches, and what their variant saves, inner inputs included, is on the GPU until each block's backward:
    ``saved_tiers``, and ``input_tier`` of all but the first, are ``gpu``."""
    input_tier: Tier = "gpu"
    """Where the block's input waits for the backward."""


class Update(Schema):
    """How a step ends."""

    mode: Literal["exact", "selective"] = "exact"
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Global gradient norm to clip to; null gives clipping up."""
    check_finite: bool = True
    """Whether a step whose gradient is not finite changes nothing; false, which needs a null ``clip_norm``, lets each
    stage be updated as soon as its gradient is there."""

    @property
    def waits_for_norm(self) -> bool:
        """Whether no update starts before the global gradient norm is known."""
        return self.clip_norm is not None or self.check_finite

    @model_validator(mode="after")
    def _clipping_needs_the_norm(self) -> Update:
        if self.clip_norm is not None and not self.check_finite:
            raise ValueError("check_finite false needs clip_norm null: clipping waits for the gradient norm anyway")
        return self


class Prediction(Schema):
    """What the simulator expects of the plan."""

    step_s: float
    """Steady time of one step."""
    exposed_s: dict[Engine, float]
    """engine -> time in which ``compute`` waits for it, per step."""
    moved_bytes: dict[Engine, int]
    """engine -> bytes moved per step."""
    peak_bytes: dict[Tier, int]
    """Most bytes of each tier; for ``gpu`` the driver context and fragmentation are in it."""


class SolverReport(Schema):
    """How the plan was found."""

    status: Literal["optimal", "feasible"]
    """``optimal`` within the gap asked for, or the best that the time limit allowed."""
    objective_s: float
    """Step time of the program's solution; the prediction is the simulator's."""
    bound_s: float
    """No plan is faster than this, of the prefetch depths (1 and 2) and D2H lags (0 to 2) that the search has."""
    gap: float
    """(objective - bound) / objective."""
    seed: int
    time_s: float
    """Wall-clock time of all solves."""
    versions: dict[str, str]


class Plan(Document):
    """A self-contained schedule: it carries the profile that it was solved from, which ``train`` does not look at."""

    version: Literal[1] = 1
    model_id: str
    hardware_id: str
    world_size: Literal[1] = 1
    compute_dtype: Dtype
    batch_size: int = Field(ge=1)
    """Rows of one step: micro_batch * accumulation * world_size."""
    seq_len: int = Field(ge=1)
    """Tokens of one row."""
    micro_batch: int = Field(ge=1)
    """Rows that go through a stage at once."""
    accumulation: int = Field(ge=1)
    """Micro-batches of one step."""
    loss_chunk_tokens: int = Field(ge=1)
    """Tokens whose logits exist at once in the head."""
    attention: AttentionBackend = "default"
    """Kernel of torch's attention that the variants were measured with."""
    full_determinism: bool = False
    """Whether a GPU's blocks keep to attention kernels whose backward adds in one order: equal runs, equal bits."""
    packing: bool = False
    """Whether a row holds several samples, which do not see each other."""
    argument_bytes: int = Field(default=0, ge=0)
    """GPU bytes of masks and position tables of a packed micro-batch; 0 without packing."""
    trainable: list[str] = Field(default_factory=list)
    """Regular expressions, of the profile: parameters in whose name one is found are trained, the others are frozen;
    none: all are trained."""
    prefetch_depth: int = Field(default=1, ge=1, le=MAX_AHEAD)
    """How many stages ahead weights and saved tensors are fetched to the GPU; each more takes a slot there."""
    d2h_lag: int = Field(default=1, ge=0, le=MAX_AHEAD)
    """How many copies from the GPU to the host (device to host, D2H) may still run when compute goes on; each more
    takes a slot on the GPU."""
    host_memory: HostMemory = "pinned"
    """Whether what a GPU copies from and to the host is page-locked there; state, which never moves, is not."""
    update: Update = Update()
    fp32_state_elements: int = Field(default=FP32_STATE_ELEMENTS, ge=0)
    """In state format ``hybrid8``, tensors with at most so many elements, and one-dimensional ones, keep fp32 state."""
    stages: dict[str, StagePlan]
    """Stage id -> decisions."""
    variants: dict[str, SaveVariant]
    """``structure:name`` -> the variant, embedded; ``variant_key`` makes the key."""
    pins: list[str] = Field(default_factory=list)
    """Decisions that were fixed by hand when it was solved, as ``block[0:4].weights=gpu``; editing may undo them."""
    budget_bytes: dict[Tier, Annotated[int, Field(ge=0)]]
    context_bytes: int = Field(default=0, ge=0)
    """Of the GPU's budget, what the driver context and libraries take outside the plan's buffers."""
    workspace_bytes: int = Field(default=0, ge=0)
    """Of ``context_bytes``, library workspaces that lie inside torch's allocator, as cuBLAS' do."""
    predicted: Prediction | None = None
    """Null in a plan written or edited by hand."""
    solver: SolverReport | None = None
    profile: Profile | None = None
    """What the plan was solved from, so that it can be simulated and explained; null in a plan written by hand."""

    def to_frame(self, profile: Profile | None = None) -> pd.DataFrame:
        """One row per stage: the decisions, and what they take and cost in one step; ``solver.plan_frame`` says how.

        Args:
            profile: of the machine to be; None: the one in the plan.
        """
        from lazysched.solver.plan_frame import plan_frame

        return plan_frame(self, profile)

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        rows = self.micro_batch * self.accumulation * self.world_size
        if rows != self.batch_size:
            raise ValueError(f"batch_size must be micro_batch * accumulation * world_size = {rows}")
        if self.full_determinism and self.attention == "cudnn":
            raise ValueError(
                "full_determinism does not go with attention cudnn, whose backward adds in any order; profile with "
                "--full-determinism and solve again, or set false"
            )
        if self.packing != (self.argument_bytes > 0):
            raise ValueError(
                f"packing is {str(self.packing).lower()} and argument_bytes {self.argument_bytes}; profile with "
                f"--packing and solve again, or set false and 0"
            )
        for stage_id, choice in self.stages.items():
            if choice.state == "gpu" and choice.weights != "gpu":
                raise ValueError(f"stages.{stage_id}: state on gpu needs weights on gpu")
            if choice.weights == "nvme" and choice.state != "nvme":
                raise ValueError(f"stages.{stage_id}: weights on nvme need state on nvme")
        return self

    @model_validator(mode="after")
    def _variants_are_the_profiles(self) -> Plan:
        check_sizes(self.variants)
        if self.profile is not None:
            check_against(self.profile, self.variants, self.micro_batch)
            # An edit of ``save`` may name what no stage had: the plan then embeds it like the others.
            self.variants.update(missing_variants(self.profile, self.variants, self.micro_batch, self.stages))
        return self
