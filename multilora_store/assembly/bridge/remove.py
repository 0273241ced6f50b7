"""Taking one adapter off a model, with everything that came with it."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from peft.tuners import lora
from peft.tuners.lora.layer import MultiheadAttention
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from multilora_store.assembly.bridge.record import rescan
from multilora_store.assembly.bridge.targets import places_of
from multilora_store.assembly.bridge.unwrap import innermost, unwrap, walk
from multilora_store.errors import UnsupportedError

__all__ = ["remove_adapter"]


def remove_adapter(peft: PeftModel, inside: str) -> None:
    """Take adapter `inside` off the model: every tensor of it, copies of saved modules included.

    A layer that carries no adapter any more is replaced by the module of the base that it stood for.

    Raises:
        UnsupportedError: it is merged into the base.
    """
    base = innermost(peft)
    layers = [layer for _, layer in walk(base) if isinstance(layer, (lora.LoraLayer, AuxiliaryTrainingWrapper))]
    for layer in layers:
        if inside in layer.merged_adapters:
            raise UnsupportedError(f"adapter {inside!r} is merged into the base", remedy="call unmerge_adapter() first")
    for layer in layers:
        if isinstance(layer, AuxiliaryTrainingWrapper):
            _drop_copy(layer, inside)
        else:
            _drop_factors(layer, inside)
    del peft.peft_config[inside]
    if peft.active_adapter == inside:
        peft.active_adapter = next(iter(peft.peft_config), inside)
    peft.base_model.active_adapter = [key for key in peft.base_model.active_adapters if key != inside]
    _unwrap_bare(base)
    rescan(peft)


def _drop_factors(layer: Any, inside: str) -> None:
    for container in (*layer._modules.values(), *vars(layer).values()):
        held = (
            unwrap(container) if isinstance(container, nn.Module) and container is not layer.base_layer else container
        )
        if isinstance(held, (dict, nn.ModuleDict, nn.ParameterDict)) and inside in held:
            del held[inside]
    layer._active_adapter = [key for key in layer.active_adapters if key != inside]


def _drop_copy(wrapper: Any, inside: str) -> None:
    wrapper._adapters.discard(inside)
    if isinstance(wrapper, ModulesToSaveWrapper):
        if inside in wrapper.modules_to_save:
            del wrapper.modules_to_save[inside]
    elif not wrapper.token_adapter.tied_adapter and inside in wrapper.token_adapter.trainable_tokens_delta:
        for name in ("trainable_tokens_delta", "trainable_tokens_original", "token_indices"):
            del getattr(wrapper.token_adapter, name)[inside]
    if isinstance(wrapper, TrainableTokensWrapper):
        wrapper.token_adapter._active_adapter = [key for key in wrapper.token_adapter.active_adapters if key != inside]
    left = [key for key in wrapper.active_adapters if key != inside]
    wrapper._active_adapter = left[0] if left else []


def _unwrap_bare(base: nn.Module) -> None:
    for place in places_of(base):
        layer: Any = place.module
        if isinstance(layer, MultiheadAttention):
            continue  # its projection inside is a PEFT layer too; it costs nothing when no adapter is left
        if isinstance(layer, lora.LoraLayer):
            while isinstance(layer, lora.LoraLayer) and not layer.r:
                layer = layer.base_layer
        elif isinstance(layer, AuxiliaryTrainingWrapper) and not layer._adapters:
            layer = layer.original_module
        if layer is not place.module and place.parent._modules[place.child] is place.module:
            place.parent._modules[place.child] = layer
