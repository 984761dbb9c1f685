"""The executor: walks a program and hands its operations to the engines. It decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from lazysched.errors import UsageError
from lazysched.layout import TOTAL_ELEMENTS, Layout
from lazysched.lower import lower
from lazysched.runtime.batch import Batch
from lazysched.runtime.buffers import Buffers
from lazysched.runtime.engines import CudaEngines, Done, Engines, InlineEngines, Mark, cpu_threads, wait_for
from lazysched.runtime.model import Model
from lazysched.runtime.operations import Operations, StepContext, norm_ranges
from lazysched.runtime.recorder import Timed, Work
from lazysched.runtime.stage_updates import AdamWSettings, StageUpdate
from lazysched.schemas import Plan, Program


@dataclass
class StepResult:
    """Numbers of a step that may still be running; reading them waits for its backward, not for its updates."""

    _totals: torch.Tensor
    _done: Done
    end: Mark
    """When ``compute`` is done with the step."""
    _norm_ranges: Mapping[str, tuple[int, int]]

    def _wait(self) -> None:
        wait_for(self._done)

    def _value(self, index: int) -> float:
        self._wait()
        return float(self._totals[index])

    @property
    def is_running(self) -> bool:
        """Whether reading a number may have to wait."""
        return self._done is not None

    @property
    def loss(self) -> float:
        """Mean loss over the step's trained tokens."""
        return self._value(0)

    @property
    def grad_norm(self) -> float:
        """Global gradient norm before clipping."""
        return self._value(1)

    @property
    def skipped(self) -> bool:
        """Whether the gradient was not finite and nothing changed."""
        return bool(self._value(2))

    def stages_not_finite(self) -> list[str]:
        """Stages whose gradient is not finite, in the order of the backward.

        Where each norm is finite and only their sum overflows, the stage with the largest.
        """
        self._wait()
        norms = self._totals[TOTAL_ELEMENTS:].double()
        squares = {stage: norms[slice(*where)].square().sum() for stage, where in self._norm_ranges.items()}
        found = [stage for stage, square in squares.items() if not square.isfinite()]
        return found[::-1] or [max(squares, key=lambda stage: float(squares[stage]))]


class Executor:
    """Runs training steps and evaluations of one plan.

    Args:
        plan: the decisions.
        program: the plan lowered for training.
        model: modules for the plan's micro-batch and length.
        buffers: of the program, weights loaded.
        updates: stage id -> its update.
        settings: of the optimizer.
        max_grad_norm: global norm to clip to; None gives clipping up.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        model: Model,
        buffers: Buffers,
        updates: Mapping[str, StageUpdate],
        settings: AdamWSettings,
        max_grad_norm: float | None,
    ) -> None:
        self._training = program
        self._evaluation = lower(plan, model.stages, training=False)
        self._on_gpu, self._packing = model.device.type == "cuda", plan.packing
        self._norm_ranges = norm_ranges(model.stages)
        self._num_tensors = sum(len(stage.trained_params) for stage in model.stages)
        self._operations = Operations(Layout(plan, model.stages), model, buffers, updates, settings, max_grad_norm)
        pageable = plan.host_memory == "pageable"
        self._pinned = self._on_gpu and not pageable
        self._engines: Engines = (
            CudaEngines(cpu_threads(model.device), blocking_copies=pageable) if self._on_gpu else InlineEngines()
        )
        self._signals = {id(p): _signalling(p) for p in (self._training, self._evaluation)}
        self._done: dict[str, Done] = {}
        self._last: Program = program

    def step(self, batch: Batch, learning_rate: float, timed: Timed | None = None) -> StepResult:
        """Launch one training step; its updates may run into the next step's forward.

        ``timed`` wraps the work of each operation, to see when it runs.
        """
        return self._run(self._training, batch, learning_rate, timed)

    def evaluate(self, batch: Batch) -> StepResult:
        """Launch the forward and the loss of one batch, nothing changes."""
        return self._run(self._evaluation, batch, 0.0)

    def mark(self) -> Mark:
        """The moment at which ``compute`` is done with everything launched so far."""
        return self._engines.mark()

    def drain(self) -> None:
        """Wait until everything launched has finished; raise what went wrong in a worker."""
        self._engines.drain()

    def close(self) -> None:
        """Finish and give threads and tensors back."""
        try:
            self._engines.close()
        finally:
            self._operations.forget()

    def _run(self, program: Program, batch: Batch, learning_rate: float, timed: Timed | None = None) -> StepResult:
        if (batch.positions is not None) != self._packing:
            raise UsageError(
                f"batch: positions: {'missing, the plan packs' if self._packing else 'given, the plan does not pack'}; "
                f"make batches as the plan says"
            )
        if program is not self._last:
            self.drain()
            self._done.clear()
            self._last = program
        context = StepContext.of(
            batch, learning_rate, self._num_tensors, training=program is self._training, pinned=self._pinned
        )
        signals = self._signals[id(program)]
        for op in program.ops.values():
            # A predecessor in the step before stands later in the order, so its entry is still that step's.
            after = [self._done.get(before) for before, _ in program.predecessors[op.id]]
            work: Work = partial(self._operations.run, op, context)
            if timed is not None:
                work = timed(op, work)
            self._done[op.id] = self._engines.submit(op.engine, work, after, op.id in signals)
        return StepResult(context.totals, self._done["totals/copy"], self._engines.mark(), self._norm_ranges)


def _signalling(program: Program) -> set[str]:
    """Operations that another engine, or the reader of the step's numbers, waits for."""
    ops = program.ops
    crossing = {before for before, after, _ in program.edges if ops[before].engine != ops[after].engine}
    return crossing | {"totals/copy"}
