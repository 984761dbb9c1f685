"""``lower``: a plan becomes a program. The only place that knows the order of a step.

Order of one training step (layer-major: a block is loaded once and serves every micro-batch):

    batch | embed forward | blocks forward | head: loss and its gradient | blocks backward, reversed | embed backward
          | global norm -> one factor | updates in forward order

Where the plan gives up both clipping and the check for gradients that are not finite, each stage is updated as soon as
its gradient is there instead.

Uploads, downloads and fetches stand in that list where they may start; dependencies come from the buffers alone
(``lazysched.hazards``). A program for evaluation stops at the loss.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

from lazysched.emitter import Emitter
from lazysched.hazards import dependency_edges
from lazysched.hidden_slots import HiddenSlots
from lazysched.layout import MASTER_BYTES, Layout
from lazysched.schemas import Plan, Program, Stage
from lazysched.static_buffers import static_buffer_sizes
from lazysched.uploads import Uploads


def lower(plan: Plan, stages: Sequence[Stage], *, training: bool = True) -> Program:
    """Lower ``plan`` for a model of ``stages`` to the operations of one step.

    Args:
        plan: the decisions.
        stages: ``embed``, the blocks, ``head``, in forward order.
        training: with False, the program evaluates the loss only.

    Raises:
        UsageError: the plan does not fit the model, or holds a decision that the runtime cannot execute.
    """
    return _Lowering(Layout(plan, stages), training).run()


class _Lowering:
    """Emits operations in order; transfers wait in queues until the operation that they may follow was emitted."""

    def __init__(self, layout: Layout, training: bool) -> None:
        self.layout = layout
        self.plan = layout.plan
        self.training = training
        self.emitter = Emitter(self.plan.host_memory)
        self.emit, self.buffer = self.emitter.emit, self.emitter.buffer
        self.uploads = Uploads(layout, training)
        self.window = -1
        self.num_saves = self.num_grads = 0
        self.slots = HiddenSlots()
        self.hidden: dict[int, str] = {}
        """Micro-batch -> slot of its hidden state, later of the gradient of that."""
        self.inputs: dict[tuple[str, int], str] = {}
        """(stage, micro-batch) -> slot of an input that waits on the GPU for the backward."""
        self.leaving: deque[str] = deque()
        """Slots of inputs on their way to the host."""
        self.fetches = self._fetch_order()
        self.fetch_index = {(stage.id, m): index for index, (stage, m) in enumerate(self.fetches)}

    def run(self) -> Program:
        """The whole step."""
        for buffer_id, num_bytes in static_buffer_sizes(self.layout, self.training).items():
            self.buffer(buffer_id, num_bytes)
        batch_bytes = self.layout.batch_bytes
        self.emit("batch", "copy", "h2d", reads=("host/batch",), writes=("gpu/batch",), num_bytes=batch_bytes)
        self._forward_pass()
        self._head()
        if self.training:
            self._backward_pass()
            self._totals()
            if self.plan.update.waits_for_norm:
                self._scale()
                for stage in self.layout.stages:
                    self._update(stage)
        text = self.plan.model_dump_json(exclude={"profile"})
        return Program(
            plan_hash=hashlib.sha256(text.encode()).hexdigest()[:16],
            ops=self.emitter.ops,
            edges=dependency_edges(list(self.emitter.ops.values())),
            buffers=self.emitter.buffers,
        )

    # ---- weights

    def _issue_uploads(self) -> None:
        """Emit the uploads that may follow the window just finished, and go on to the next."""
        for stage, phase in self.uploads.after.get(self.window, []):
            self.emit(
                f"load/{stage.id}/{phase}", "copy", "h2d", stage=stage.id, phase=phase,
                num_bytes=stage.weight_bytes, reads=(f"host/weights/{stage.id}",),
                writes=(self.uploads.weights(stage, phase),),
            )  # fmt: skip
        self.window += 1

    # ---- forward

    def _forward_pass(self) -> None:
        self._issue_uploads()
        for stage in self.layout.stages[:-1]:
            for m in range(self.plan.accumulation):
                self._forward(stage, m)
            self._issue_uploads()

    def _forward(self, stage: Stage, m: int) -> None:
        layout, variant = self.layout, self.layout.variants[stage.id]
        source = self.hidden[m] if stage.is_block else "gpu/batch"
        offloads = self.training and layout.offloaded_bytes(stage) > 0
        if offloads and len(self.leaving) > self.plan.d2h_lag:
            self.slots.give(self.leaving.popleft())
        target, op_id = self.slots.take(), f"forward/{stage.id}/{m}"
        writes = [target]
        if self.training and layout.kept_bytes(stage):
            writes.append(f"gpu/saved/{stage.id}/{m}")
            self.buffer(f"gpu/saved/{stage.id}/{m}", layout.kept_bytes(stage), op_id, f"backward/{stage.id}/{m}")
        outgoing = f"gpu/outgoing/slot{self.num_saves % (self.plan.d2h_lag + 1)}"
        if offloads and layout.outgoing_bytes(stage):
            writes.append(outgoing)
        reads = [source, self.uploads.weights(stage, "forward")]
        if self.plan.packing:
            (reads if stage.is_block else writes).append(f"gpu/arguments/{m}")
        self.emit(
            op_id, "forward", "compute", stage=stage.id, phase="forward", micro_batch=m,
            cost=("variant", stage.structure, variant.name, "forward"),
            working_bytes=variant.working_forward_bytes,
            reads=tuple(reads), writes=tuple(writes),
        )  # fmt: skip
        if offloads:
            self._save(stage, m, outgoing)
        if stage.is_block:
            self._after_use_of_input(stage, m)
        self.hidden[m] = target

    def _after_use_of_input(self, stage: Stage, m: int) -> None:
        """The input of a forward just emitted stays, leaves or is needed no more."""
        source = self.hidden[m]
        if not self.training:
            self.slots.give(source)
        elif self.layout.choice(stage).input_tier == "gpu":
            self.inputs[stage.id, m] = source
        else:
            self.leaving.append(source)

    def _save(self, stage: Stage, m: int, outgoing: str) -> None:
        layout = self.layout
        size, target = layout.offloaded_bytes(stage), f"host/saved/{stage.id}/{m}"
        reads = [self.hidden[m]] if layout.choice(stage).input_tier == "host" else []
        reads += [outgoing] if layout.outgoing_bytes(stage) else []
        self.buffer(target, size)
        self.emit(
            f"save/{stage.id}/{m}", "copy", "d2h", stage=stage.id, phase="forward", micro_batch=m,
            num_bytes=size, reads=tuple(reads), writes=(target,),
        )  # fmt: skip
        self.num_saves += 1

    # ---- head

    def _head(self) -> None:
        layout, stage = self.layout, self.layout.head
        if self.training:
            for position in range(layout.num_slots):
                self._fetch_for(position)
            if not self.plan.update.waits_for_norm:
                self._scale()
        for m in range(self.plan.accumulation):
            self._loss(m)
        if self.training:
            self._gradient_leaves(stage)
        else:
            self._totals()
        self._issue_uploads()

    def _loss(self, m: int) -> None:
        layout, stage = self.layout, self.layout.head
        variant = layout.variants[stage.id]
        op_id, phase = f"loss/head/{m}", "backward" if self.training else "forward"
        source = self.hidden[m]
        reads = [source, "gpu/batch", self.uploads.weights(stage, "forward")]
        writes = ["gpu/loss"]
        if layout.tied:
            reads.append(self.uploads.weights(layout.embed, "forward"))
        if self.training:
            self.hidden[m] = self.slots.take()
            writes += [self.hidden[m], layout.accumulator(stage)]
            writes += ["gpu/accumulator/shared"] if layout.tied else []
        self.emit(
            op_id, "loss", "compute", stage=stage.id, phase="backward" if self.training else "forward", micro_batch=m,
            cost=("variant", stage.structure, variant.name, phase),
            working_bytes=variant.working_backward_bytes if self.training else variant.working_forward_bytes,
            reads=tuple(reads), writes=tuple(writes),
        )  # fmt: skip
        self.slots.give(source)

    # ---- backward

    def _fetch_order(self) -> list[tuple[Stage, int]]:
        blocks = reversed(self.layout.blocks)
        return [(s, m) for s in blocks if self.layout.offloaded_bytes(s) for m in range(self.plan.accumulation)]

    def _fetch_for(self, position: int) -> None:
        """Emit the fetch, if any, for the micro-batch at ``position`` of the backward pass.

        The place depends on the position alone, so that a fetch needed late never stands before an upload needed soon.
        """
        back, m = divmod(position, self.plan.accumulation)
        if back >= len(self.layout.blocks):
            return
        stage = self.layout.blocks[-1 - back]
        if not self.layout.offloaded_bytes(stage):
            return
        self.emit(
            f"fetch/{stage.id}/{m}", "copy", "h2d", stage=stage.id, phase="backward", micro_batch=m,
            num_bytes=self.layout.offloaded_bytes(stage), reads=(f"host/saved/{stage.id}/{m}",),
            writes=(self._fetched(self.fetch_index[stage.id, m]),),
        )  # fmt: skip

    def _fetched(self, index: int) -> str:
        return f"gpu/fetched/slot{index % self.layout.num_slots}"

    def _backward_pass(self) -> None:
        for back, stage in enumerate(reversed(self.layout.blocks)):
            for m in range(self.plan.accumulation):
                self._backward(stage, m)
                self._fetch_for(back * self.plan.accumulation + m + self.layout.num_slots)
            self._gradient_leaves(stage)
            self._issue_uploads()
        self._backward_embed()

    def _backward(self, stage: Stage, m: int) -> None:
        layout, variant, choice = self.layout, self.layout.variants[stage.id], self.layout.choice(stage)
        output_grad, input_grad = self.hidden[m], self.slots.take()
        reads = [output_grad, self.uploads.weights(stage, "backward")]
        if choice.input_tier == "gpu":
            reads.append(self.inputs.pop((stage.id, m)))
            self.slots.give(reads[-1])
        if layout.kept_bytes(stage):
            reads.append(f"gpu/saved/{stage.id}/{m}")
        fetched = layout.offloaded_bytes(stage) > 0
        if fetched:
            reads.append(self._fetched(self.fetch_index[stage.id, m]))
        if self.plan.packing:
            reads.append(f"gpu/arguments/{m}")
        self.emit(
            f"backward/{stage.id}/{m}", "backward", "compute", stage=stage.id, phase="backward", micro_batch=m,
            cost=("variant", stage.structure, variant.name, "backward"), num_bytes=layout.adding_bytes(stage, m),
            working_bytes=variant.working_backward_bytes,
            reads=tuple(reads), writes=(input_grad, self._gradient_target(stage)),
        )  # fmt: skip
        self.slots.give(output_grad)
        self.hidden[m] = input_grad

    def _backward_embed(self) -> None:
        layout, stage = self.layout, self.layout.embed
        variant, target = layout.variants[stage.id], layout.accumulator(stage)
        for m in range(self.plan.accumulation):
            self.emit(
                f"backward/embed/{m}", "backward", "compute", stage=stage.id, phase="backward", micro_batch=m,
                cost=("variant", stage.structure, variant.name, "backward"),
                working_bytes=variant.working_backward_bytes,
                reads=(self.hidden[m], "gpu/batch"), writes=(target,),
            )  # fmt: skip
            self.slots.give(self.hidden.pop(m))
        if layout.tied:
            self.emit(
                "accumulate/embed", "accumulate", "compute", stage=stage.id, cost=("link", "gpu"),
                num_bytes=3 * MASTER_BYTES * layout.elements(stage), reads=("gpu/accumulator/shared",),
                writes=(target,),
            )  # fmt: skip
        self._gradient_leaves(stage)

    def _gradient(self, stage: Stage) -> str:
        """GPU buffer that holds the stage's finished gradient in the computing dtype."""
        if not self.layout.on_host(stage):
            return f"gpu/grads/{stage.id}"
        if not stage.is_block:
            return "gpu/grads/vocabulary"
        return f"gpu/grads/slot{self.num_grads % (self.plan.d2h_lag + 1)}"

    def _gradient_target(self, stage: Stage) -> str:
        """GPU buffer that the stage's backward adds its gradient to."""
        return self.layout.accumulator(stage) if self.layout.accumulates(stage) else self._gradient(stage)

    def _gradient_leaves(self, stage: Stage) -> None:
        """Round the finished gradient, take its norm and, for host state, send it there; update if nothing forbids."""
        layout, gradient = self.layout, self._gradient(stage)
        accumulates = layout.accumulates(stage)
        read_bytes = (MASTER_BYTES * layout.elements(stage) + stage.weight_bytes) if accumulates else 0
        self.emit(
            f"norm/{stage.id}", "norm", "compute", stage=stage.id, cost=("link", "gpu"),
            num_bytes=read_bytes + stage.weight_bytes, reads=(self._gradient_target(stage),),
            writes=("gpu/norms", gradient) if accumulates else ("gpu/norms",),
        )  # fmt: skip
        if layout.on_host(stage):
            self.emit(
                f"grads/{stage.id}", "copy", "d2h", stage=stage.id, num_bytes=stage.weight_bytes, reads=(gradient,),
                writes=(f"host/grads/{stage.id}",),
            )  # fmt: skip
            self.num_grads += stage.is_block
        if not self.plan.update.waits_for_norm:
            self._update(stage)

    # ---- update

    def _totals(self) -> None:
        """What the step reports: loss and gradient norms, sent to the host."""
        reads = ("gpu/loss", "gpu/norms") if self.training else ("gpu/loss",)
        self.emit("totals", "totals", "compute", reads=reads, writes=("gpu/totals",))
        self._emit_small_copy("totals")

    def _scale(self) -> None:
        """What updates read: clip factor and coefficients, made once, on the GPU, so that all processors see one."""
        reads = ("gpu/totals",) if self.plan.update.waits_for_norm else ()
        self.emit("scale", "scale", "compute", reads=reads, writes=("gpu/scale",))
        self._emit_small_copy("scale")

    def _emit_small_copy(self, kind: str) -> None:
        source = self.emitter.buffers[f"gpu/{kind}"]
        self.emit(
            f"{kind}/copy", "copy", "d2h", num_bytes=source.num_bytes, reads=(source.id,), writes=(f"host/{kind}",)
        )  # fmt: skip

    def _update(self, stage: Stage) -> None:
        on_host = self.layout.on_host(stage)
        place, processor = ("host", "cpu") if on_host else ("gpu", "gpu")
        self.emit(
            f"update/{stage.id}", "update", "cpu" if on_host else "compute", stage=stage.id,
            cost=("update", processor, self.layout.choice(stage).state_format), num_params=stage.num_params,
            working_bytes=self.layout.update_working_bytes(stage),
            reads=(f"{place}/grads/{stage.id}", f"{place}/scale"),
            writes=(f"{place}/state/{stage.id}", f"{place}/weights/{stage.id}"),
        )  # fmt: skip
