"""The hybrid 8-bit optimizer for ordinary PyTorch loops: :class:`HybridAdamW8bit`, a ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lazysched.errors import UsageError
from lazysched.optimizer_state import FP32_STATE_ELEMENTS
from lazysched.runtime.grad_norms import GradNorms
from lazysched.runtime.hybrid8 import BlockState, Fp32State, coefficients, stream_of
from lazysched.runtime.hybrid8_backends import prepare
from lazysched.runtime.hybrid8_torch import master_of
from lazysched.runtime.param_state import (
    ParamState,
    check_grad,
    check_options,
    check_param,
    check_state,
    following,
    kernel_state,
    new_state,
)


class _Member(NamedTuple):
    """A parameter that takes part in a step, and where it stands: its number counts through all groups."""

    number: int
    group: int
    param: Tensor


class HybridAdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit state, clipping included, for parameters on CPU or GPU.

    With bf16 parameters 7.03 bytes a parameter: weight, gradient and 3.03 of state, which hold a 24-bit master and
    two 8-bit moments (:mod:`lazysched.runtime.hybrid8`). fp32 parameters are their own master. Small and
    one-dimensional parameters keep fp32 state. The arguments up to ``weight_decay`` are those of
    ``torch.optim.AdamW``; parameters without gradient, or without elements, are left out as there.

    **Clipping** multiplies gradients by min(1, max_grad_norm / (norm + 1e-6)) within the update; ``.grad`` itself is
    not changed. Each gradient's norm is taken by a hook as soon as it was accumulated, with several backwards a step
    after as many as the step before had. Norms of gradients that were set or changed afterwards are taken in
    :meth:`step`, as all are where ``torch.distributed`` is initialised; changes that autograd does not see, through
    ``grad.data`` or numpy, are not noticed. On a GPU nothing waits for the norm. ``torch.amp.GradScaler`` works.

    **Changing a parameter between steps**, by ``model.load_state_dict`` or otherwise, is fine: an fp32 master follows
    a weight that is not its rounding any more; a correction of 8 bits stays, at most half a unit in the weight's last
    place.

    ``state_dict`` is the same on CPU and GPU; a resumed run continues with the same bits.

    Args:
        params: parameters, named parameters, or dicts of groups. bf16 or fp32, contiguous, on CPU or CUDA devices.
        lr: learning rate, a number or a scalar tensor on the CPU.
        betas: decay of both moments, in [0, 1).
        eps: at least 1e-30.
        weight_decay: decoupled; for all parameters of the group.
        max_grad_norm: global norm of all gradients to clip to; None does not clip.
        fp32_elements: parameters with at most so many elements keep fp32 state, as one-dimensional ones do.
        state: ``hybrid8``; or ``fp32``, the exact reference: the bits of ``torch.optim.AdamW(fused=True)``, with an
            fp32 master for bf16 parameters.
        seed: of the stochastic rounding.
        skip_nonfinite: skip a step whose gradient norm is infinite or not a number, so that neither weights nor state
            change; with ``max_grad_norm`` such steps are always skipped.

    Groups may set ``lr``, ``betas``, ``eps``, ``weight_decay``, ``fp32_elements``, ``state`` and ``seed``.

    Attributes:
        grad_norm: norm of all gradients of the last step, before clipping, fp32 scalar on the device of the first
            gradient; None where neither clipping nor the check is on.
        num_skipped_steps: int64 scalar on that device. Reading a GPU's waits for it.

    Raises:
        UsageError: an option or a parameter that is not supported; one line.
    """

    # torch.amp.GradScaler then hands its scale to ``step`` instead of a pass over the gradients.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        max_grad_norm: float | None = None,
        fp32_elements: int = FP32_STATE_ELEMENTS,
        state: Literal["hybrid8", "fp32"] = "hybrid8",
        seed: int = 0,
        skip_nonfinite: bool = True,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise UsageError(f"max_grad_norm: {max_grad_norm}; give a number above 0, or None not to clip")
        self.max_grad_norm = max_grad_norm
        self.skip_nonfinite = skip_nonfinite
        self.grad_norm: Tensor | None = None
        self._norms = GradNorms()
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "state": state,
            "fp32_elements": fp32_elements, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults)
        device = next((m.param.device for m in self._members()), None)
        self.num_skipped_steps = torch.zeros((), dtype=torch.int64, device=device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in ``torch.optim.Optimizer``; refused groups are not added."""
        super().add_param_group(param_group)
        try:
            check_options(self.param_groups[-1])
            for number, _, param in self._members():
                check_param(number, param)
        except UsageError:
            self.param_groups.pop()
            raise
        self._watch()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss and its gradients; called first.

        Returns:
            What ``closure`` returned.

        Raises:
            UsageError: a gradient, or a parameter that was exchanged, is not supported; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = [m for m in self._members() if m.param.grad is not None]
        for number, _, param in members:
            self._check(number, param)
        if members:
            self._update(members)
        return loss

    def fp32_master(self, param: Tensor) -> Tensor:
        """The weights of ``param`` as precisely as they are known, for export: fp32, a copy in its shape.

        For a bf16 parameter these are 24 bits, or 32 where its state is fp32; before its first step its own 8.

        Raises:
            UsageError: ``param`` is in no group.
        """
        if not any(member.param is param for member in self._members()):
            raise UsageError(f"param: one of shape {tuple(param.shape)} is in no group; give one of this optimizer's")
        state = self.state.get(param, {})
        weight = param.detach()
        if "correction" in state:
            return master_of(weight, state["correction"])
        return following(state["master"], weight) if "master" in state else weight.to(torch.float32, copy=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, on any device; options of groups are loaded too.

        State is copied; for large files, ``torch.load(..., mmap=True)`` spares the second copy in memory.

        Raises:
            UsageError: it is of another optimizer, another ``state`` or other parameters; nothing has changed then.
        """
        # torch would cast all floating state to the parameter's dtype. As the last hook before it, ours hands state
        # over in a form that it passes on as it is; ``__setstate__`` unwraps it before any later hook sees it.
        last = self.register_load_state_dict_pre_hook(_with_state_kept)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def __getstate__(self) -> dict[str, Any]:
        own = ("max_grad_norm", "skip_nonfinite", "grad_norm", "num_skipped_steps")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for param, value in self.state.items():
            if isinstance(value, _Kept):
                self.state[param] = value.state
        if "_norms" not in self.__dict__:
            self._norms = GradNorms()
        self._watch()

    def _members(self) -> Iterator[_Member]:
        params = ((g, param) for g, group in enumerate(self.param_groups) for param in group["params"])
        return (_Member(number, g, param) for number, (g, param) in enumerate(params))

    def _check(self, number: int, param: Tensor) -> None:
        check_param(number, param)
        check_grad(number, param)
        state = self.state.get(param)
        if not state:
            return
        check_state("params", number, param, state)
        if state["first"].device != param.device:
            where = f"is on {param.device}, its state on {state['first'].device}"
            raise UsageError(f"params: parameter {number} {where}; move the model before the optimizer is made")

    @property
    def _needs_norm(self) -> bool:
        return self.max_grad_norm is not None or self.skip_nonfinite

    def _watch(self) -> None:
        if self._needs_norm:
            for member in self._members():
                self._norms.watch(member.param)

    def _update(self, members: list[_Member]) -> None:
        factor, skip = self._factor_and_skip([m.param for m in members])
        if skip.is_cpu and bool(skip):
            return  # before any state is made
        members = [m for m in members if m.param.numel() > 0]  # as torch: an empty one has a norm but no update
        for (group, _), cohort in self._cohorts(members, skip).items():
            step = self.state[cohort[0].param]["step"]
            with torch.cuda.device_of(step):
                scale = factor.to(step.device), skip.to(step.device)
                self._update_cohort(self.param_groups[group], cohort, *scale, step)
        torch.autograd.graph.increment_version([m.param for m in members])  # kernels write through addresses

    def _factor_and_skip(self, params: list[Tensor]) -> tuple[Tensor, Tensor]:
        """fp32 scalars on the device of the first parameter."""
        device = params[0].device
        unscaled, found_inf = self._from_grad_scaler(device)
        is_skipped = found_inf > 0
        factor = unscaled
        self.grad_norm = None
        if self._needs_norm:
            self.grad_norm = norm = self._norms.total(params) * unscaled
            is_skipped = is_skipped | ~torch.isfinite(norm)
            if self.max_grad_norm is not None:
                factor = unscaled * torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
        self.num_skipped_steps = self.num_skipped_steps.to(device) + is_skipped
        return factor, is_skipped.float()

    def _from_grad_scaler(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """1 / loss scale of gradients that are still scaled, and whether any is infinite: fp32 scalars on ``device``.

        ``torch.amp.GradScaler`` sets both attributes around :meth:`step`.
        """
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        one, zero = torch.ones((), device=device), torch.zeros((), device=device)
        if found_inf is None:
            return one, zero
        if scale is None:  # unscaled already, in a way that leaves no trace on the gradients
            self._norms.forget()
            return one, found_inf.to(device).float().squeeze()
        return (1 / scale.double()).float().to(device).squeeze(), found_inf.to(device).float().squeeze()

    def _cohorts(self, members: list[_Member], skip: Tensor) -> dict[tuple[int, int], list[_Member]]:
        """Members by group and step count, which counts this step already.

        Parameters that took part in the same steps share one tensor that counts them, so that those on a GPU can be
        grouped without waiting for its value. Who takes part when others do not gets a count of its own.
        """
        fresh: dict[torch.device, Tensor] = {}
        for _, group, param in members:
            if not self.state.get(param):
                step = fresh.setdefault(param.device, torch.zeros((), device=param.device))
                self.state[param] = new_state(param, self.param_groups[group], step)
        owners = Counter(id(state["step"]) for state in self.state.values())
        present = Counter(id(self.state[m.param]["step"]) for m in members)
        counted: dict[int, Tensor] = {}
        cohorts: dict[tuple[int, int], list[_Member]] = {}
        for member in members:
            state = self.state[member.param]
            key = id(state["step"])
            if key not in counted:
                step = state["step"].clone() if present[key] < owners[key] else state["step"]
                counted[key] = step.add_(1 - skip.to(step.device))
            state["step"] = counted[key]
            cohorts.setdefault((member.group, key), []).append(member)
        return cohorts

    def _update_cohort(
        self, group: dict[str, Any], cohort: list[_Member], factor: Tensor, skip: Tensor, step: Tensor
    ) -> None:
        # Prepared anew in every step: kept, it would hold the gradients' memory after zero_grad.
        states = [kernel_state(m.param, self.state[m.param], stream_of(group["seed"], str(m.number))) for m in cohort]
        for state in states:
            if isinstance(state, Fp32State) and state.master is not None:
                state.master.copy_(following(state.master, state.weight))
        if group["state"] == "fp32":
            for state in states:
                is_scaled = self.max_grad_norm is not None or getattr(self, "grad_scale", None) is not None
                _update_by_torch(state, group, factor if is_scaled else None, skip, step)
            return
        beta1, beta2 = group["betas"]
        scalars = coefficients(
            factor, skip, step, learning_rate=float(group["lr"]), beta1=beta1, beta2=beta2, epsilon=group["eps"],
            weight_decay=group["weight_decay"],
        )  # fmt: skip
        prepare(states).update(scalars)


def _update_by_torch(
    state: BlockState | Fp32State, group: dict[str, Any], factor: Tensor | None, skip: Tensor, step: Tensor
) -> None:
    """One step of AdamW by the fused kernel of torch; the gradient is multiplied by ``factor`` in a copy."""
    assert isinstance(state, Fp32State)
    if step.is_cpu and bool(skip):  # beside a GPU; the kernel for CPUs does not look at ``found_inf``
        return
    master = state.weight if state.master is None else state.master
    grad = state.grad.float()
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        [master], [grad if factor is None else grad * factor], [state.first], [state.second], [], [step],
        lr=float(group["lr"]), beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
        amsgrad=False, maximize=False, grad_scale=None, found_inf=skip if master.is_cuda else None,
    )  # fmt: skip
    if state.master is not None:
        state.weight.copy_(master)


@dataclass(frozen=True)
class _Kept:
    """A parameter's state on its way through torch's ``load_state_dict``."""

    state: ParamState


def _with_state_kept(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """``state_dict`` with checked copies of the state on the parameters' devices, each wrapped."""
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    sizes, saved_sizes = ([len(group["params"]) for group in each] for each in (groups, saved_groups))
    if sizes != saved_sizes:
        remedy = "make the optimizer with the groups that were saved"
        raise UsageError(f"state_dict: {saved_sizes} parameters in its groups, the optimizer has {sizes}; {remedy}")
    kept: dict[int, _Kept] = {}
    steps: dict[tuple[torch.device, float], Tensor] = {}
    for number, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
        if saved_group.get("state") != group["state"]:
            remedy = f"make the optimizer with the state that was saved, this one has {group['state']!r}"
            raise UsageError(f"state_dict: state of group {number} is {saved_group.get('state')!r}; {remedy}")
        for key, param in zip(saved_group["params"], group["params"], strict=True):
            if key not in state_dict["state"]:
                continue
            saved = state_dict["state"][key]
            check_state("state_dict", key, param, saved)
            state = {name: part.to(param.device, copy=True) for name, part in saved.items()}
            # Equal counts are one tensor again, see ``_cohorts``.
            state["step"] = steps.setdefault((param.device, float(saved["step"])), state["step"])
            kept[key] = _Kept(state)
    return state_dict | {"state": kept}
