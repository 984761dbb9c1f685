"""The modules that compute: templates, ends and recorded calls of one model at one micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from lazysched.runtime.architecture import Architecture, Calls
from lazysched.runtime.blocks import BlockTemplate
from lazysched.runtime.ends import Ends
from lazysched.runtime.skeleton import move_buffers
from lazysched.schemas import BYTES_PER_ELEMENT, Dtype, Stage


class Model:
    """Everything of a model except its weights, on ``device``.

    Attributes:
        stages: ``embed``, blocks, ``head``.
        templates: structure -> block template.
        ends: embedding and head.
        calls: what each block is called with at this micro-batch and length.
    """

    def __init__(
        self, config: PretrainedConfig, compute_dtype: Dtype, device: torch.device, *, micro_batch: int, seq_len: int
    ) -> None:
        architecture = Architecture(config)
        self.dtype: torch.dtype = getattr(torch, compute_dtype)
        self.device = device
        self.model_id = architecture.model_id
        self.stages = architecture.stages(compute_dtype)
        move_buffers(architecture.base, device)
        self.ends = Ends(architecture, device)
        self.calls = self._record(architecture, micro_batch, seq_len)
        element_bytes = BYTES_PER_ELEMENT[compute_dtype]
        first = {stage.structure: architecture.module_of(stage) for stage in reversed(self.stages) if stage.is_block}
        self.templates = {
            structure: BlockTemplate(module, element_bytes, self.calls.constants, device)
            for structure, module in first.items()
        }
        self.initialise_module = architecture.model._init_weights

    def _record(self, architecture: Architecture, micro_batch: int, seq_len: int) -> Calls:
        # Only row 0 is looked up, so one row that repeats stands for the whole matrix.
        for param, shape in zip(self.ends.embed_params, self.stages[0].params.values(), strict=True):
            param.data = torch.zeros(1, shape[-1], dtype=self.dtype, device=self.device).expand(shape)
        return Calls(architecture, micro_batch, seq_len, self.device)

    def arguments(self, stage: Stage) -> dict[str, Any]:
        """What the model passes to the block ``stage`` beside the hidden states."""
        return self.calls.arguments[int(stage.id.removeprefix("block."))]
