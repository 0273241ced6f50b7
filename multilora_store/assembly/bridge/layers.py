"""Adding one adapter to a layer that PEFT has already made: at a cost that does not grow with the adapters there."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.lora.layer import MultiheadAttention
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

__all__ = ["add_to_layer", "can_be_model", "is_plain", "like", "save_module", "without_bytes"]

# Fields that make PEFT choose a variant of the layer, with parameters of its own.
_VARIANTS: Final = ("use_dora", "alora_invocation_tokens", "use_qalora", "use_bdlora", "velora_config", "arrow_config")


def is_plain(config: LoraConfig) -> bool:
    """Whether `config` asks for factors A and B alone, without a variant."""
    return not any(getattr(config, name, None) for name in _VARIANTS) and config.init_lora_weights != "mica"


def add_to_layer(layer: Any, inside: str, rank: int, alpha: float, config: LoraConfig, *, target: str) -> None:
    """Add an adapter without bytes (on meta) to a LoRA layer; other adapters there are not looked at.

    Args:
        layer: A layer that PEFT made for another adapter.
        inside: The new adapter's name inside the model.
        rank: Its rank on this layer.
        alpha: Its alpha on this layer.
        config: Its configuration.
        target: The layer's path, for PEFT.
    """
    if is_plain(config) and type(layer) in {lora.Linear, lora.Embedding}:
        _add_plain(layer, inside, rank, alpha, config)
        return
    with without_bytes(), _alone(layer):
        layer.update_layer(inside, rank, lora_alpha=alpha, config=config, target_name=target)
    for child in layer._modules.values():
        if isinstance(child, nn.ModuleDict) and inside in child:
            child[inside].train(layer.training)


def can_be_model(layer: nn.Module) -> bool:
    """Whether other layers over the same kind of module can be made `like` this one, which PEFT made."""
    base = getattr(layer, "base_layer", None)
    return type(layer) is lora.Linear and type(base) is nn.Linear and not hasattr(base, "_hf_tp_plan")


def like(attributes: Mapping[str, Any], base_layer: nn.Module, path: str) -> Any:
    """A LoRA layer around `base_layer`, without an adapter yet.

    Args:
        attributes: Of a layer over the same kind of module, as PEFT had just made it.
        base_layer: The module.
        path: Its path.
    """
    layer: Any = lora.Linear.__new__(lora.Linear)
    nn.Module.__init__(layer)
    extra = dict(attributes["kwargs"])
    if "target_name" in extra:
        extra["target_name"] = path
    lora.LoraLayer.__init__(layer, base_layer, ephemeral_gpu_offload=attributes["ephemeral_gpu_offload"], **extra)
    for name, value in attributes.items():
        if name not in vars(layer):
            layer.__dict__[name] = value
    layer._active_adapter = []
    layer.train(base_layer.training)
    return layer


def _add_plain(layer: Any, inside: str, rank: int, alpha: float, config: LoraConfig) -> None:
    """What `LoraLayer.update_layer` does for a layer without a variant, less its walks over the other adapters."""
    layer.r[inside] = rank
    layer.lora_alpha[inside] = alpha
    layer.scaling[inside] = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    layer.use_rslora[inside] = config.use_rslora
    layer.use_dora[inside] = False
    layer.lora_bias[inside] = config.lora_bias
    training = layer.training
    if config.lora_dropout > 0.0:
        dropout: nn.Module = nn.Dropout(p=config.lora_dropout)
        dropout.training = training
    else:
        dropout = _stamp(nn.Identity, training=training)
    layer.lora_dropout._modules[inside] = dropout
    if isinstance(layer, lora.Embedding):
        if config.lora_bias:
            raise ValueError("lora_bias=True is not supported for Embedding.")
        layer.lora_embedding_A[inside] = _empty(rank, layer.in_features)
        layer.lora_embedding_B[inside] = _empty(layer.out_features, rank)
        return
    for holder, inputs, outputs, bias in (
        (layer.lora_A, layer.in_features, rank, False),
        (layer.lora_B, rank, layer.out_features, config.lora_bias),
    ):
        factor = _stamp(nn.Linear, in_features=inputs, out_features=outputs, training=training)
        factor._parameters["weight"] = _empty(outputs, inputs)
        factor._parameters["bias"] = _empty(outputs) if bias else None
        holder._modules[inside] = factor


@cache
def _template(linear: bool) -> tuple[dict[str, Any], tuple[tuple[str, type], ...]]:
    module = nn.Linear(1, 1, device="meta") if linear else nn.Identity()
    containers = {name: type(value) for name, value in vars(module).items() if isinstance(value, (dict, set))}
    values = {name: value for name, value in vars(module).items() if name not in containers}
    return values, tuple(containers.items())


def _stamp(kind: type[nn.Linear] | type[nn.Identity], **attributes: Any) -> Any:
    """A fresh, empty module of `kind`: what its constructor leaves, at a tenth of the time and without an init."""
    values, containers = _template(kind is nn.Linear)
    module = kind.__new__(kind)
    state = module.__dict__
    state.update(values)
    for name, container in containers:
        state[name] = container()
    state.update(attributes)
    return module


@cache
def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(_meta(*shape), requires_grad=False)


@contextmanager
def without_bytes() -> Iterator[None]:
    """Whatever is created inside lies on meta: nothing is allocated, no random number is drawn."""
    with torch.device("meta"):
        yield


@contextmanager
def _alone(layer: Any) -> Iterator[None]:
    """Keep `update_layer` from its two walks over all adapters of the layer, which the caller does once at the end."""
    layers = [layer]
    if isinstance(layer, MultiheadAttention):
        layers.append(layer.base_layer.out_proj)
    for item in layers:
        item.__dict__["set_adapter"] = _nothing
        item.__dict__["_move_adapter_to_device_of_base_layer"] = _nothing
    try:
        yield
    finally:
        for item in layers:
            del item.__dict__["set_adapter"], item.__dict__["_move_adapter_to_device_of_base_layer"]


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for a method that must not run now."""


def save_module(parent: nn.Module, child: str, inside: str) -> nn.Module:
    """Give adapter `inside` its own copy of a whole module, without bytes; PEFT's wrapper is put around it if need be.

    Returns:
        The wrapper at `parent.child`.
    """
    target = parent._modules[child]
    assert target is not None
    original = target.original_module if isinstance(target, ModulesToSaveWrapper) else target
    flags = [(parameter, parameter.requires_grad) for parameter in original.parameters()]
    skeleton = _skeleton(original)
    if isinstance(target, ModulesToSaveWrapper):
        wrapper = target
        wrapper.original_module = skeleton  # what PEFT's update copies
        try:
            wrapper.update(inside)
        finally:
            wrapper.original_module = original
    else:
        wrapper = ModulesToSaveWrapper(skeleton, inside)
        wrapper.original_module = original
        wrapper._active_adapter = []
        wrapper.training = wrapper.modules_to_save.training = original.training
        parent._modules[child] = wrapper
    for parameter in wrapper.modules_to_save[inside].parameters():
        parameter.requires_grad_(False)
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    found: nn.Module = wrapper
    return found


def _skeleton(module: nn.Module) -> nn.Module:
    """A copy of `module` whose parameters lie on meta."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=False)
    copied: nn.Module = copy.deepcopy(module, memo)
    return copied
