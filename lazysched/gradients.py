"""From gradients to new weights: where gradients are summed, how they leave, and the operations that end a step."""

from __future__ import annotations

from lazysched.emitter import Emitter
from lazysched.layout import MASTER_BYTES, Layout
from lazysched.schemas import Stage
from lazysched.staging import Staging


class Gradients:
    """Emits what follows a stage's backward.

    Args:
        layout: of the plan.
        emitter: of the program.
        staging: of the program.
    """

    def __init__(self, layout: Layout, emitter: Emitter, staging: Staging) -> None:
        self._layout, self._emitter, self._staging = layout, emitter, staging
        self._emit = emitter.emit
        self._waits_for_norm = layout.plan.update.waits_for_norm
        self._num_left = 0

    def targets(self, stage: Stage) -> tuple[str, ...]:
        """The GPU buffer that the stage's backward adds its gradient to; none where all of it is frozen."""
        return (self._target(stage),) if stage.is_trained else ()

    def _target(self, stage: Stage) -> str:
        return self._layout.accumulator(stage) if self._layout.accumulates(stage) else self._finished(stage)

    def _finished(self, stage: Stage) -> str:
        """GPU buffer that holds the stage's finished gradient in the computing dtype."""
        if not self._layout.on_host(stage):
            return f"gpu/grads/{stage.id}"
        if not stage.is_block:
            return "gpu/grads/vocabulary"
        return f"gpu/grads/slot{self._num_left % (self._layout.plan.d2h_lag + 1)}"

    def add_shared(self) -> None:
        """Add the tied head's sum to the embedding's."""
        stage = self._layout.embed
        self._emit(
            "accumulate/embed", "accumulate", "compute", stage=stage.id, cost=("link", "gpu"),
            num_bytes=3 * MASTER_BYTES * self._layout.elements(stage), reads=("gpu/accumulator/shared",),
            writes=(self._layout.accumulator(stage),),
        )  # fmt: skip

    def leave(self, stage: Stage) -> None:
        """Round the finished gradient, take its norm and, for the host, send it there; update if nothing forbids.

        A frozen stage has none.
        """
        if not stage.is_trained:
            return
        layout, gradient = self._layout, self._finished(stage)
        grad_bytes = layout.grad_bytes(stage)
        accumulates = layout.accumulates(stage)
        read_bytes = (MASTER_BYTES * layout.elements(stage) + grad_bytes) if accumulates else 0
        self._emit(
            f"norm/{stage.id}", "norm", "compute", stage=stage.id, cost=("link", "gpu"),
            num_bytes=read_bytes + grad_bytes, reads=(self._target(stage),),
            writes=("gpu/norms", gradient) if accumulates else ("gpu/norms",),
        )  # fmt: skip
        if layout.on_host(stage):
            self._emit(
                f"grads/{stage.id}", "copy", "d2h", stage=stage.id, num_bytes=grad_bytes, reads=(gradient,),
                writes=(f"host/grads/{stage.id}",),
            )  # fmt: skip
            self._num_left += stage.is_block
        if not self._waits_for_norm:
            self._update(stage)

    def totals(self, *, training: bool) -> None:
        """What the step reports: loss and, in training, gradient norms, sent to the host."""
        reads = ("gpu/loss", "gpu/norms") if training else ("gpu/loss",)
        self._emit("totals", "totals", "compute", reads=reads, writes=("gpu/totals",))
        self._send_small("totals")

    def scale(self) -> None:
        """What updates read: clip factor and coefficients, made once, on the GPU, so that all processors see one."""
        reads = ("gpu/totals",) if self._waits_for_norm else ()
        self._emit("scale", "scale", "compute", reads=reads, writes=("gpu/scale",))
        self._send_small("scale")

    def finish(self) -> None:
        """Report the step and, where updates wait for the norm, update every stage in forward order."""
        self.totals(training=True)
        if self._waits_for_norm:
            self.scale()
            for stage in self._layout.stages:
                if stage.is_trained:
                    self._update(stage)

    def _send_small(self, kind: str) -> None:
        source = self._emitter.buffers[f"gpu/{kind}"]
        self._emit(
            f"{kind}/copy", "copy", "d2h", num_bytes=source.num_bytes, reads=(source.id,), writes=(f"host/{kind}",)
        )  # fmt: skip

    def _update(self, stage: Stage) -> None:
        on_host = self._layout.on_host(stage)
        place, processor = ("host", "cpu") if on_host else ("gpu", "gpu")
        record = self._staging.record(stage)
        self._emit(
            f"update/{stage.id}", "update", "cpu" if on_host else "compute", stage=stage.id,
            cost=("update", processor, self._layout.choice(stage).state_format), num_params=stage.num_trained,
            working_bytes=self._layout.update_working_bytes(stage),
            reads=(f"{place}/grads/{stage.id}", f"{place}/scale"), writes=record,
        )  # fmt: skip
        self._staging.write_record(stage, record)
