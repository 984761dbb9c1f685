"""A model's modules without its weights: parameters on the meta device, buffers real."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lazysched.errors import UsageError
from lazysched.runtime.held_warnings import tell_held_warnings
from lazysched.schemas import Stage


def build_skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The causal language model of ``config`` in evaluation mode, its parameters without storage.

    Raises:
        UsageError: transformers has no causal language model for the configuration, or dropout is not zero.
    """
    try:
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # nonsense in a setting fails anywhere in transformers, in any way
        raise UsageError(
            f"model: {config.model_type!r} cannot be built ({_reason(error, config)}); use a valid decoder-only model"
        ) from None
    _refuse_dropout(model)
    tell_held_warnings()
    return model.eval()  # type: ignore[no-any-return]


def _reason(error: Exception, config: PretrainedConfig) -> str:
    if isinstance(error, KeyError) and error.args:  # a name that transformers looked up, as that of an activation
        field = _field_with(error.args[0], config.to_dict())
        return f"{field}: {error} is not known to transformers" if field else f"{error} was not found"
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _field_with(value: object, settings: Mapping[str, Any]) -> str | None:
    """The first setting that is ``value``, those within others by dots."""
    for name, found in settings.items():
        if found == value:
            return name
        inner = _field_with(value, found) if isinstance(found, dict) else None
        if inner is not None:
            return f"{name}.{inner}"
    return None


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device as it is registered; rotary tables and other buffers stay real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _refuse_dropout(model: nn.Module) -> None:
    """Refuse dropout: a recomputed block would draw other numbers than its forward."""
    for name, module in model.named_modules():
        for attribute in ("p", "attention_dropout", "dropout"):
            value: Any = getattr(module, attribute, 0)
            is_dropout = attribute != "p" or isinstance(module, nn.Dropout)
            if is_dropout and isinstance(value, float) and value > 0:
                raise UsageError(f"model: {name}.{attribute} is {value}; set dropout to 0 in config.json")


def replace_with_placeholders(module: nn.Module, device: torch.device) -> list[nn.Parameter]:
    """Give ``module`` empty parameters on ``device``, to be bound to slices of a flat buffer; in the module's order."""
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None:
                owner._parameters[name] = nn.Parameter(torch.empty(0, device=device))
    move_buffers(module, device)
    return list(module.parameters())


def freeze(params: Sequence[nn.Parameter], stage: Stage) -> None:
    """Let only what is trained of ``params``, the stage's own in the order of its flat store, require gradients."""
    for param, name in zip(params, stage.params, strict=True):
        param.requires_grad_(name in stage.trained_params)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers, and only them, to ``device``."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


def signature(module: nn.Module) -> tuple[Any, ...]:
    """What makes two blocks equal: classes, plain settings, shapes of parameters and buffers; not the layer's index."""
    plain = (bool, int, float, str, type(None))
    parts: list[Any] = []
    for name, part in module.named_modules():
        settings = {k: v for k, v in vars(part).items() if isinstance(v, plain) and k != "layer_idx"}
        parts.append((name, type(part).__qualname__, tuple(sorted(settings.items(), key=str))))
    parts += [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    parts += [(name, tuple(b.shape)) for name, b in module.named_buffers()]
    return tuple(parts)
