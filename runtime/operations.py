"""What each kind of operation does. The program says which, when and on which buffers; nothing here decides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lazysched.errors import RunError
from lazysched.layout import SCALE_ELEMENTS, TOTAL_ELEMENTS, Layout
from lazysched.runtime.batch import Batch
from lazysched.runtime.blocks import BlockForm, add_gradients
from lazysched.runtime.buffers import Buffers
from lazysched.runtime.ends import Gradients
from lazysched.runtime.flat import aligned, flat_views
from lazysched.runtime.model import Model
from lazysched.runtime.saved import Saved
from lazysched.runtime.stage_updates import AdamWSettings, StageUpdate, StepScale
from lazysched.schemas import Op, Stage


@dataclass
class StepContext:
    """What belongs to one step alone.

    Attributes:
        batch: tokens, targets and, packed, positions, stacked [2 or 3, rows, tokens] int64, page-locked on a GPU.
        loss_scale: 1 / trained tokens of the step.
        learning_rate: of the step.
        scale: where the coefficients and the factor arrive on the host, fp32 [15].
        totals: where loss, gradient norm, skip and the norms of all trained tensors arrive on the host, fp32
            [3 + tensors].
        training: whether the step updates.
    """

    batch: torch.Tensor
    loss_scale: float
    learning_rate: float
    scale: torch.Tensor
    totals: torch.Tensor
    training: bool

    @classmethod
    def of(cls, batch: Batch, learning_rate: float, num_tensors: int, *, training: bool, pinned: bool) -> StepContext:
        """Context of one step on ``batch`` that trains ``num_tensors`` weights; ``pinned`` where a GPU copies."""
        packed = [] if batch.positions is None else [batch.positions]
        stacked = torch.stack([batch.input_ids, batch.targets, *packed])
        scale = torch.zeros(SCALE_ELEMENTS, pin_memory=pinned)
        totals = torch.zeros(TOTAL_ELEMENTS + num_tensors, pin_memory=pinned)
        stacked = stacked.pin_memory() if pinned else stacked
        return cls(stacked, 1.0 / max(batch.num_trained_tokens, 1), learning_rate, scale, totals, training)


class Operations:
    """Runs single operations on the model's modules and buffers."""

    def __init__(
        self,
        layout: Layout,
        model: Model,
        buffers: Buffers,
        updates: Mapping[str, StageUpdate],
        settings: AdamWSettings,
        max_grad_norm: float | None,
    ) -> None:
        self._layout, self._plan = layout, layout.plan
        self._model, self._buffers, self._updates = model, buffers, updates
        self._settings, self._max_grad_norm = settings, max_grad_norm
        self._saved: dict[tuple[str, int], Saved] = {}
        self._edges: dict[int, Any] = {}
        self._outgoing: dict[str, list[torch.Tensor]] = {}
        self._norm_range = norm_ranges(layout.stages)
        if self._plan.packing:
            model.use_argument_buffers([buffers[f"gpu/arguments/{m}"] for m in range(self._plan.accumulation)])
        self._handlers = {
            "copy": self._copy, "forward": self._forward, "backward": self._backward, "loss": self._loss,
            "norm": self._norm, "accumulate": self._accumulate, "totals": self._totals, "scale": self._scale,
            "update": self._update,
        }  # fmt: skip

    def run(self, op: Op, context: StepContext) -> None:
        """Run ``op`` on the calling thread and the current stream."""
        self._handlers[op.kind](op, context)

    def forget(self) -> None:
        """Drop what an interrupted step left."""
        for leftover in (self._saved, self._edges, self._outgoing):
            leftover.clear()

    # ---- helpers

    def _stage(self, op: Op) -> Stage:
        assert op.stage is not None
        return self._layout.by_id[op.stage]

    def _grads(self, buffer_id: str, stage: Stage) -> list[torch.Tensor]:
        """The gradients in a buffer, of the stage's trained parameters."""
        trained = self._layout.trained[stage.id]
        return list(flat_views(self._buffers[buffer_id], trained, self._layout.element_bytes).values())

    def _hidden(self, buffers: tuple[str, ...]) -> torch.Tensor:
        """The first hidden state, or gradient of one, among ``buffers``: [rows, tokens, hidden]."""
        return self._buffers[_only(buffers, "gpu/hidden/")].view(self._model.calls.hidden_shape)

    def _rows(self, index: int, micro_batch: int) -> torch.Tensor:
        """Token ids (0), targets (1) or positions (2) of a micro-batch, [rows, tokens]."""
        plan = self._plan
        batch = self._buffers["gpu/batch"].view(-1, plan.accumulation, plan.micro_batch, plan.seq_len)
        return batch[index, micro_batch]

    def _bound_form(self, op: Op, stage: Stage) -> BlockForm:
        self._model.templates[stage.structure].bind(self._buffers[_only(op.reads, "gpu/weights/")], stage)
        return self._model.form(stage, self._layout.variants[stage.id])

    # ---- copies

    def _copy(self, op: Op, context: StepContext) -> None:
        source, target = op.reads[0], op.writes[0]
        if source == "host/batch":
            self._buffers[target].copy_(context.batch.view(-1), non_blocking=True)
        elif target == "host/scale":
            context.scale.copy_(self._buffers[source], non_blocking=True)
        elif target == "host/totals":
            context.totals.copy_(self._buffers[source], non_blocking=True)
        elif target.startswith("host/saved/"):
            self._send(op.reads, self._buffers[target])
        else:
            count = op.num_bytes // self._buffers[source].element_size()
            self._buffers[target][:count].copy_(self._buffers[source][:count], non_blocking=True)

    def _send(self, sources: tuple[str, ...], target: torch.Tensor) -> None:
        """Copy what leaves to the host, an input and then each storage, at aligned places."""
        parts, offset = [], 0
        for source in sources:
            slot = source.startswith("gpu/hidden/")
            parts += [self._buffers[source].view(torch.uint8)] if slot else self._outgoing[source]
        for part in parts:
            target[offset : offset + part.numel()].copy_(part, non_blocking=True)
            offset += aligned(part.numel())

    # ---- forward

    def _forward(self, op: Op, context: StepContext) -> None:
        stage, m = self._stage(op), op.micro_batch
        assert m is not None
        if not stage.is_block:
            if self._plan.packing:
                self._model.pack(m, self._rows(2, m))
            self._model.ends.bind_embed(self._buffers[_only(op.reads, "gpu/weights/")], stage)
            hidden, self._edges[m] = self._model.ends.embed(self._model.calls, self._rows(0, m))
            self._hidden(op.writes).copy_(hidden)
            return
        form, arguments = self._bound_form(op, stage), self._model.arguments(stage, m)
        hidden, output = self._hidden(op.reads), self._hidden(op.writes)
        for slot in op.writes:  # its copy is done before this forward runs, so that its memory serves the forward
            self._outgoing.pop(slot, None)
        if context.training and self._layout.has_backward(stage):
            self._keep(op, stage, m, form.forward(hidden, arguments, output))
        else:
            form.evaluate(hidden, arguments, output)

    def _keep(self, op: Op, stage: Stage, m: int, saved: Saved) -> None:
        """Keep what the forward saved, and let go what the plan sends to the host."""
        self._check_saved(stage, saved)
        choice = self._plan.stages[stage.id]
        if choice.input_tier == "host":
            saved.drop_input()
        if "host" in choice.saved_tiers.values():
            self._outgoing[_only(op.writes, "gpu/outgoing/")] = saved.kept.storages
            saved.kept.storages = []
        self._saved[stage.id, m] = saved

    def _check_saved(self, stage: Stage, saved: Saved) -> None:
        planned = self._layout.variants[stage.id].saved
        input_bytes = aligned(math.prod(saved.input_shape) * self._layout.element_bytes)
        found = {"input": input_bytes, "intermediates": saved.kept.intermediate_bytes}
        for group, num_bytes in planned.items():
            if found[group] != num_bytes:
                raise RunError(
                    f"{stage.id}: its forward saves {found[group]} bytes of {group}, the plan expects {num_bytes}; "
                    f"profile and solve again on this machine"
                )

    # ---- head

    def _loss(self, op: Op, context: StepContext) -> None:
        stage, m, ends = self._stage(op), op.micro_batch, self._model.ends
        assert m is not None
        own, *shared = [buffer for buffer in op.reads if buffer.startswith("gpu/weights/")]
        ends.bind_head(self._buffers[own], stage)
        if shared:
            ends.bind_shared(self._buffers[shared[0]], self._layout.embed)
        arguments = (self._hidden(op.reads), self._rows(1, m), context.loss_scale, self._plan.loss_chunk_tokens)
        if context.training:
            loss, hidden_grad = ends.loss_and_gradient(*arguments, self._head_sums(op, stage, m))
            self._hidden(op.writes).copy_(hidden_grad)
        else:
            loss = ends.loss(*arguments)
        total = self._buffers["gpu/loss"]
        total.copy_(loss) if m == 0 else total.add_(loss)

    def _head_sums(self, op: Op, stage: Stage, m: int) -> Gradients:
        """Where the loss adds its weight gradients: of the final norm, then of the output matrix."""
        layout, num_norm = self._layout, self._model.ends.num_trained_norm
        own = self._grads(layout.accumulator(stage), stage) if stage.is_trained else []
        has_shared = layout.tied and layout.embed.is_trained
        shared = self._grads("gpu/accumulator/shared", layout.embed) if has_shared else []
        return Gradients(own[:num_norm], own[num_norm:] + shared, fresh=m == 0)

    # ---- backward

    def _backward(self, op: Op, context: StepContext) -> None:
        stage, m = self._stage(op), op.micro_batch
        assert m is not None
        output_grad = self._hidden(op.reads)
        if stage.is_block:
            saved = self._restored(op, stage, m)
            form = self._bound_form(op, stage)
            form.backward(
                saved, self._model.arguments(stage, m), output_grad, self._hidden(op.writes),
                [view for target in op.writes[1:] for view in self._grads(target, stage)], first=m == 0,
            )  # fmt: skip
        else:
            grads = self._model.ends.embed_backward(self._edges.pop(m), output_grad)
            add_gradients(self._grads(op.writes[0], stage), grads, first=m == 0)

    def _restored(self, op: Op, stage: Stage, m: int) -> Saved:
        """What the forward kept, with what was on the host read from the fetched slot."""
        saved, choice = self._saved.pop((stage.id, m)), self._plan.stages[stage.id]
        fetched = [buffer for buffer in op.reads if buffer.startswith("gpu/fetched/")]
        if not fetched:
            return saved
        slot, offset = self._buffers[fetched[0]], 0
        if choice.input_tier == "host":
            size = math.prod(saved.input_shape) * self._layout.element_bytes
            saved.kept.input = slot[:size].view(self._model.dtype).view(saved.input_shape)
            offset = aligned(size)
        if "host" in choice.saved_tiers.values():
            for size in saved.kept.sizes:
                saved.kept.storages.append(slot[offset : offset + size])
                offset += aligned(size)
        return saved

    # ---- gradients and update

    def _norm(self, op: Op, context: StepContext) -> None:
        stage, gradient = self._stage(op), op.writes[-1]
        if gradient == "gpu/norms":
            gradient = op.reads[0]
        else:
            count = self._layout.elements(stage)
            self._buffers[gradient][:count].copy_(self._buffers[op.reads[0]][:count])
        first, last = self._norm_range[stage.id]
        norms = torch._foreach_norm(self._grads(gradient, stage), 2, dtype=torch.float32)
        torch.stack(list(norms), out=self._buffers["gpu/norms"][first:last])

    def _accumulate(self, op: Op, context: StepContext) -> None:
        self._buffers[op.writes[0]].add_(self._buffers[op.reads[0]])

    def _totals(self, op: Op, context: StepContext) -> None:
        totals, loss = self._buffers["gpu/totals"], self._buffers["gpu/loss"][0]
        if not context.training:
            totals[0].copy_(loss)
            return
        norms = self._buffers["gpu/norms"]
        norm = torch.linalg.vector_norm(norms)
        skip = (~torch.isfinite(norm)).float() if self._plan.update.check_finite else torch.zeros_like(norm)
        torch.cat([torch.stack([loss, norm, skip]), norms], out=totals)

    def _scale(self, op: Op, context: StepContext) -> None:
        scale = self._buffers["gpu/scale"]
        before = self._scale_of(scale, context)
        factor, skip = torch.ones_like(before.factor), torch.zeros_like(before.factor)
        if "gpu/totals" in op.reads:
            _, norm, skip = self._buffers["gpu/totals"][:TOTAL_ELEMENTS]
            if self._max_grad_norm is not None:
                factor = torch.clamp(self._max_grad_norm / (norm + 1e-6), max=1.0)
        coefficients = self._settings.coefficients(factor, skip, before.step + 1 - skip, context.learning_rate)
        torch.cat([coefficients, factor[None]], out=scale)

    def _update(self, op: Op, context: StepContext) -> None:
        values = context.scale if op.engine == "cpu" else self._buffers["gpu/scale"]
        assert op.stage is not None
        self._updates[op.stage].update(self._scale_of(values, context))

    @staticmethod
    def _scale_of(values: torch.Tensor, context: StepContext) -> StepScale:
        return StepScale(factor=values[-1], coefficients=values[:-1], learning_rate=context.learning_rate)


def _only(buffers: tuple[str, ...], prefix: str) -> str:
    """The first of ``buffers`` under ``prefix``."""
    return next(buffer for buffer in buffers if buffer.startswith(prefix))


def norm_ranges(stages: list[Stage]) -> dict[str, tuple[int, int]]:
    """Where the norms of each stage's trained tensors stand, in the order of the flat store."""
    ranges, start = {}, 0
    for stage in stages:
        ranges[stage.id] = (start, start + len(stage.trained_params))
        start += len(stage.trained_params)
    return ranges
