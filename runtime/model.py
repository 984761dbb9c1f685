"""The modules that compute: templates, ends and recorded calls of one model at one micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig

from lazysched.errors import RunError
from lazysched.runtime.architecture import Architecture, Calls
from lazysched.runtime.attention import attention
from lazysched.runtime.blocks import BlockForm, BlockTemplate, EagerForm
from lazysched.runtime.compiled import CompiledForm
from lazysched.runtime.ends import Ends
from lazysched.runtime.packed import example_positions
from lazysched.runtime.skeleton import move_buffers
from lazysched.schemas import BYTES_PER_ELEMENT, AttentionBackend, Dtype, SaveVariant, Stage
from lazysched.trainable import first_trained, select_trained

if TYPE_CHECKING:  # it imports Inductor, which takes seconds and is not needed where nothing is compiled
    from lazysched.runtime.graphs import JointGraph, SplitGraph


class Model:
    """Everything of a model except its weights, on ``device``.

    Args:
        config: of the model.
        compute_dtype: of weights and activations.
        device: where it computes.
        micro_batch: rows that go through at once.
        seq_len: tokens of a row.
        attention_backend: kernel of torch's attention.
        full_determinism: whether the backward of attention is to add in one order on a GPU, as a CPU's does anyway.
        packing: whether rows hold several samples.
        trainable: patterns of the parameters that are trained; none: all.

    Attributes:
        stages: ``embed``, blocks, ``head``; they say what is trained.
        templates: structure -> block template.
        ends: embedding and head.
        calls: what each block is called with at this micro-batch and length.
    """

    def __init__(
        self, config: PretrainedConfig, compute_dtype: Dtype, device: torch.device, *, micro_batch: int, seq_len: int,
        attention_backend: AttentionBackend = "default", full_determinism: bool = False, packing: bool = False,
        trainable: Sequence[str] = (),
    ) -> None:  # fmt: skip
        architecture = Architecture(config)
        self.dtype: torch.dtype = getattr(torch, compute_dtype)
        self.device = device
        self.model_id = architecture.model_id
        self.stages = select_trained(architecture.stages(compute_dtype), trainable)
        move_buffers(architecture.base, device)
        self.ends = Ends(architecture, device, self.stages)
        self.calls = self._record(architecture, micro_batch, seq_len, packing)
        element_bytes = BYTES_PER_ELEMENT[compute_dtype]
        first = {stage.structure: stage for stage in reversed(self.stages) if stage.is_block}
        self.templates = {
            structure: BlockTemplate(architecture.module_of(stage), stage, element_bytes, self.calls.constants, device)
            for structure, stage in first.items()
        }
        self.initialise_module = architecture.model._init_weights
        self.full_determinism = full_determinism and device.type == "cuda"
        self.use_attention(attention_backend)
        self._joints: dict[str, JointGraph] = {}
        self._forms: dict[tuple[str, float | None, bool, bool], BlockForm] = {}
        self._argument_buffers: list[torch.Tensor] = []
        self._arguments = [self.calls.arguments]
        if packing:
            self._pack_example(micro_batch, seq_len)

    def has_backward(self, stage: Stage) -> bool:
        """Whether the stage's backward runs: something is trained in it or before it."""
        return self.stages.index(stage) >= first_trained(self.stages)

    def use_attention(self, backend: AttentionBackend) -> None:
        """Run and trace blocks with this kernel of torch's attention; forms built before keep theirs."""
        self._attention: AttentionBackend = backend
        for template in self.templates.values():
            template.attention, template.full_determinism = backend, self.full_determinism

    def _record(self, architecture: Architecture, micro_batch: int, seq_len: int, packing: bool) -> Calls:
        # Only row 0 is looked up, so one row that repeats stands for the whole matrix.
        for param, shape in zip(self.ends.embed_params, self.stages[0].params.values(), strict=True):
            param.data = torch.zeros(1, shape[-1], dtype=self.dtype, device=self.device).expand(shape)
        return Calls(architecture, micro_batch, seq_len, self.device, packing=packing)

    def _pack_example(self, micro_batch: int, seq_len: int) -> None:
        """Arguments of some packed rows in a buffer of its own, to trace and to measure with."""
        self.use_argument_buffers([torch.zeros(self.argument_bytes, dtype=torch.uint8, device=self.device)])
        self.pack(0, example_positions(micro_batch, seq_len, self.device))

    @property
    def argument_bytes(self) -> int:
        """What the arguments of one packed micro-batch take, 0 where rows hold one sample each."""
        return self.calls.packed.num_bytes if self.calls.packed else 0

    def use_argument_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Where arguments of packed rows lie from now on: for each micro-batch [argument_bytes] uint8."""
        assert self.calls.packed is not None
        before, after = (
            {buffer.untyped_storage().data_ptr() for buffer in each} for each in (self._argument_buffers, buffers)
        )
        for template in self.templates.values():
            template.constants = (template.constants - before) | after  # what is freed may be anybody's next
        self._argument_buffers = list(buffers)
        self._arguments = [self.calls.packed.views(buffer) for buffer in buffers]

    def pack(self, micro_batch: int, positions: torch.Tensor) -> None:
        """Make the arguments of a micro-batch for ``positions`` [rows, tokens] int64, 0 where a sample begins."""
        assert self.calls.packed is not None
        self.calls.packed.fill(self._argument_buffers[micro_batch], positions)

    def arguments(self, stage: Stage, micro_batch: int = 0) -> dict[str, Any]:
        """What the model passes to the block ``stage`` beside the hidden states; the same to all unless packed."""
        of_blocks = self._arguments[micro_batch if self.calls.packed else 0]
        return of_blocks[int(stage.id.removeprefix("block."))]

    def form(self, stage: Stage, variant: SaveVariant) -> BlockForm:
        """The block ``stage`` in the form of ``variant``, built at its first use.

        Raises:
            RunError: its graph cannot be compiled here.
        """
        budget, keep = variant.budget if variant.compiled else None, set(variant.saved) != {"input"}
        # Nothing before the first trained stage wants a gradient.
        return self.block_form(stage, budget, keep, input_grad=self.stages.index(stage) != first_trained(self.stages))

    def block_form(self, stage: Stage, budget: float | None, keep: bool, *, input_grad: bool = True) -> BlockForm:
        """The same by what makes a form.

        Args:
            stage: a block.
            budget: of its compiled graph, or None.
            keep: whether it keeps anything beside its input.
            input_grad: whether its backward makes the gradient of its input.
        """
        key = (stage.structure, budget, keep, input_grad)
        if key not in self._forms:
            template = self.templates[stage.structure]
            if budget is None:
                self._forms[key] = EagerForm(template, keep, input_grad=input_grad)
            else:
                self._forms[key] = CompiledForm(template, self._compiled(stage, budget, input_grad))
        return self._forms[key]

    def joint_graph(self, stage: Stage) -> JointGraph:
        """Forward and backward of the block ``stage``, traced at the first call for its structure.

        Raises:
            RunError: it cannot be traced.
        """
        from lazysched.runtime.graphs import JointGraph

        if stage.structure not in self._joints:
            shapes, module = list(stage.params.values()), self.templates[stage.structure].module
            with _explained(stage), attention(self._attention, full_determinism=self.full_determinism):
                self._joints[stage.structure] = JointGraph(
                    module, shapes, self.calls.hidden_shape, self.arguments(stage), self.dtype, self.device
                )
        return self._joints[stage.structure]

    def kept(self, stage: Stage, budget: float) -> list[torch.Tensor]:
        """What a block keeps beside its input when its graph is split at ``budget``: fake tensors.

        Raises:
            RunError: it cannot be traced or split.
        """
        joint = self.joint_graph(stage)
        with _explained(stage):
            return joint.kept(budget)

    def returned(self, stage: Stage, budget: float) -> list[torch.Tensor]:
        """Weight gradients that a block's backward allocates when its graph is split at ``budget``: fake tensors.

        Raises:
            RunError: it cannot be traced or split.
        """
        joint = self.joint_graph(stage)
        with _explained(stage):
            return joint.returned(budget)

    def compile_loss(self, chunk_tokens: int) -> None:
        """Compile the loss and its gradient for chunks of ``chunk_tokens``.

        Raises:
            RunError: it cannot be compiled here.
        """
        num_tokens = math.prod(self.calls.hidden_shape[:-1])
        sizes = {min(chunk_tokens, num_tokens), num_tokens % chunk_tokens} - {0}
        embed, head = self.stages[0], self.stages[-1]
        own = list(head.params.values())[len(self.ends.norm_params) :]
        with _explained(head):
            self.ends.compile_loss(sizes, own or list(embed.params.values()), self.dtype)

    def _compiled(self, stage: Stage, budget: float, input_grad: bool) -> SplitGraph:
        joint = self.joint_graph(stage)
        with _explained(stage):
            return joint.compile(budget, input_grad=input_grad)


@contextmanager
def _explained(stage: Stage) -> Iterator[None]:
    """One line for whatever goes wrong inside the compiler."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise RunError(
            f"{stage.id}: it cannot be compiled ({type(error).__name__}: {reason}); profile with --no-compile "
            f"and solve again"
        ) from error
