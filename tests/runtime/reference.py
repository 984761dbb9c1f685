"""What the executor is held against: plain PyTorch with everything resident."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from lazysched.runtime.batch import Batch
from lazysched.runtime.hybrid8 import BlockState, Fp32State, coefficients, num_blocks, stream_of
from lazysched.runtime.hybrid8_backends import prepare


class ReferenceLoop:
    """Trains ``model`` in place with the micro-batching, loss chunks and sums of a plan.

    Parameters that require no gradient are frozen.
    Gradients of the output embedding are summed over chunks and micro-batches by themselves; a tied embedding adds
    that sum to its own at the end.
    """

    def __init__(
        self, model: PreTrainedModel, *, micro_batch: int, chunk_tokens: int, max_grad_norm: float | None,
        weight_decay: float,
    ) -> None:  # fmt: skip
        self.model, self.micro_batch, self.chunk_tokens = model.eval(), micro_batch, chunk_tokens
        self.max_grad_norm = max_grad_norm
        self.params = list(model.parameters())
        decayed = [p for n, p in model.named_parameters() if p.ndim >= 2 and not n.endswith("bias")]
        other = [p for n, p in model.named_parameters() if p.ndim < 2 or n.endswith("bias")]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": other, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.999), eps=1e-8, fused=True)

    def gradients(self, batch: Batch) -> float:
        """Leave the step's gradients in ``.grad`` and return the loss."""
        scale, loss = 1.0 / max(batch.num_trained_tokens, 1), torch.zeros(())
        head = self.model.get_output_embeddings()
        wants_head = head.weight.requires_grad
        head_sum: torch.Tensor | None = None
        self.optimizer.zero_grad(set_to_none=True)
        rows = zip(batch.input_ids.split(self.micro_batch), batch.targets.split(self.micro_batch), strict=True)
        for index, (ids, targets) in enumerate(rows):
            first = index * self.micro_batch
            positions = None if batch.positions is None else batch.positions[first : first + self.micro_batch]
            hidden = self.model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            flat = hidden.detach().flatten(0, -2)
            parts, micro_loss = [], torch.zeros(())
            for part, target in zip(
                flat.split(self.chunk_tokens), targets.flatten().split(self.chunk_tokens), strict=True
            ):
                part = part.clone().requires_grad_()
                chunk_loss = F.cross_entropy(self._logits(part), target, ignore_index=-100, reduction="sum") * scale
                part_grad, *found = torch.autograd.grad(chunk_loss, [part, *([head.weight] if wants_head else [])])
                for weight_grad in found:
                    head_sum = weight_grad if head_sum is None else head_sum + weight_grad
                parts.append(part_grad)
                micro_loss = micro_loss + chunk_loss.detach()
            loss = micro_loss if index == 0 else loss + micro_loss
            if hidden.requires_grad:
                hidden.backward(torch.cat(parts).view_as(hidden))
        if head_sum is None:
            return float(loss)
        head.weight.grad = head_sum if head.weight.grad is None else head.weight.grad + head_sum
        return float(loss)

    def step(self, batch: Batch, learning_rate: float) -> tuple[float, float]:
        """One training step; loss and gradient norm."""
        loss = self.gradients(batch)
        limit = self.max_grad_norm if self.max_grad_norm is not None else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.params, limit)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return loss, float(norm)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.model.get_output_embeddings()(hidden)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits


class Hybrid8Loop(ReferenceLoop):
    """The same with 8-bit moments: every parameter by itself, clipped by a factor inside the update."""

    def __init__(
        self, model: PreTrainedModel, *, micro_batch: int, chunk_tokens: int, max_grad_norm: float | None,
        weight_decay: float, fp32_elements: int, seed: int,
    ) -> None:  # fmt: skip
        super().__init__(
            model, micro_batch=micro_batch, chunk_tokens=chunk_tokens, max_grad_norm=max_grad_norm,
            weight_decay=weight_decay,
        )  # fmt: skip
        self.weight_decay, self.num_updates = weight_decay, 0
        self.states = [_state_of(name, p, fp32_elements, seed) for name, p in model.named_parameters()]
        self.updates = [prepare([state]) for state in self.states]

    def step(self, batch: Batch, learning_rate: float) -> tuple[float, float]:
        loss = self.gradients(batch)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.params if p.grad is not None])
        limit = self.max_grad_norm if self.max_grad_norm is not None else float("inf")
        self.num_updates += 1
        vector = coefficients(
            torch.clamp(limit / (norm + 1e-6), max=1.0), torch.tensor(0.0), torch.tensor(float(self.num_updates)),
            learning_rate=learning_rate, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=self.weight_decay,
        )  # fmt: skip
        for param, state, update in zip(self.params, self.states, self.updates, strict=True):
            if param.grad is None:  # frozen
                continue
            state.grad.copy_(param.grad.view(-1))
            update.update(vector)
        return loss, float(norm)


def _state_of(name: str, param: torch.nn.Parameter, fp32_elements: int, seed: int) -> BlockState | Fp32State:
    weight, grad = param.detach().view(-1), torch.zeros(param.numel())
    if param.ndim < 2 or param.numel() <= fp32_elements:
        return Fp32State(weight, grad, None, torch.zeros_like(grad), torch.zeros_like(grad), decays=param.ndim > 1)
    scales = torch.zeros(2, num_blocks(param.numel()))
    first, second = torch.zeros(param.numel(), dtype=torch.int8), torch.zeros(param.numel(), dtype=torch.uint8)
    return BlockState(weight, grad, None, first, second, scales[0], scales[1], stream_of(seed, name), decays=True)
