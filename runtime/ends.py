"""The first and the last stage: the embedding, and the head with the loss in chunks of tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from lazysched.runtime.architecture import Architecture, Calls
from lazysched.runtime.flat import flat_views
from lazysched.runtime.skeleton import freeze, replace_with_placeholders
from lazysched.schemas import Stage

if TYPE_CHECKING:
    from lazysched.runtime.compiled_loss import CompiledLoss

IGNORED_LABEL = -100
UNCOMPILED_SHARE = 4
"""Uncompiled, a loss takes about 12 bytes per logit; compiled with its gradient, 4."""


class Ends:
    """Embedding, final norm and head of a model, bound to weights whenever they run.

    ``logits`` runs the model's own forward behind a stub of its body, so scaling and soft-capping are the model's.

    Args:
        architecture: of the model; its parts are taken over.
        device: where they compute.
        stages: ``embed``, blocks, ``head``, which say what is trained.

    Attributes:
        embed_params: the embedding's parameters.
        head_params: final norm, then the output embedding where it is not tied.
        shared_params: the output embedding's parameters where it is tied.
    """

    def __init__(self, architecture: Architecture, device: torch.device, stages: Sequence[Stage]) -> None:
        self.architecture = architecture
        self.embed_params = replace_with_placeholders(architecture.embedding, device)
        self.norm_params = replace_with_placeholders(architecture.norm, device)
        output_params = replace_with_placeholders(architecture.head, device)
        self.head_params = self.norm_params + ([] if architecture.tied else output_params)
        self.shared_params = output_params if architecture.tied else []
        freeze(self.embed_params, stages[0])
        freeze(self.head_params, stages[-1])
        if architecture.tied:
            freeze(output_params, stages[0])
        self._output_params = output_params
        self._compiled: dict[int, CompiledLoss] = {}
        setattr(architecture.model, architecture.model.base_model_prefix, _Body())

    @property
    def num_trained_norm(self) -> int:
        """How many of the final norm's parameters are trained."""
        return len(_trained(self.norm_params))

    def bind_embed(self, weights: torch.Tensor, stage: Stage) -> None:
        """Use ``weights``, the flat store of ``embed``."""
        _bind(self.embed_params, weights, stage)

    def bind_head(self, weights: torch.Tensor, stage: Stage) -> None:
        """Use ``weights``, the flat store of ``head``."""
        _bind(self.head_params, weights, stage)

    def bind_shared(self, weights: torch.Tensor, embed: Stage) -> None:
        """Use the embedding's ``weights`` for the tied output embedding."""
        _bind(self.shared_params, weights, embed)

    def embed(self, calls: Calls, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Input of block 0 [rows, tokens, hidden] and its place in the autograd graph, which keeps only ``ids``.

        A frozen embedding has no such place.
        """
        with torch.enable_grad():
            hidden = calls.embed(ids)
        edge = torch.autograd.graph.get_gradient_edge(hidden) if hidden.requires_grad else None
        return hidden.detach(), edge

    def embed_backward(self, edge: Any, output_grad: torch.Tensor) -> list[torch.Tensor]:
        """Dense gradients of the embedding's trained parameters."""
        return list(torch.autograd.grad([edge], _trained(self.embed_params), [output_grad]))

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, vocabulary] of normed hidden states [tokens, hidden]."""
        return self.architecture.model(inputs_embeds=normed[None], use_cache=False).logits[0]  # type: ignore[no-any-return]

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor, scale: float, chunk_tokens: int) -> torch.Tensor:
        """Sum of the token losses times ``scale``, an fp32 scalar; nothing is kept for a gradient."""
        total = torch.zeros((), device=hidden.device)
        if self._compiled:  # this loss runs uncompiled, and must not need more memory than a step does
            chunk_tokens = max(1, chunk_tokens // UNCOMPILED_SHARE)
        with torch.no_grad():
            normed = self.architecture.norm(hidden).flatten(0, -2)
            for part, part_targets in zip(
                normed.split(chunk_tokens), targets.flatten().split(chunk_tokens), strict=True
            ):
                total += self._chunk_loss(part, part_targets, scale)
        return total

    def loss_and_gradient(
        self, hidden: torch.Tensor, targets: torch.Tensor, scale: float, chunk_tokens: int, sums: Gradients
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and in the same pass the gradient of ``hidden``; weight gradients are added to ``sums``.

        Args:
            hidden: output of the last block, [rows, tokens, hidden].
            targets: next tokens, [rows, tokens] int64, ``IGNORED_LABEL`` where nothing is learned.
            scale: 1 / trained tokens of the whole step.
            chunk_tokens: tokens whose logits exist at once.
            sums: receives the gradients of what is trained of ``head_params`` and ``shared_params``.
        """
        leaf = hidden.detach().requires_grad_()
        with torch.enable_grad():
            normed = self.architecture.norm(leaf)
        flat = normed.detach().flatten(0, -2)
        flat_grad, total = torch.empty_like(flat), torch.zeros((), device=hidden.device)
        grads = flat_grad.split(chunk_tokens)
        chunks = zip(flat.split(chunk_tokens), targets.flatten().split(chunk_tokens), grads, strict=True)
        for part, part_targets, part_grad in chunks:
            loss, found = self._chunk_gradient(part, part_targets, scale, sums)
            part_grad.copy_(found)
            total += loss
        wanted = [leaf, *_trained(self.norm_params)]
        hidden_grad, *norm_grads = torch.autograd.grad([normed], wanted, [flat_grad.view_as(normed)])
        sums.add_norm(norm_grads)
        return total, hidden_grad

    def compile_loss(self, sizes: Collection[int], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        """From now on, run chunks of these numbers of tokens through one compiled graph of loss and gradient each.

        Args:
            sizes: numbers of tokens.
            shapes: of the output embedding's parameters, the first of them [vocabulary, hidden].
            dtype: of hidden states and parameters.
        """
        from lazysched.runtime.compiled_loss import CompiledLoss

        model, device = self.architecture.model, self._output_params[0].device
        names = {id(param): name for name, param in model.named_parameters()}
        output_names = [names[id(param)] for param in self._output_params]
        trained = [param.requires_grad for param in self._output_params]
        for size in sizes:
            chunk = (size, shapes[0][-1])
            self._compiled[size] = CompiledLoss(model, output_names, shapes, trained, chunk, dtype, device)

    def _chunk_gradient(
        self, normed: torch.Tensor, targets: torch.Tensor, scale: float, sums: Gradients
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of one chunk and its gradient with respect to ``normed``; the output's is added to ``sums``."""
        if len(normed) in self._compiled:
            output_sums, first = sums.next_output()
            compiled = self._compiled[len(normed)]
            return compiled.run(normed, self._output_params, targets, scale, output_sums, first=first)
        normed.requires_grad_()
        with torch.enable_grad():
            loss = self._chunk_loss(normed, targets, scale)
        grad, *output_grads = torch.autograd.grad([loss], [normed, *_trained(self._output_params)])
        sums.add_output(output_grads)
        return loss.detach(), grad

    def _chunk_loss(self, normed: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
        logits = self.logits(normed).float()
        return F.cross_entropy(logits, targets, ignore_index=IGNORED_LABEL, reduction="sum") * scale


class Gradients:
    """Running sums of the head's weight gradients over chunks and micro-batches.

    Args:
        norm: targets for the final norm's trained parameters.
        output: targets for the output embedding's trained parameters.
        fresh: whether the targets hold nothing yet.
    """

    def __init__(self, norm: Sequence[torch.Tensor], output: Sequence[torch.Tensor], fresh: bool) -> None:
        self._norm, self._output = list(norm), list(output)
        self._fresh_norm = self._fresh_output = fresh

    def add_norm(self, grads: Sequence[torch.Tensor]) -> None:
        """Add the gradients of one micro-batch."""
        _accumulate(self._norm, grads, self._fresh_norm)
        self._fresh_norm = False

    def add_output(self, grads: Sequence[torch.Tensor]) -> None:
        """Add the gradients of one chunk."""
        targets, first = self.next_output()
        _accumulate(targets, grads, first)

    def next_output(self) -> tuple[list[torch.Tensor], bool]:
        """Where the gradients of one more chunk go, and whether there is nothing yet."""
        first, self._fresh_output = self._fresh_output, False
        return self._output, first


def _trained(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if param.requires_grad]


def _bind(params: Sequence[nn.Parameter], weights: torch.Tensor, stage: Stage) -> None:
    views = flat_views(weights, stage, weights.element_size()).values()
    for param, view in zip(params, views, strict=True):
        param.data = view


def _accumulate(targets: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], first: bool) -> None:
    for target, grad in zip(targets, grads, strict=True):
        target.copy_(grad) if first else target.add_(grad)


class _Body(nn.Module):
    """Stands in for the model's body: hands its input on as if it were the last hidden state."""

    def forward(self, *_ids: Any, inputs_embeds: torch.Tensor, **_: Any) -> Any:
        return _Output(inputs_embeds)


class _Output(SimpleNamespace):
    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__(last_hidden_state=hidden)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.last_hidden_state  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> None:
        """Caches, attentions and the like: there are none."""
