"""What a block's forward keeps for its backward, and where it comes back from.

Autograd, or a compiled forward, hands every tensor that it wants to keep to ``pack``; ``unpack`` gives it back.
Weights are kept as a place in the flat buffer, since another slot may hold them by then; the block's input is kept
apart; whatever is the same for all calls (rotary tables, masks) is kept as it is; everything else is recorded by
storage, so that a storage that several tensors share is kept, moved and counted once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from lazysched.runtime.flat import aligned

Strided = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True)
class _Handle:
    """A tensor described by the storage it lies in: ``weights``, ``input`` or a number."""

    storage: int | str
    strided: Strided

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int | str) -> _Handle:
        return cls(storage, (tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())))


@dataclass
class Kept:
    """Tensors kept by one forward of one block.

    Attributes:
        input: the block's input [rows, tokens, hidden]; None once it has left.
        storages: what is kept beside it, one uint8 tensor per storage; emptied once it has left.
        sizes: bytes of each storage.
    """

    input: torch.Tensor | None
    storages: list[torch.Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def intermediate_bytes(self) -> int:
        """Bytes of all storages as they lie in a host buffer, alignment included."""
        return sum(aligned(size) for size in self.sizes)


@dataclass
class Saved:
    """What a forward leaves for its backward.

    Attributes:
        kept: its tensors.
        input_shape: of the block's input, which stays when the input has left.
        graph: of a forward that need not run again; None when the whole block is recomputed by autograd.
    """

    kept: Kept
    input_shape: tuple[int, ...]
    graph: Graph | CompiledGraph | None = None

    def drop_input(self) -> None:
        """Let the input go; the graph keeps only its shape."""
        self.kept.input = None
        if isinstance(self.graph, Graph):
            leaf = self.graph.leaf
            leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)


@dataclass
class Graph:
    """Autograd's graph of one forward.

    Attributes:
        output: the output's place in it.
        leaf: its own input, whose gradient is asked for.
        packing: its hooks. They must not lead back here: autograd holds them, and Python's garbage collector does not
            see through autograd.
    """

    output: Any
    leaf: torch.Tensor
    packing: Packing


@dataclass
class CompiledGraph:
    """What a compiled forward left.

    Attributes:
        packed: what its backward takes, in that order.
        packing: gives the tensors back.
    """

    packed: list[torch.Tensor | _Handle]
    packing: Packing


class Packing:
    """Packs and unpacks what one forward keeps; autograd's saved-tensor hooks."""

    def __init__(
        self, kept: Kept, weights: torch.Tensor, block_input: torch.Tensor, constants: Collection[int]
    ) -> None:
        assert block_input.is_contiguous()
        assert block_input.storage_offset() == 0
        self._kept = kept
        self._weights = weights
        self._weights_ptr = weights.untyped_storage().data_ptr()
        self._input_ptr = block_input.untyped_storage().data_ptr()
        self._constants = constants
        self._index: dict[int, int] = {}

    def bind(self, weights: torch.Tensor) -> None:
        """Say which flat buffer holds the block's weights now."""
        self._weights = weights

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Handle:
        """Describe ``tensor``; keep its storage if nobody else does."""
        pointer = tensor.untyped_storage().data_ptr()
        # Attention keeps the state of a random generator, on the host where nothing is dropped.
        if pointer in self._constants or tensor.numel() == 0 or tensor.device != self._weights.device:
            return tensor
        if pointer == self._weights_ptr:
            return _Handle.of(tensor, "weights")
        if pointer == self._input_ptr:
            return _Handle.of(tensor, "input")
        if pointer not in self._index:
            self._index[pointer] = len(self._kept.storages)
            self._kept.storages.append(storage_bytes(tensor))
            self._kept.sizes.append(tensor.untyped_storage().nbytes())
        return _Handle.of(tensor, self._index[pointer])

    def unpack(self, packed: torch.Tensor | _Handle) -> torch.Tensor:
        """The tensor again, from wherever its storage lies now."""
        if isinstance(packed, torch.Tensor):
            return packed
        if packed.storage == "weights":
            return view_bytes(self._weights, packed.strided)
        if packed.storage == "input":
            assert self._kept.input is not None
            return view_bytes(self._kept.input, packed.strided)
        assert isinstance(packed.storage, int)
        return view_bytes(self._kept.storages[packed.storage], packed.strided)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind ``tensor`` as one uint8 tensor, nothing copied."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def view_bytes(buffer: torch.Tensor, strided: Strided) -> torch.Tensor:
    """A strided view of the bytes that start where ``buffer`` starts."""
    dtype, shape, stride, offset = strided
    flat = buffer.reshape(-1).view(dtype) if buffer.dtype != dtype else buffer
    return torch.as_strided(flat, shape, stride, flat.storage_offset() + offset)
