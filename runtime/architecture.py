"""Any decoder-only model of transformers as stages: embedding, blocks, head.

The parts are found by structure, not by name: the input embedding, the one list of ``num_hidden_layers`` blocks, the
final norm and the output embedding. What a block is called with (rotary tables per layer type, masks, flags) is
recorded by running the model's own forward with stubs in place of its blocks, so the differences between architectures
and between versions of transformers stay in transformers.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lazysched.errors import UsageError
from lazysched.runtime.flat import flat_bytes
from lazysched.runtime.packed import PackedArguments, example_positions
from lazysched.runtime.skeleton import build_skeleton, signature
from lazysched.schemas import BYTES_PER_ELEMENT, Stage

_VOLATILE_SETTINGS = {
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "architectures",
    "use_cache",
    "auto_map",
}


class Architecture:
    """The parts of a model and its stages.

    Attributes:
        model: the causal language model; its parameters have no storage.
        base: the model inside it, without the head.
        embedding: the input embedding.
        blocks: the decoder blocks, in order.
        norm: the final norm.
        head: the output embedding; shares its weight with ``embedding`` when ``tied``.
        tied: whether input and output embedding are one matrix.
        structures: template key of each block.
        model_id: fingerprint of architecture and shapes, the same for all weights.

    Raises:
        UsageError: a part was not found, or a parameter belongs to none of them.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self.model: PreTrainedModel = build_skeleton(config)
        self.base = _part(getattr(self.model, self.model.base_model_prefix, None), "the model without its head")
        self.embedding = _part(self.model.get_input_embeddings(), "an input embedding")
        self.head = _part(self.model.get_output_embeddings(), "an output embedding")
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        self.blocks_name, self.blocks = _find_blocks(self.base, config)
        self.norm_name, self.norm = self._find_norm()
        self._refuse_leftovers()
        if self.tied and len(list(self.head.parameters())) > 1:
            raise UsageError(
                "model: a tied output embedding with a bias is not supported; set tie_word_embeddings false"
            )
        self._names = {module: name for name, module in self.model.named_modules()}
        self.structures = self._name_structures()
        # Read now: templates take the modules over and leave their parameters without a shape.
        self._block_params = [self._own_params(block) for block in self.blocks]
        self._embed_params = self._own_params(self.embedding)
        self._head_params = self._own_params(self.norm, *([] if self.tied else [self.head]))
        self.model_id = self._fingerprint()

    def _find_norm(self) -> tuple[str, nn.Module]:
        found = [
            (name, child)
            for name, child in self.base.named_children()
            if child not in (self.embedding, self.blocks) and next(child.parameters(), None) is not None
        ]
        if len(found) != 1:
            names = ", ".join(name for name, _ in found) or "none"
            raise UsageError(
                f"model: expected one final norm beside embedding and blocks, found {names}; not supported"
            )
        return found[0]

    def _name_structures(self) -> list[str]:
        """Key of the template of each block: the class, and what tells equal classes apart."""
        names: dict[tuple[Any, ...], str] = {}
        result = []
        for block in self.blocks:
            key = signature(block)
            if key not in names:
                names[key] = type(block).__name__ + (f"/{len(names)}" if names else "")
            result.append(names[key])
        return result

    def _own_params(self, *modules: nn.Module) -> dict[str, tuple[int, ...]]:
        return {
            f"{self._names[module]}.{name}": tuple(param.shape)
            for module in modules
            for name, param in module.named_parameters()
        }

    def _refuse_leftovers(self) -> None:
        known = {p for m in (self.embedding, self.blocks, self.norm, self.head) for p in m.parameters()}
        for name, param in self.model.named_parameters():
            if param not in known:
                raise UsageError(f"model: parameter {name!r} is in no embedding, block, norm or head; not supported")

    def stages(self, compute_dtype: str) -> list[Stage]:
        """``embed``, ``block.0`` ..., ``head`` with their parameters in the order of the flat store."""
        element = BYTES_PER_ELEMENT[compute_dtype]

        def stage(
            stage_id: str, structure: str, params: dict[str, tuple[int, ...]], shares: str | None = None
        ) -> Stage:
            size = flat_bytes(params, element)
            return Stage(id=stage_id, structure=structure, params=params, weight_bytes=size, shares=shares)

        blocks = zip(self.structures, self._block_params, strict=True)
        return [
            stage("embed", "embed", self._embed_params),
            *(stage(f"block.{i}", structure, params) for i, (structure, params) in enumerate(blocks)),
            stage("head", "head", self._head_params, "embed" if self.tied else None),
        ]

    def module_of(self, stage: Stage) -> nn.Module:
        """The module of a block stage."""
        return self.blocks[int(stage.id.removeprefix("block."))]

    def _fingerprint(self) -> str:
        """Name of architecture and shapes; equal for all weights of one architecture."""
        settings = {k: v for k, v in self.config.to_diff_dict().items() if k not in _VOLATILE_SETTINGS}
        shapes = {name: list(param.shape) for name, param in self.model.named_parameters()}
        text = json.dumps([settings, shapes, self.structures, self.tied], sort_keys=True, default=_plain)
        owned = [self._embed_params, *self._block_params, self._head_params]  # tied parameters once
        size = sum(math.prod(shape) for params in owned for shape in params.values())
        label = f"{size / 1e9:.2f}B" if size >= 5e8 else f"{size / 1e6:.3g}M"
        return f"{type(self.model).__name__}-{label}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _plain(setting: Any) -> Any:
    """A setting as JSON has it; never an address in memory, which every process would hash to another fingerprint."""
    return setting.to_dict() if hasattr(setting, "to_dict") else type(setting).__qualname__


def _part(module: Any, what: str) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise UsageError(f"model: {what} was not found; use a decoder-only causal language model")
    return module


def _find_blocks(base: nn.Module, config: PretrainedConfig) -> tuple[str, nn.ModuleList]:
    count = getattr(config, "num_hidden_layers", None)
    lists = [(n, c) for n, c in base.named_children() if isinstance(c, nn.ModuleList) and len(c) == count]
    if len(lists) != 1:
        raise UsageError(f"model: expected one list of {count} blocks, found {len(lists)}; not supported")
    return lists[0]


class Calls:
    """What the model's own forward passes to each block, and the block-0 input it makes of token ids.

    Args:
        architecture: embedding bound to real weights, buffers on ``device``.
        seq_len: tokens of a row; the recorded arguments hold for this length and ``micro_batch`` rows.
        packing: whether a row may hold several samples.

    Attributes:
        arguments: keyword arguments of each block for rows of one sample.
        constants: storage addresses of the tensors among them.
        hidden_shape: of a block's input, [rows, tokens, hidden].
        packed: how arguments follow from positions; None without packing.

    Raises:
        UsageError: the model cannot be packed.
    """

    def __init__(
        self, architecture: Architecture, micro_batch: int, seq_len: int, device: torch.device, *, packing: bool = False
    ) -> None:
        self.architecture = architecture
        ids = torch.zeros(micro_batch, seq_len, dtype=torch.int64, device=device)
        embedded: list[torch.Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            embedded.append(output)

        handle = architecture.embedding.register_forward_hook(keep)
        first, self.arguments = self._run(ids)
        handle.remove()
        self.hidden_shape = first.shape
        self._embedding_alone = len(embedded) == 1 and first is embedded[0]
        self.constants = {t.untyped_storage().data_ptr() for a in self.arguments for t in _tensors(a)}
        self.packed = self._packed(ids) if packing else None

    def _packed(self, ids: torch.Tensor) -> PackedArguments:
        rows, seq_len = ids.shape
        positions = example_positions(rows, seq_len, ids.device)
        _, arguments = self._run(ids, position_ids=positions)
        return PackedArguments(self.arguments, arguments, positions)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input of block 0, [rows, tokens, hidden], of token ids [rows, tokens] int64."""
        # Running only the embedding, where that is all there is, avoids building masks anew (and a device sync).
        return self.architecture.embedding(ids) if self._embedding_alone else self._run(ids)[0]

    def _run(self, ids: torch.Tensor, **more: torch.Tensor) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """Input of block 0, and what each block is called with."""
        parts = self.architecture
        recorded: list[dict[str, Any]] = []
        inputs: list[torch.Tensor] = []
        stubs = nn.ModuleList(_Recorder(block, inputs, recorded) for block in parts.blocks)
        setattr(parts.base, parts.blocks_name, stubs)
        setattr(parts.base, parts.norm_name, nn.Identity())
        try:
            parts.base(input_ids=ids, use_cache=False, **more)
        finally:
            setattr(parts.base, parts.blocks_name, parts.blocks)
            setattr(parts.base, parts.norm_name, parts.norm)
        return inputs[0], recorded


class _Recorder(nn.Module):
    """Stands in for a block: keeps what it is called with and returns its input."""

    def __init__(self, block: nn.Module, inputs: list[torch.Tensor], recorded: list[dict[str, Any]]) -> None:
        super().__init__()
        self._block = [block]  # in a list, so that it does not become a submodule
        self._inputs, self._recorded = inputs, recorded

    def __getattr__(self, name: str) -> Any:
        """Settings that a model reads off its blocks, such as ``attention_type``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"][0], name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            raise UsageError("model: its blocks take positional arguments besides the hidden states; not supported")
        self._inputs.append(hidden_states)
        self._recorded.append(kwargs)
        return hidden_states


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return []
