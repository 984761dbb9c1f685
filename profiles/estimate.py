"""A profile without a machine: operation counts over the figures of a hardware file, scaled by measured efficiencies.

    time = matrix products / matmul rate + attention / its share of that rate + other traffic / rate of GPU copies

The constants were read off profiles of one H200 (torch 2.11, transformers 5.17; Qwen2 shapes of 7B and 14B at 8 k to
32 k tokens); ``benchmarks/estimates.py`` holds the result against measured steps. Micro-batches of fewer tokens and
other GPUs were not compared; kernels too short to fill a GPU will take longer than this says. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lazysched.errors import UsageError
from lazysched.flat_store import aligned
from lazysched.machine_memory import PARTLY_USED_BYTES
from lazysched.profiles.shapes import BlockShape, ModelShape
from lazysched.profiles.variant_costs import COMPILED, UNCOMPILED, Redone, VariantCosts, variant_name
from lazysched.schemas import BYTES_PER_ELEMENT, Curve, Hardware, Profile, Rate, SaveVariant, Stage, Tier, Timing
from lazysched.trainable import first_trained, patterns_of, select_trained

ATTENTION_SHARE, ATTENTION_TOKENS = 0.85, 1300
"""Causal attention over S tokens ran at 0.85 * S / (S + 1300) of the rate of matrix products: 0.38, 0.65 and 0.79 at
1 k, 4 k and 16 k (cuDNN, 28 heads of 128)."""
ATTENTION_BACKWARD = 2.5
"""Products of the backward over those of the forward."""
FORWARD_FFN, FORWARD_HIDDEN = 6.0, 22.0
"""Values per token, in widths, that all else in a block's forward moves through the GPU's memory."""
BACKWARD_REST = 2.05
"""What the backward moves so, over the forward."""
LOGIT_BYTES = 31
"""That the loss moves for each bf16 logit, with its gradient or without."""
EMBED_FORWARD_BYTES, EMBED_BACKWARD_BYTES, EMBED_WEIGHT_BYTES = 4.6, 55, 18
"""That the embedding moves for each value of its output, likewise backward, and for each weight in the backward."""
EMBED_WORKING_BYTES = 4.5
"""For each value of its output, in the backward, beside a gradient of the weights."""
UPDATE_BYTES = {"hybrid8": 14.7, "fp32": 66.5}
"""That a GPU's update takes of its copy rate for each parameter."""
FRAGMENTATION_SHARE = 0.07
"""Of the largest working set; 0.03 to 0.07 were measured."""
LARGE_BYTES = 64 * 10**6
"""Size of the copies that the rates of a hardware file are of."""
_ESTIMATED = "estimated from operation counts"
_NEEDED = (
    "gpu_memory_bytes", "host_memory_bytes", "h2d_bytes_per_s", "d2h_bytes_per_s", "gpu_copy_bytes_per_s",
    "matmul_flop_per_s",
)  # fmt: skip


@dataclass(frozen=True)
class _Rates:
    """What the times are computed with."""

    matmul_flop_per_s: float
    copy_bytes_per_s: float
    element_bytes: int


def estimate(
    hardware: Hardware,
    shape: ModelShape,
    *,
    seq_len: int = 1024,
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    loss_chunk_tokens: int = 1024,
    trainable: Sequence[str] | None = None,
) -> Profile:
    """What ``lazysched profile`` might measure of a model on such a machine.

    Args:
        hardware: figures of the machine.
        shape: stages of the model, in the hardware's computing dtype.
        seq_len: tokens of a row.
        micro_batches: rows that go through at once.
        loss_chunk_tokens: tokens whose logits exist at once in the head.
        trainable: patterns of the parameters that are trained, as ``lazysched.profile`` takes them. Products for
            gradients of frozen ones are left out of the times; what blocks keep is counted as if all were trained.

    Raises:
        UsageError: an argument is wrong, or the hardware lacks a figure that is needed.
    """
    if seq_len < 1 or not micro_batches or min(micro_batches) < 1:
        raise UsageError(f"seq_len: {seq_len}, micro_batches: {list(micro_batches)}: use numbers of 1 or more")
    if shape.longest is not None and seq_len > shape.longest:
        raise UsageError(f"seq_len: {seq_len} is beyond the model's max_position_embeddings {shape.longest}; use less")
    for name in _NEEDED:
        _value(hardware, name)
    patterns = patterns_of(trainable)
    stages = select_trained(shape.stages, patterns)
    rows = tuple(sorted(set(micro_batches)))
    return _Estimate(hardware, shape, stages, seq_len, rows, loss_chunk_tokens).profile(patterns)


def _value(hardware: Hardware, name: str) -> float:
    figure = hardware.figures[name]
    if figure.value is None:
        raise UsageError(
            f"hardware: {hardware.name}: {name}: null ({figure.note}); a plan needs it, write it into a file of yours"
        )
    return figure.value


@dataclass(frozen=True)
class _Trained:
    """What is trained of the blocks of one structure.

    Attributes:
        share: of their parameters, which is taken for that of the products that make gradients.
        has_backward: whether anything is trained in them or before them.
    """

    share: float
    has_backward: bool


class _Estimate:
    def __init__(
        self, hardware: Hardware, shape: ModelShape, stages: list[Stage], seq_len: int, micro_batches: tuple[int, ...],
        chunk_tokens: int,
    ) -> None:  # fmt: skip
        self.hardware, self.shape, self.stages, self.seq_len = hardware, shape, stages, seq_len
        first = first_trained(stages)
        self.blocks = {
            stage.structure: (shape.blocks[whole.structure], _Trained(stage.num_trained / stage.num_params, i >= first))
            for i, (stage, whole) in enumerate(zip(stages, shape.stages, strict=True))
            if stage.is_block
        }
        """Structure -> sizes, and what is trained."""
        self.micro_batches, self.chunk_tokens = micro_batches, chunk_tokens
        self.compiled = hardware.device == "cuda"
        self.rates = _Rates(
            _value(hardware, "matmul_flop_per_s"), _value(hardware, "gpu_copy_bytes_per_s"),
            BYTES_PER_ELEMENT[hardware.compute_dtype],
        )  # fmt: skip
        self.hidden = next(iter(shape.blocks.values())).hidden

    def profile(self, trainable: Sequence[str]) -> Profile:
        hardware, shape = self.hardware, self.shape
        total_bytes = self._memory()
        return Profile(
            hardware_id=hardware.hardware_id or f"estimate-{hardware.name.replace(' ', '-')}",
            model_id=shape.model_id, device=hardware.device, compute_dtype=hardware.compute_dtype,
            seq_len=self.seq_len, loss_chunk_tokens=self.chunk_tokens, estimated=True, stages=self.stages,
            trainable=list(trainable),
            variants={
                "embed": self._by_size(lambda rows: [self._embed(rows)]),
                **{structure: self._by_size(self._block_of(*block)) for structure, block in self.blocks.items()},
                "head": self._by_size(lambda rows: [self._head(rows)]),
            },
            links=self._links(), update=self._updates(), total_bytes=total_bytes, free_bytes=dict(total_bytes),
            context_bytes=round(hardware.context_bytes.value or 0) if self.compiled else 0,
            fragmentation_bytes={rows: self._fragmentation_bytes(rows) for rows in self.micro_batches},
            notes=self._notes(),
        )  # fmt: skip

    def _by_size(self, variants: Callable[[int], list[SaveVariant]]) -> dict[int, list[SaveVariant]]:
        return {rows: variants(rows) for rows in self.micro_batches}

    # ---- stages

    def _block_of(self, block: BlockShape, trained: _Trained) -> Callable[[int], list[SaveVariant]]:
        table = COMPILED if self.compiled else UNCOMPILED

        def variants(rows: int) -> list[SaveVariant]:
            listed = table if trained.has_backward else table[-1:]
            return [self._block(block, trained, costs, rows, is_first=costs is table[0]) for costs in listed]

        return variants

    def _block(
        self, block: BlockShape, trained: _Trained, costs: VariantCosts, rows: int, *, is_first: bool
    ) -> SaveVariant:
        tokens, element = rows * self.seq_len, self.rates.element_bytes
        saved = {"input": aligned(tokens * block.hidden * element)}
        kept_bytes = costs.all_kept(block).bytes_per_token(block, element)
        if kept_bytes:
            saved["intermediates"] = aligned(tokens * kept_bytes)
        forward, backward = _block_seconds(block, costs.redone, rows, self.seq_len, self.rates, trained.share)
        working_bytes = tokens * costs.backward.bytes_per_token(block, element)
        return SaveVariant(
            name=variant_name(costs, block, is_first=is_first), compiled=self.compiled, budget=costs.budget,
            saved=saved, forward=_timing(forward), backward=_timing(backward if trained.has_backward else 0.0),
            working_forward_bytes=tokens * costs.forward.bytes_per_token(block, element),
            working_backward_bytes=working_bytes if trained.has_backward else 0,
        )  # fmt: skip

    def _head(self, rows: int) -> SaveVariant:
        tokens, vocabulary, hidden, element = rows * self.seq_len, self.shape.vocabulary, self.hidden, self._element()
        chunk = min(self.chunk_tokens, tokens)
        product_s = _product_s(tokens, hidden, vocabulary, self.rates)
        rest_s = tokens * vocabulary * LOGIT_BYTES * element / 2 / self.rates.copy_bytes_per_s
        logits_bytes = chunk * vocabulary * element
        owner = self.stages[-1] if self.stages[-1].shares is None else self.stages[0]
        trained = any(len(shape) > 1 for shape in owner.trained_params.values())  # the output matrix
        return SaveVariant(
            name="all", compiled=self.compiled, saved={}, forward=_timing(product_s + rest_s),
            backward=_timing((2 + trained) * product_s + rest_s),
            working_forward_bytes=logits_bytes + tokens * hidden * element,
            working_backward_bytes=2 * logits_bytes + (chunk + 5 * tokens) * hidden * element,
        )  # fmt: skip

    def _embed(self, rows: int) -> SaveVariant:
        values, weights, element = rows * self.seq_len * self.hidden, self.shape.stages[0].num_params, self._element()
        moved = values * EMBED_FORWARD_BYTES, values * EMBED_BACKWARD_BYTES + weights * EMBED_WEIGHT_BYTES
        forward, backward = (num_bytes * element / 2 / self.rates.copy_bytes_per_s for num_bytes in moved)
        working_bytes, trained = (
            round((weights + values * EMBED_WORKING_BYTES / 2) * element),
            self.stages[0].is_trained,
        )
        return SaveVariant(
            name="all", saved={}, forward=_timing(forward), backward=_timing(backward if trained else 0.0),
            working_forward_bytes=values * element,
            working_backward_bytes=working_bytes if trained else 0,
        )  # fmt: skip

    def _element(self) -> int:
        return self.rates.element_bytes

    def _fragmentation_bytes(self, rows: int) -> int:
        """What a GPU's allocator may hold beyond what it gave out."""
        if not self.compiled:
            return 0
        largest = max(
            costs.backward.bytes_per_token(block, self._element())
            for block in self.shape.blocks.values()
            for costs in COMPILED
        )
        return round(FRAGMENTATION_SHARE * largest * rows * self.seq_len) + PARTLY_USED_BYTES

    # ---- machine

    def _memory(self) -> dict[Tier, int | None]:
        hardware = self.hardware
        gpu, host = (int(_value(hardware, f"{tier}_memory_bytes")) for tier in ("gpu", "host"))
        nvme = hardware.nvme_bytes.value
        return {"gpu": gpu, "host": host, "nvme": None if nvme is None else int(nvme)}

    def _links(self) -> dict[str, Curve]:
        hardware = self.hardware
        figures = {
            "h2d": hardware.h2d_bytes_per_s, "d2h": hardware.d2h_bytes_per_s, "h2d_both": hardware.h2d_both_bytes_per_s,
            "d2h_both": hardware.d2h_both_bytes_per_s, "host": hardware.host_copy_bytes_per_s,
            "gpu": hardware.gpu_copy_bytes_per_s, "nvme_read": hardware.nvme_read_bytes_per_s,
            "nvme_write": hardware.nvme_write_bytes_per_s,
        }  # fmt: skip
        known = {
            name: Curve(reason=figure.note) if figure.value is None else Curve(points=[(LARGE_BYTES, figure.value)])
            for name, figure in figures.items()
        }
        pageable = ("h2d_pageable", "d2h_pageable", "h2d_pageable_both", "d2h_pageable_both")
        return known | {name: Curve(reason="not estimated") for name in pageable}

    def _updates(self) -> dict[Literal["cpu", "gpu"], dict[str, Rate]]:
        rates: dict[Literal["cpu", "gpu"], dict[str, Rate]] = {"cpu": {}, "gpu": {}}
        for state_format, num_bytes in UPDATE_BYTES.items():
            of_cpu, of_gpu = (self.hardware.figures[f"{place}_update_{state_format}_per_s"] for place in rates)
            rates["cpu"][state_format] = Rate(per_s=of_cpu.value, reason=of_cpu.note or None)
            per_s = of_gpu.value or self.rates.copy_bytes_per_s / num_bytes
            rates["gpu"][state_format] = Rate(per_s=per_s, reason=of_gpu.note or None)
        return rates

    def _notes(self) -> dict[str, str]:
        sources = sorted({figure.source for figure in self.hardware.figures.values() if figure.source})
        return {"estimate": f"{self.hardware.name}: block times {_ESTIMATED}; figures are {', '.join(sources)}",
                **{f"hardware.{key}": note for key, note in self.hardware.notes.items()}}  # fmt: skip


def _block_seconds(
    block: BlockShape, redone: Redone, rows: int, seq_len: int, rates: _Rates, trained_share: float
) -> tuple[float, float]:
    """Forward and backward of a block, what is computed again included.

    Gradients are those of ``trained_share`` of its weights.
    """
    tokens = rows * seq_len

    def product(columns: int, width: int) -> float:
        return _product_s(tokens, columns, width, rates)

    attention_inputs = product(block.hidden, block.attention + 2 * block.key_value)
    attention_output, ffn_input = product(block.attention, block.hidden), product(block.hidden, block.ffn)
    products = attention_inputs + attention_output + 3 * ffn_input
    attention = _attention_s(block, rows, seq_len, rates)
    widths = FORWARD_FFN * block.ffn + FORWARD_HIDDEN * block.hidden
    rest = tokens * widths * rates.element_bytes / rates.copy_bytes_per_s
    again = (
        redone.attention_inputs * attention_inputs + redone.attention * attention
        + redone.attention_output * attention_output + redone.ffn_inputs * ffn_input + redone.rest * rest
    )  # fmt: skip
    backward = (1 + trained_share) * products + ATTENTION_BACKWARD * attention + BACKWARD_REST * rest + again
    return products + attention + rest, backward


def _product_s(rows: int, inner: int, columns: int, rates: _Rates) -> float:
    """A matrix product [rows, inner] x [inner, columns]: bound by arithmetic, or by reading and writing it all."""
    moved_bytes = (rows * inner + inner * columns + rows * columns) * rates.element_bytes
    return max(2 * rows * inner * columns / rates.matmul_flop_per_s, moved_bytes / rates.copy_bytes_per_s)


def _attention_s(block: BlockShape, rows: int, seq_len: int, rates: _Rates) -> float:
    """Forward of causal attention: each query sees half of the tokens on average, or its window."""
    window = min(block.window or seq_len, seq_len)
    pairs = rows * (seq_len * window - window * window / 2)
    share = ATTENTION_SHARE * window / (window + ATTENTION_TOKENS)
    return 4 * pairs * block.attention / (share * rates.matmul_flop_per_s)


def _timing(seconds: float) -> Timing:
    return Timing(median_s=seconds, reason=_ESTIMATED)
