"""``lower``: a plan becomes a program. The only place that knows the order of a step.

Order of one training step (layer-major: a block is loaded once and serves every micro-batch):

    batch | embed forward | blocks forward | head: loss and its gradient | blocks backward, reversed | embed backward
          | global norm -> one factor | updates in forward order

Where the plan gives up both clipping and the check for gradients that are not finite, each stage is updated as soon as
its gradient is there instead.

What is frozen has no gradient, no norm and no update; the backward ends at the first stage that trains anything.

A segment of several blocks keeps its first input alone: its backward first runs the blocks forward again, in order,
each for all micro-batches, keeping what their variant saves.

Uploads, downloads and fetches stand in that list where they may start, reads of files just before what needs them;
dependencies come from the buffers alone (``lazysched.hazards``). A program for evaluation stops at the loss.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

from lazysched.emitter import Emitter
from lazysched.gradients import Gradients
from lazysched.hazards import dependency_edges
from lazysched.hidden_slots import HiddenSlots, num_hidden_slots, num_segment_slots
from lazysched.layout import Layout
from lazysched.schemas import Phase, Plan, Program, Stage
from lazysched.staging import Staging
from lazysched.static_buffers import static_buffer_sizes
from lazysched.uploads import Uploads


def lower(plan: Plan, stages: Sequence[Stage], *, training: bool = True) -> Program:
    """Lower ``plan`` for a model of ``stages`` to the operations of one step.

    Args:
        plan: the decisions.
        stages: ``embed``, the blocks, ``head``, in forward order.
        training: with False, the program evaluates the loss only.

    Raises:
        UsageError: the plan does not fit the model, or contradicts itself.
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
        self.staging = Staging(layout, self.emitter)
        self.gradients = Gradients(layout, self.emitter, self.staging)
        self.uploads = Uploads(layout, training)
        self.window = -1
        self.num_outgoing = 0
        self.slots = HiddenSlots(num_hidden_slots(layout, training))
        self.hidden: dict[int, str] = {}
        """Micro-batch -> slot of its hidden state, later of the gradient of that."""
        self.inputs: dict[tuple[str, int], str] = {}
        """(stage, micro-batch) -> slot of an input that waits on the GPU for the backward."""
        self.leaving: deque[str] = deque()
        """Slots of inputs on their way to the host."""
        self.turns = [
            (stage, phase, m) for stage, phase in layout.backward_order for m in range(self.plan.accumulation)
        ]
        """What the blocks run after the loss."""
        self.fetched: dict[tuple[str, int], str] = {}
        """(stage, micro-batch) -> slot with what comes back for it."""
        self.num_fetches: Counter[str] = Counter()

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
            self.gradients.finish()
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
            source = self.staging.weights(stage, phase)
            self.emit(
                f"load/{stage.id}/{phase}", "copy", "h2d", stage=stage.id, phase=phase,
                num_bytes=stage.weight_bytes, reads=(source,), writes=(self.uploads.weights(stage, phase),),
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
        layout = self.layout
        source = self.hidden[m] if stage.is_block else "gpu/batch"
        offloads = self.training and layout.offloaded_bytes(stage) > 0
        if offloads and len(self.leaving) > self.plan.d2h_lag:
            self.slots.give(self.leaving.popleft())
        target = self.slots.take()
        writes = [target]
        outgoing = f"gpu/outgoing/slot{self.num_outgoing % (self.plan.d2h_lag + 1)}"
        if self.training and not layout.in_segment(stage):
            writes += self._kept(stage, m, "forward")
            writes += [outgoing] if layout.outgoing_bytes(stage) else []
        self._run_forward(stage, m, "forward", source, writes)
        if offloads:
            self._save(stage, m, outgoing)
        if stage.is_block:
            self._after_use_of_input(stage, m)
        self.hidden[m] = target

    def _run_forward(
        self, stage: Stage, m: int, phase: Literal["forward", "recompute"], source: str, writes: list[str]
    ) -> None:
        layout, variant = self.layout, self.layout.variants[stage.id]
        reads = [source, self.uploads.weights(stage, phase)]
        if self.plan.packing:
            (reads if stage.is_block else writes).append(f"gpu/arguments/{m}")
        # In a segment the first of the two runs of one graph makes what it saves too, and drops it.
        drops = self.training and phase == "forward" and layout.in_segment(stage)
        self.emit(
            f"{phase}/{stage.id}/{m}", phase, "compute", stage=stage.id, phase=phase, micro_batch=m,
            cost=("variant", stage.structure, variant.name, "forward"),
            working_bytes=variant.working_forward_bytes + (layout.kept_bytes(stage) if drops else 0),
            reads=tuple(reads), writes=tuple(writes),
        )  # fmt: skip

    def _kept(self, stage: Stage, m: int, phase: Phase) -> list[str]:
        """The buffer, if any, with what the stage's run in ``phase`` keeps on the GPU until its backward."""
        num_bytes, buffer_id = self.layout.kept_bytes(stage), f"gpu/saved/{stage.id}/{m}"
        if not num_bytes:
            return []
        self.buffer(buffer_id, num_bytes, f"{phase}/{stage.id}/{m}", f"backward/{stage.id}/{m}")
        return [buffer_id]

    def _after_use_of_input(self, stage: Stage, m: int) -> None:
        """The input of a forward just emitted stays, leaves or is needed no more."""
        source = self.hidden[m]
        if not self.training or not self.layout.keeps_input(stage):
            self.slots.give(source)
        elif self.layout.choice(stage).input_tier == "gpu":
            self.inputs[stage.id, m] = source
        else:
            self.leaving.append(source)

    def _save(self, stage: Stage, m: int, outgoing: str) -> None:
        target = self.staging.outgoing(stage, m)
        reads = [self.hidden[m]] if self.layout.choice(stage).input_tier != "gpu" else []
        reads += [outgoing] if self.layout.outgoing_bytes(stage) else []
        self.emit(
            f"save/{stage.id}/{m}", "copy", "d2h", stage=stage.id, phase="forward", micro_batch=m,
            num_bytes=self.layout.offloaded_bytes(stage), reads=tuple(reads), writes=(target,),
        )  # fmt: skip
        self.staging.put_away(stage, m, target)
        self.num_outgoing += self.layout.outgoing_bytes(stage) > 0

    # ---- head

    def _head(self) -> None:
        layout, stage = self.layout, self.layout.head
        if self.training:
            for position in range(layout.num_slots):
                self._fetch_for(position)
            if not self.plan.update.waits_for_norm:
                self.gradients.scale()
        for m in range(self.plan.accumulation):
            self._loss(m)
        if self.training:
            self.gradients.leave(stage)
        else:
            self.gradients.totals(training=False)
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
            writes += [self.hidden[m], *self.gradients.targets(stage)]
            writes += ["gpu/accumulator/shared"] if layout.tied and layout.embed.is_trained else []
        self.emit(
            op_id, "loss", "compute", stage=stage.id, phase="backward" if self.training else "forward", micro_batch=m,
            cost=("variant", stage.structure, variant.name, phase),
            working_bytes=variant.working_backward_bytes if self.training else variant.working_forward_bytes,
            reads=tuple(reads), writes=tuple(writes),
        )  # fmt: skip
        self.slots.give(source)

    # ---- backward

    def _fetch_for(self, position: int) -> None:
        """Emit the fetch, if any, for the turn at ``position`` of the backward pass.

        The place depends on the position alone, so that a fetch needed late never stands before an upload needed soon.
        """
        if position >= len(self.turns):
            return
        stage, phase, m = self.turns[position]
        layout, is_first_use = self.layout, (phase == "recompute") == self.layout.in_segment(stage)
        if not layout.offloaded_bytes(stage) or not is_first_use:
            return
        kind, count = ("segment", num_segment_slots(layout)) if phase == "recompute" else ("fetched", layout.num_slots)
        target = f"gpu/{kind}/slot{self.num_fetches[kind] % count}"
        self.num_fetches[kind] += 1
        self.fetched[stage.id, m] = target
        source = self.staging.saved(stage, m)
        self.emit(
            f"fetch/{stage.id}/{m}", "copy", "h2d", stage=stage.id, phase="backward", micro_batch=m,
            num_bytes=layout.offloaded_bytes(stage), reads=(source,), writes=(target,),
        )  # fmt: skip

    def _backward_pass(self) -> None:
        for position, (stage, phase, m) in enumerate(self.turns):
            (self._recompute if phase == "recompute" else self._backward)(stage, m)
            self._fetch_for(position + self.layout.num_slots)
            if m == self.plan.accumulation - 1:
                if phase == "backward":
                    self.gradients.leave(stage)
                self._issue_uploads()
        if self.layout.embed.is_trained:
            self._backward_embed()

    def _recompute(self, stage: Stage, m: int) -> None:
        """Run a block of a segment forward again; its output is the input of the next, which waits for its backward."""
        key, target = (stage.id, m), self.slots.take()
        source = self.inputs[key] if key in self.inputs else self.fetched[key]
        self._run_forward(stage, m, "recompute", source, [target, *self._kept(stage, m, "recompute")])
        following = self.layout.next_of_segment(stage)
        if following is None:
            self.slots.give(target)
        else:
            self.inputs[following.id, m] = target

    def _backward(self, stage: Stage, m: int) -> None:
        layout, variant, key = self.layout, self.layout.variants[stage.id], (stage.id, m)
        output_grad, input_grad = self.hidden[m], self.slots.take()
        reads = [output_grad, self.uploads.weights(stage, "backward")]
        if key in self.inputs:
            reads.append(self.inputs.pop(key))
            self.slots.give(reads[-1])
        if layout.kept_bytes(stage):
            reads.append(f"gpu/saved/{stage.id}/{m}")
        if key in self.fetched:
            reads.append(self.fetched.pop(key))
        if self.plan.packing:
            reads.append(f"gpu/arguments/{m}")
        self.emit(
            f"backward/{stage.id}/{m}", "backward", "compute", stage=stage.id, phase="backward", micro_batch=m,
            cost=("variant", stage.structure, variant.name, "backward"), num_bytes=layout.adding_bytes(stage, m),
            working_bytes=variant.working_backward_bytes,
            reads=tuple(reads), writes=(input_grad, *self.gradients.targets(stage)),
        )  # fmt: skip
        self.slots.give(output_grad)
        self.hidden[m] = input_grad

    def _backward_embed(self) -> None:
        layout, stage = self.layout, self.layout.embed
        variant = layout.variants[stage.id]
        for m in range(self.plan.accumulation):
            self.emit(
                f"backward/embed/{m}", "backward", "compute", stage=stage.id, phase="backward", micro_batch=m,
                cost=("variant", stage.structure, variant.name, "backward"),
                working_bytes=variant.working_backward_bytes,
                reads=(self.hidden[m], "gpu/batch"), writes=self.gradients.targets(stage),
            )  # fmt: skip
            self.slots.give(self.hidden.pop(m))
        if layout.tied:
            self.gradients.add_shared()
        self.gradients.leave(stage)
