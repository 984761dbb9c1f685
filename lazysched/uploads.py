"""When the weights of each stage may be uploaded, and which buffer holds them.

A window is the time in which one stage computes; windows are counted in the order of the step, from 0.
"""

from __future__ import annotations

from collections import defaultdict

from lazysched.layout import Layout
from lazysched.schemas import Phase, Stage
from lazysched.weight_slots import assign_slots

START = -1
"""The window before the first."""


class Uploads:
    """Uploads of one step.

    Attributes:
        after: window -> (stage, phase) of the uploads that may start once it was launched, soonest needed first.
    """

    def __init__(self, layout: Layout, training: bool) -> None:
        self._layout = layout
        self._slot_of: dict[tuple[str, Phase], int] = {}
        self.after: dict[int, list[tuple[Stage, Phase]]] = defaultdict(list)
        uploads = [*self._streamed(training), *self._own_buffers()]
        for after, _, stage, phase in sorted(uploads, key=lambda upload: upload[:2]):
            self.after[max(after, START)].append((stage, phase))

    def weights(self, stage: Stage, phase: Phase) -> str:
        """Id of the buffer that holds the stage's weights in ``phase``."""
        if self._layout.streamed(stage):
            return f"gpu/weights/slot{self._slot_of[stage.id, phase]}"
        own = self._layout.has_own_weights(stage)
        return f"gpu/weights/{stage.id}" if own else "gpu/weights/vocabulary"

    def _streamed(self, training: bool) -> list[tuple[int, int, Stage, Phase]]:
        """(after, window, stage, phase) of blocks that pass through slots; a slot must be free first."""
        layout, depth = self._layout, self._layout.plan.prefetch_depth
        order: list[tuple[Stage, Phase]] = [(stage, "forward") for stage in layout.stages]
        if training:
            order += layout.backward_order
        streamed = [(window, *use) for window, use in enumerate(order) if layout.streamed(use[0])]
        uses = assign_slots([stage.id for _, stage, _ in streamed], layout.num_slots)
        uploads = []
        for (window, stage, phase), use in zip(streamed, uses, strict=True):
            self._slot_of[stage.id, phase] = use.slot
            if use.upload:
                free = streamed[use.free_after][0] if use.free_after >= 0 else START
                uploads.append((max(free, window - depth - 1), window, stage, phase))
        return uploads

    def _own_buffers(self) -> list[tuple[int, int, Stage, Phase]]:
        """The same for stages that the host updates and that have a buffer: one upload a step, before the forward."""
        layout, depth = self._layout, self._layout.plan.prefetch_depth
        uploads: list[tuple[int, int, Stage, Phase]] = []
        for window, stage in enumerate(layout.stages):
            if not layout.streamed(stage) and layout.on_host(stage):
                # The embedding's forward, window 0, frees the slot that the head shares with it.
                free = 0 if stage is layout.head and layout.shared_vocabulary_slot else START
                uploads.append((max(free, window - depth - 1), window, stage, "forward"))
        return uploads
