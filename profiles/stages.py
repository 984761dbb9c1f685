"""Times and bytes of a stage's forward and backward, run through the same calls that the executor makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lazysched.errors import RunError
from lazysched.layout import MASTER_BYTES
from lazysched.profiles.attention import representatives
from lazysched.profiles.clock import num_repeats, stopwatch, synchronize, timing, wall_s
from lazysched.profiles.fragmentation import fragmentation_bytes
from lazysched.profiles.passes import Pass, working_bytes_of
from lazysched.profiles.random_data import random_normal, random_tokens, random_weights
from lazysched.profiles.variants import UNCOMPILED, Wanted, candidates, interpolated, kept_bytes, worth_keeping
from lazysched.runtime.blocks import BlockForm, add_gradients
from lazysched.runtime.ends import Gradients
from lazysched.runtime.flat import aligned, flat_views
from lazysched.runtime.model import Model
from lazysched.runtime.packed import example_positions
from lazysched.runtime.saved import Saved
from lazysched.schemas import SaveVariant, Stage, Timing
from lazysched.schemas.profile import UNCOMPILED_NOTE
from lazysched.trainable import trained_part

OUTPUT_GRAD_SCALE = 1e-3
HEAT_S = 0.5
NO_BACKWARD = Timing(median_s=0.0, reason="nothing is trained here or before")


@dataclass(frozen=True)
class StageMeasurements:
    """What one micro-batch of a model was measured to do.

    Attributes:
        micro_batch: rows that went through at once.
        variants: structure -> its variants, those of a block in order of what they keep, most first.
        fragmentation_bytes: most that the GPU's allocator held beyond what it had given out; 0 on a CPU.
        notes: what went otherwise than wanted.
    """

    micro_batch: int
    variants: dict[str, list[SaveVariant]]
    fragmentation_bytes: int
    notes: dict[str, str]


def measure_stages(
    model: Model,
    micro_batch: int,
    seq_len: int,
    chunk_tokens: int,
    repeats: int | None,
    compiled: bool,
    reference: StageMeasurements | None = None,
) -> StageMeasurements:
    """Measure one stage of every structure of ``model``.

    Args:
        model: built for ``micro_batch`` rows of ``seq_len`` tokens.
        micro_batch: rows that go through a stage at once.
        seq_len: tokens of a row.
        chunk_tokens: tokens whose logits exist at once in the head.
        repeats: timed repeats of each figure; None chooses by the time one takes.
        compiled: whether blocks and loss are compiled.
        reference: of another micro-batch. Then of the compiled variants only those that keep most and least are
            measured, and the others are interpolated.

    Raises:
        torch.OutOfMemoryError: the GPU is too small for this micro-batch.
    """
    return _Measuring(model, micro_batch, seq_len, chunk_tokens, repeats, compiled, reference).run()


class _Measuring:
    def __init__(
        self, model: Model, micro_batch: int, seq_len: int, chunk_tokens: int, repeats: int | None, compiled: bool,
        reference: StageMeasurements | None,
    ) -> None:  # fmt: skip
        self.model, self.device = model, model.device
        self.chunk_tokens, self.repeats = chunk_tokens, repeats
        self.compiled, self.reference = compiled, reference
        self.rows = (micro_batch, seq_len)
        self.vocabulary = next(iter(model.stages[0].params.values()))[0]
        self.forms: list[tuple[Stage, BlockForm]] = []
        self.fragmentation_bytes = 0
        self.notes: dict[str, str] = {}

    def run(self) -> StageMeasurements:
        embed, head = self.model.stages[0], self.model.stages[-1]
        hidden_shape, embed_pass = self._embed_pass(embed)
        variants = {embed.structure: [self._variant("all", {}, embed_pass)]}
        for stage in representatives(self.model.stages):
            variants[stage.structure] = self._block_variants(stage, hidden_shape)
        variants[head.structure] = [self._head_variant(embed, head, hidden_shape)]
        return StageMeasurements(self.rows[0], variants, self.fragmentation_bytes, self.notes)

    # ---- what runs

    def _embed_pass(self, stage: Stage) -> tuple[torch.Size, Pass]:
        ends, calls = self.model.ends, self.model.calls
        weights = random_weights(stage, self.model.dtype, self.device)
        accumulator = self._accumulator(stage) if stage.is_trained else None
        ids = random_tokens(self.rows, self.vocabulary, self.device)
        positions = example_positions(*self.rows, self.device) if self.model.calls.packed else None

        def forward() -> tuple[torch.Tensor, Any]:
            if positions is not None:
                self.model.pack(0, positions)
            ends.bind_embed(weights, stage)
            return ends.embed(calls, ids)

        hidden, _ = forward()
        output_grad = random_normal(hidden.shape, self.model.dtype, self.device, OUTPUT_GRAD_SCALE)

        if accumulator is None:
            return hidden.shape, Pass(forward, None, lambda _: 0)
        sums = self._grads(accumulator, stage)

        def backward(kept: tuple[torch.Tensor, Any]) -> None:
            add_gradients(sums, ends.embed_backward(kept[1], output_grad), first=False)

        return hidden.shape, Pass(forward, backward, lambda _: 0)

    def _block_variants(self, stage: Stage, hidden_shape: torch.Size) -> list[SaveVariant]:
        """All variants of a structure, compiled ones where that is wanted and works.

        A block without a backward has one, which keeps nothing.
        """
        if self.compiled:
            try:
                return self._compiled_variants(stage, hidden_shape)
            except RunError as error:
                self.notes[f"{UNCOMPILED_NOTE}{stage.structure}"] = f"blocks run uncompiled: {error}"
        wanted = UNCOMPILED if self.model.has_backward(stage) else UNCOMPILED[-1:]
        return [self._block_variant(stage, hidden_shape, each) for each in wanted]

    def _compiled_variants(self, stage: Stage, hidden_shape: torch.Size) -> list[SaveVariant]:
        if not self.model.has_backward(stage):
            return [self._block_variant(stage, hidden_shape, replace(UNCOMPILED[-1], budget=0.0))]
        kept = partial(self.model.kept, stage)
        reference = self.reference.variants[stage.structure] if self.reference else []
        if not reference or not reference[0].compiled:
            wanted = candidates(kept, math.prod(self.rows))
            return worth_keeping([self._block_variant(stage, hidden_shape, each) for each in wanted])
        extremes = [
            self._block_variant(stage, hidden_shape, Wanted(v.name, v.budget, "intermediates" in v.saved))
            for v in (reference[0], reference[-1])[: len(reference)]
        ]
        ends, name = (extremes[0], extremes[-1]), f"micro-batch {self.reference.micro_batch}" if self.reference else ""
        grad_bytes = sum(grad.nbytes for grad in self.model.returned(stage, reference[-1].budget or 0.0))
        between = [
            interpolated(v, reference, ends, kept_bytes(kept(v.budget or 0.0)), grad_bytes, name)
            for v in reference[1:-1]
        ]
        return [extremes[0], *between, *extremes[1:]]

    def _block_variant(self, stage: Stage, hidden_shape: torch.Size, wanted: Wanted) -> SaveVariant:
        self._begin_run()
        form = self.model.block_form(stage, wanted.budget, wanted.keep)
        template, arguments = self.model.templates[stage.structure], self.model.arguments(stage)
        weights = random_weights(stage, self.model.dtype, self.device)
        hidden = random_normal(hidden_shape, self.model.dtype, self.device)
        output_grad = random_normal(hidden_shape, self.model.dtype, self.device, OUTPUT_GRAD_SCALE)
        output, input_grad = torch.empty_like(hidden), torch.empty_like(hidden)
        saved = {"input": aligned(hidden.nbytes)}

        def evaluate() -> None:
            template.bind(weights, stage)
            form.evaluate(hidden, arguments, output)

        if not self.model.has_backward(stage):
            return self._variant(wanted.name, saved, Pass(evaluate, None, lambda _: 0), wanted.budget)
        targets = self._targets(stage)

        def forward() -> Saved:
            template.bind(weights, stage)
            return form.forward(hidden, arguments, output)

        def backward(kept: Saved) -> None:
            template.bind(weights, stage)
            form.backward(kept, arguments, output_grad, input_grad, targets, first=True)

        if wanted.keep:
            saved["intermediates"] = forward().kept.intermediate_bytes
        block_pass = Pass(forward, backward, lambda kept: sum(kept.kept.sizes))
        self.forms.append((stage, form))
        return self._variant(wanted.name, saved, block_pass, wanted.budget)

    def _note_fragmentation(self, loss: Callable[[], object]) -> None:
        for stage, form in self.forms:
            template, arguments = self.model.templates[stage.structure], self.model.arguments(stage)
            weights = random_weights(stage, self.model.dtype, self.device)
            template.bind(weights, stage)
            targets = self._targets(stage)
            hidden = random_normal(self.model.calls.hidden_shape, self.model.dtype, self.device, OUTPUT_GRAD_SCALE)
            try:
                found_bytes = fragmentation_bytes(form, arguments, hidden, targets, loss)
            except torch.OutOfMemoryError:
                self.notes["fragmentation"] = "not measured for all variants: some blocks in a row do not fit the GPU"
                return
            self.fragmentation_bytes = max(self.fragmentation_bytes, found_bytes)

    def _head_variant(self, embed: Stage, head: Stage, hidden_shape: torch.Size) -> SaveVariant:
        if self.compiled:
            try:
                self.model.compile_loss(self.chunk_tokens)
            except RunError as error:
                self.compiled = False
                self.notes[f"{UNCOMPILED_NOTE}head"] = f"the loss runs uncompiled: {error}"
        head_pass = self._head_pass(embed, head, hidden_shape)
        variant = self._variant("all", {}, head_pass, compiled=self.compiled)
        if self.device.type == "cuda":
            assert head_pass.backward is not None
            self._note_fragmentation(partial(head_pass.backward, None))
        return variant

    def _head_pass(self, embed: Stage, head: Stage, hidden_shape: torch.Size) -> Pass:
        ends = self.model.ends
        weights = random_weights(head, self.model.dtype, self.device)
        own = self._grads(self._accumulator(head), head)
        num_norm = ends.num_trained_norm
        output, shared = own[num_norm:], None
        if head.shares is not None:
            shared = random_weights(embed, self.model.dtype, self.device)
            output = self._grads(self._accumulator(embed), embed)
        hidden = random_normal(hidden_shape, self.model.dtype, self.device)
        targets = random_tokens(self.rows, self.vocabulary, self.device)
        scale = 1.0 / targets.numel()

        def bind() -> None:
            ends.bind_head(weights, head)
            if shared is not None:
                ends.bind_shared(shared, embed)

        def forward() -> torch.Tensor:
            bind()
            return ends.loss(hidden, targets, scale, self.chunk_tokens)

        def backward(_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            bind()
            sums = Gradients(own[:num_norm], output, fresh=False)
            return ends.loss_and_gradient(hidden, targets, scale, self.chunk_tokens, sums)

        return Pass(forward, backward, lambda loss: loss.nbytes)

    def _accumulator(self, stage: Stage) -> torch.Tensor:
        """An fp32 accumulator of ``stage`` in which there is a gradient already."""
        assert torch.float32.itemsize == MASTER_BYTES
        return random_normal((self._num_grads(stage),), torch.float32, self.device, OUTPUT_GRAD_SCALE)

    def _num_grads(self, stage: Stage) -> int:
        """Elements of the stage's gradient, alignment included."""
        element_bytes = self.model.dtype.itemsize
        return trained_part(stage, element_bytes).weight_bytes // element_bytes

    def _grads(self, flat: torch.Tensor, stage: Stage) -> list[torch.Tensor]:
        """Gradients of the stage's trained parameters in ``flat``."""
        element_bytes = self.model.dtype.itemsize
        return list(flat_views(flat, trained_part(stage, element_bytes), element_bytes).values())

    def _targets(self, stage: Stage) -> list[torch.Tensor]:
        """Where a block's gradients go without accumulation."""
        return self._grads(torch.empty(self._num_grads(stage), dtype=self.model.dtype, device=self.device), stage)

    # ---- measuring

    def _variant(
        self, name: str, saved: dict[str, int], stage_pass: Pass, budget: float | None = None, *, compiled: bool = False
    ) -> SaveVariant:
        if self.device.type == "cuda":
            stage_pass.run()  # libraries take their workspaces now, outside the figures
        working_bytes: list[int] = []
        once_s = wall_s(lambda: working_bytes.extend(working_bytes_of(stage_pass, self.device)), self.device)
        self._heat(stage_pass, once_s)
        forward, backward = stopwatch(self.device), stopwatch(self.device)
        for _ in range(num_repeats(once_s, self.repeats)):
            kept = forward.lap(stage_pass.forward)
            if stage_pass.backward is not None:
                backward.lap(partial(stage_pass.backward, kept))
            del kept
        return SaveVariant(
            name=name, compiled=compiled or budget is not None, budget=budget, saved=saved,
            forward=timing(forward.durations_s()),
            backward=NO_BACKWARD if stage_pass.backward is None else timing(backward.durations_s()),
            working_forward_bytes=working_bytes[0], working_backward_bytes=working_bytes[1],
        )  # fmt: skip

    def _heat(self, stage_pass: Pass, once_s: float) -> None:
        """Run for a while first: after a rest a GPU computes faster than it can for long."""
        if self.device.type == "cuda" and self.repeats is None:
            for _ in range(int(HEAT_S / once_s)):
                stage_pass.run()

    def _begin_run(self) -> None:
        if self.device.type == "cuda":
            synchronize(self.device)
            torch.cuda.empty_cache()
