"""Synthetic profiles after the shapes and figures of real machines, for any number of blocks. Nothing here is measured.

``large_profile`` follows one Qwen2-like block on a fast GPU (H200-like) or a 24 GB card; ``tiny_profile`` has round
numbers for cases worked out by hand and for brute force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lazysched.schemas import Curve, Dtype, Profile, Rate, SaveVariant, Stage, Timing

SEQ_LEN = 1024
KEPT_FRONTIER = (("all", 0.67, 0.0), ("half", 0.52, 0.03), ("tenth", 0.10, 0.21))
"""(variant, share of all saved tensors, extra backward over forward + backward) of one compiled block."""
INPUT_ONLY_EXTRA = 0.30
HYBRID8_SPEEDUP = 2.0
"""Of an update bound by memory, 12 bytes a parameter instead of 26 to 28."""


@dataclass(frozen=True)
class Shape:
    """A decoder-only model."""

    hidden: int
    ffn: int
    kv: int
    vocabulary: int
    tied: bool


@dataclass(frozen=True)
class Machine:
    """Rates of a machine: FLOP/s, bytes/s, parameters/s and bytes."""

    name: str
    flops_per_s: float
    link_bytes_per_s: float
    gpu_bytes_per_s: float
    cpu_params_per_s: float
    gpu_bytes: int
    host_bytes: int


SHAPE_3B = Shape(2048, 11008, 256, 151_936, tied=True)
SHAPE_7B = Shape(3584, 18944, 512, 152_064, tied=False)
FAST = Machine("fast", 600e12, 49e9, 3e12, 3.9e9, 139_000_000_000, 128_000_000_000)
CARD = Machine("card", 60e12, 22e9, 0.8e12, 0.8e9, 24_000_000_000, 128_000_000_000)


def timing(seconds: float) -> Timing:
    return Timing(median_s=seconds, repeats=5)


def curve(bytes_per_s: float) -> Curve:
    return Curve(points=[(1 << 20, bytes_per_s)])


def large_profile(
    shape: Shape, machine: Machine, num_blocks: int, micro_batches: Sequence[int] = (1, 2, 4, 8, 16, 32)
) -> Profile:
    """A bf16 model on a machine; host memory of ``machine`` may be too small for its states: budgets are the test's."""
    block_params = 2 * shape.hidden**2 + 2 * shape.hidden * shape.kv + 3 * shape.hidden * shape.ffn
    vocabulary_params = shape.hidden * shape.vocabulary
    stages = [_stage("embed", "embed", vocabulary_params, 2)]
    stages += [_stage(f"block.{i}", "block", block_params, 2) for i in range(num_blocks)]
    head = _stage("head", "head", shape.hidden if shape.tied else vocabulary_params + shape.hidden, 2)
    stages.append(head.model_copy(update={"shares": "embed"} if shape.tied else {}))
    variants: dict[str, dict[int, list[SaveVariant]]] = {"embed": {}, "block": {}, "head": {}}
    for size in micro_batches:
        tokens = size * SEQ_LEN
        variants["block"][size] = _block_variants(shape, machine, block_params, tokens)
        variants["embed"][size] = [_end(tokens * 1e-9, tokens * 2e-9, 8 * tokens * shape.hidden)]
        head_s = 6 * vocabulary_params * tokens / machine.flops_per_s
        variants["head"][size] = [_end(head_s / 3, head_s, 1_000_000_000)]
    return _profile(machine, "bfloat16", stages, variants, SEQ_LEN)


def _stage(stage_id: str, structure: str, num_params: int, element_bytes: int) -> Stage:
    return Stage(
        id=stage_id, structure=structure, params={f"{stage_id}.w": (num_params, 1)},
        weight_bytes=num_params * element_bytes,
    )  # fmt: skip


def _block_variants(shape: Shape, machine: Machine, num_params: int, tokens: int) -> list[SaveVariant]:
    efficiency = tokens / (tokens + 512)  # small micro-batches do not fill a GPU
    forward_s = tokens * (2 * num_params + 2 * SEQ_LEN * shape.hidden) / machine.flops_per_s / efficiency
    input_bytes, full_bytes = 2 * tokens * shape.hidden, tokens * (12 * shape.hidden + 6 * shape.ffn)
    common = {
        "forward": timing(forward_s), "working_forward_bytes": full_bytes // 2, "working_backward_bytes": full_bytes,
    }  # fmt: skip
    variants = [
        SaveVariant(
            name=name, saved={"input": input_bytes, "intermediates": round(share * full_bytes)},
            backward=timing(2 * forward_s + extra * 3 * forward_s), **common,
        )
        for name, share, extra in KEPT_FRONTIER
    ]  # fmt: skip
    backward = timing((2 + 3 * INPUT_ONLY_EXTRA) * forward_s)
    return [*variants, SaveVariant(name="input", saved={"input": input_bytes}, backward=backward, **common)]


def _end(forward_s: float, backward_s: float, working_bytes: int) -> SaveVariant:
    return SaveVariant(
        name="all", saved={}, forward=timing(forward_s), backward=timing(backward_s),
        working_forward_bytes=working_bytes, working_backward_bytes=working_bytes,
    )  # fmt: skip


def _profile(
    machine: Machine, dtype: Dtype, stages: list[Stage], variants: dict[str, dict[int, list[SaveVariant]]], seq_len: int
) -> Profile:
    link = machine.link_bytes_per_s
    return Profile(
        hardware_id=machine.name, model_id="synthetic", device="cuda", compute_dtype=dtype, seq_len=seq_len,
        loss_chunk_tokens=1024, stages=stages, variants=variants,
        links={
            "h2d": curve(1.1 * link), "d2h": curve(1.1 * link), "h2d_both": curve(link), "d2h_both": curve(link),
            "gpu": curve(machine.gpu_bytes_per_s),
        },
        update={
            "cpu": {
                "fp32": Rate(per_s=machine.cpu_params_per_s),
                "hybrid8": Rate(per_s=HYBRID8_SPEEDUP * machine.cpu_params_per_s),
            },
            "gpu": {
                "fp32": Rate(per_s=machine.gpu_bytes_per_s / 28), "hybrid8": Rate(per_s=machine.gpu_bytes_per_s / 12),
            },
        },
        total_bytes={"gpu": machine.gpu_bytes, "host": machine.host_bytes, "nvme": None},
        free_bytes={"gpu": machine.gpu_bytes, "host": machine.host_bytes, "nvme": None},
        context_bytes=500_000_000 if dtype == "bfloat16" else 0,
        fragmentation_bytes={size: 400_000_000 if dtype == "bfloat16" else 0 for size in variants["embed"]},
    )  # fmt: skip


def tiny_profile(
    num_blocks: int = 2,
    *,
    micro_batches: Sequence[int] = (1,),
    block_params: int = 1_000_000,
    vocabulary_params: int = 1_000_000,
    saved_bytes: int = 20_000_000,
    tied: bool = False,
    link_bytes_per_s: float = 1e9,
    cpu_params_per_s: float = 100e6,
) -> Profile:
    """fp32: a block is 4 MB and takes 10 ms forward, 20 ms backward and 10 ms more when only its input (1 MB) is saved.

    An upload of a block takes 4 ms, its CPU update 10 ms; everything scales with the micro-batch but weights.
    """
    machine = Machine("tiny", 1.0, link_bytes_per_s, 1e12, cpu_params_per_s, 1_000_000_000, 1_000_000_000)
    stages = [_stage("embed", "embed", vocabulary_params, 4)]
    stages += [_stage(f"block.{i}", "block", block_params, 4) for i in range(num_blocks)]
    head = _stage("head", "head", 100 if tied else vocabulary_params, 4)
    stages.append(head.model_copy(update={"shares": "embed"} if tied else {}))
    variants: dict[str, dict[int, list[SaveVariant]]] = {"embed": {}, "block": {}, "head": {}}
    for size in micro_batches:
        common = {
            "forward": timing(0.01 * size), "working_forward_bytes": 500_000 * size,
            "working_backward_bytes": 2_000_000 * size,
        }  # fmt: skip
        saved = {"input": 1_000_000 * size}
        variants["block"][size] = [
            SaveVariant(
                name="all", saved={**saved, "rest": saved_bytes * size}, backward=timing(0.02 * size), **common
            ),
            SaveVariant(name="input", saved=saved, backward=timing(0.03 * size), **common),
        ]
        variants["embed"][size] = [_end(0.001 * size, 0.001 * size, 100_000)]
        variants["head"][size] = [_end(0.005 * size, 0.015 * size, 1_000_000)]
    profile = _profile(machine, "float32", stages, variants, 16)
    return profile.model_copy(update={"links": {**profile.links, "h2d": curve(link_bytes_per_s)}})
