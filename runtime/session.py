"""A plan made ready to run: modules, buffers, optimizer state and executor, with weights loaded or drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from transformers import PretrainedConfig

from lazysched.errors import UsageError
from lazysched.layout import Layout
from lazysched.lower import lower
from lazysched.runtime.buffers import Buffers
from lazysched.runtime.engines import cpu_threads
from lazysched.runtime.executor import Executor
from lazysched.runtime.flat import aligned, flat_views
from lazysched.runtime.hybrid8 import SMALLEST_EPSILON
from lazysched.runtime.machine import claim, hold_to_budget
from lazysched.runtime.model import Model
from lazysched.runtime.stage_updates import STEP_COEFFICIENT, AdamWFp32, AdamWSettings, Hybrid8Update, StageUpdate
from lazysched.schemas import Plan, Stage
from lazysched.schemas.executable import check_executable
from lazysched.trainable import trained_part


class Session:
    """Owns all memory of a run; close it, or use it as a context.

    Args:
        plan: the decisions.
        config: of the model.
        device: where tier ``gpu`` is.
        settings: of the optimizer.
        max_grad_norm: global norm to clip to; None gives clipping up.
        host_limit_bytes: most bytes the host arena may take.

    Raises:
        UsageError: the plan was solved for another model, or holds what cannot be executed.
        RunError: host memory does not suffice, or a graph cannot be compiled here.
        torch.OutOfMemoryError: the GPU has less left than the plan predicts.
    """

    def __init__(
        self,
        plan: Plan,
        config: PretrainedConfig,
        device: torch.device,
        *,
        settings: AdamWSettings,
        max_grad_norm: float | None,
        host_limit_bytes: int,
    ) -> None:
        check_executable(plan)
        self.plan, self.config, self.device = plan, config, device
        self.model = Model(
            config, plan.compute_dtype, device, micro_batch=plan.micro_batch, seq_len=plan.seq_len,
            attention_backend=plan.attention, full_determinism=plan.full_determinism, packing=plan.packing,
            trainable=plan.trainable,
        )  # fmt: skip
        if self.model.model_id != plan.model_id:
            raise UsageError(
                f"plan: model_id: solved for {plan.model_id}, the model is {self.model.model_id}; "
                f"profile and solve for this model"
            )
        if self.model.argument_bytes != plan.argument_bytes:
            raise UsageError(
                f"plan: argument_bytes: {plan.argument_bytes}, packed rows take {self.model.argument_bytes} here; "
                f"profile with --packing and solve again"
            )
        outside_bytes = plan.context_bytes - plan.workspace_bytes
        hold_to_budget(device, plan.budget_bytes.get("gpu"), outside_bytes)
        layout = Layout(plan, self.model.stages)
        _check_settings(plan, settings, max_grad_norm)
        _build_forms(layout, self.model)
        self.program = lower(plan, self.model.stages)
        self.buffers = Buffers(self.program, plan.compute_dtype, device, host_limit_bytes)
        with ExitStack() as undo:
            undo.callback(self.buffers.close)
            self.updates = {stage.id: self._update_of(stage, layout, settings) for stage in self.model.stages}
            self.executor = Executor(
                plan, self.program, self.model, self.buffers, self.updates, settings, max_grad_norm
            )  # fmt: skip
            undo.callback(self.executor.close)
            hold_to_budget(device, plan.budget_bytes.get("gpu"), outside_bytes)  # page-locking took some of it
            if plan.predicted is not None:
                claim(device, plan.predicted.peak_bytes.get("gpu", 0), outside_bytes)
            undo.pop_all()

    def _update_of(self, stage: Stage, layout: Layout, settings: AdamWSettings) -> StageUpdate:
        place = "host" if layout.on_host(stage) else "gpu"
        weights = self.buffers[f"{place}/weights/{stage.id}"]
        grads, state = weights[:0], weights[:0].view(torch.uint8)  # of a frozen stage
        if stage.is_trained:
            grads, state = (self.buffers[f"{place}/{kind}/{stage.id}"] for kind in ("grads", "state"))
        if layout.choice(stage).state_format == "hybrid8":
            small, threads = self.plan.fp32_state_elements, cpu_threads(self.device)
            return Hybrid8Update(stage, weights, grads, state, settings, small, threads)
        return AdamWFp32(stage, weights, grads, state.view(torch.float32), settings)

    def load(
        self, read_into: Callable[[str, torch.Tensor], None], stored: Callable[[str], torch.dtype] | None = None
    ) -> None:
        """Fill the store; ``read_into(name, target)`` copies one checkpoint tensor into ``target``.

        Targets lie in the store, but for 8-bit state beside bf16 weights: there each is a temporary of that tensor,
        unless ``stored(name)``, the tensor's dtype in the checkpoint, is bf16 too.
        """
        for update in self.updates.values():
            for name in update.weights:
                update.load(name, partial(read_into, name), torch.float32 if stored is None else stored(name))

    def initialise(self, seed: int) -> None:
        """Draw random weights as the model's own initialisation does; the same seed gives the same on one device."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            for stage in self.model.stages:
                element = self.model.dtype.itemsize
                weights = torch.zeros(stage.weight_bytes // element, dtype=self.model.dtype, device=self.device)
                for module in self._bound_modules(stage, weights):
                    self.model.initialise_module(module)
                self.load_stage(stage, weights)
                self._bound_modules(stage, weights.new_zeros(1).expand(weights.shape))  # lets go of what was drawn

    def _bound_modules(self, stage: Stage, weights: torch.Tensor) -> Iterator[nn.Module]:
        parts = self.model.ends.architecture
        if stage.is_block:
            template = self.model.templates[stage.structure]
            template.bind(weights, stage)
            roots = [template.module]
        elif stage.id == "embed":
            self.model.ends.bind_embed(weights, stage)
            roots = [parts.embedding]
        else:
            self.model.ends.bind_head(weights, stage)
            roots = [parts.norm] if parts.tied else [parts.norm, parts.head]
        return (module for root in roots for module in root.modules())

    def load_stage(self, stage: Stage, weights: torch.Tensor) -> None:
        """Take a stage's weights from its flat store on any device."""
        update = self.updates[stage.id]
        for name, view in flat_views(weights, stage, weights.element_size()).items():
            update.load(name, partial(_copy_into, view), view.dtype)

    def weight_names(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of every stored weight, in the order of the stages."""
        return [(name, shape) for stage in self.model.stages for name, shape in stage.params.items()]

    def state_names(self) -> list[tuple[str, int]]:
        """Name and bytes of every part of the optimizer state, in the order of the stages."""
        return [(name, part.nbytes) for update in self.updates.values() for name, part in update.parts.items()]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that a run goes on from, wherever it lies: weights in the computing dtype, parts of the state, flat.

        Call ``executor.drain()`` before reading them.
        """
        return {name: t for update in self.updates.values() for name, t in (update.weights | update.parts).items()}

    def weight(self, name: str) -> torch.Tensor:
        """A stored weight in the computing dtype, on the host; call ``executor.drain()`` first."""
        return self.tensors()[name].cpu()

    @property
    def num_updates(self) -> int:
        """Steps that changed something, as bias correction and random bits count them; drain the executor first."""
        return int(self.buffers["gpu/scale"][STEP_COEFFICIENT])

    def restore(self, read_into: Callable[[str, torch.Tensor], None], num_updates: int) -> None:
        """Take weights and optimizer state to the bit; ``read_into(name, target)`` copies one stored tensor."""
        for name, target in self.tensors().items():
            read_into(name, target)
        self.buffers["gpu/scale"][STEP_COEFFICIENT] = num_updates

    def gradients(self, stage: Stage) -> dict[str, torch.Tensor]:
        """The last step's gradients of what is trained of a stage, before clipping, in the computing dtype."""
        if not stage.is_trained:
            return {}
        place, element_bytes = self.plan.stages[stage.id].state, self.model.dtype.itemsize
        trained = trained_part(stage, element_bytes)
        return flat_views(self.buffers[f"{place}/grads/{stage.id}"], trained, element_bytes)

    def close(self) -> None:
        """Give everything back, whatever state a step was left in."""
        try:
            self.executor.close()
        finally:
            self.updates.clear()
            self.buffers.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copy_into(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _check_settings(plan: Plan, settings: AdamWSettings, max_grad_norm: float | None) -> None:
    """Refuse hyperparameters that the plan's formats or its order of updates cannot serve."""
    formats = {choice.state_format for choice in plan.stages.values()}
    if "hybrid8" in formats and settings.epsilon < SMALLEST_EPSILON:
        raise UsageError(
            f"adam_epsilon: {settings.epsilon} is too small for optimizer state hybrid8; give at least "
            f"{SMALLEST_EPSILON} or solve with --optimizer-state fp32"
        )
    if max_grad_norm is not None and not plan.update.waits_for_norm:
        raise UsageError(
            f"max_grad_norm: {max_grad_norm}: this plan updates before the gradient norm is known "
            f"(update.check_finite is false); solve again with --max-grad-norm"
        )


def _build_forms(layout: Layout, model: Model) -> None:
    """Build the graphs of all variants that the plan names; refuse one that is not what its name and groups say."""
    for stage in layout.stages:
        variant = layout.variants[stage.id]
        where = f"plan: stages.{stage.id}.save: variant {variant.name!r}"
        known = ({"input", "intermediates"}, {"input"}) if stage.is_block else (set[str](),)
        if set(variant.saved) not in known:
            raise UsageError(f"{where} saves {sorted(variant.saved)}, which is not executable; profile and solve again")
        if stage.is_block and variant.compiled and variant.budget is None:
            raise UsageError(f"{where} is compiled but has no budget; profile and solve again")
        if stage.is_block:
            input_bytes = aligned(math.prod(model.calls.hidden_shape) * model.dtype.itemsize)
            if variant.saved["input"] != input_bytes:
                raise UsageError(
                    f"{where} was measured with {variant.saved['input']} bytes of input, a micro-batch of this plan "
                    f"has {input_bytes}; profile and solve again"
                )
            model.form(stage, variant)
        elif variant.compiled and stage is layout.head:
            model.compile_loss(layout.plan.loss_chunk_tokens)
