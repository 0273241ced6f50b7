"""Which adapters take part and which receive gradients: two states, each set without touching the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from torch import nn

from multilora_store.assembly.bridge.record import AssemblyRecord, Site, record
from multilora_store.assembly.bridge.tensors import entries
from multilora_store.assembly.bridge.unwrap import peft_model
from multilora_store.errors import UnsupportedError, UsageError

__all__ = ["active_adapters", "check_active", "set_active", "set_flags", "set_trainable", "trainable_adapters"]


def active_adapters(model: nn.Module) -> dict[str, float]:
    """The adapters that take part in the forward, with their weights, in the order in which they were activated."""
    peft = peft_model(model)
    known = record(peft)
    names = {member.inside: name for name, member in known.members.items()}
    return {names[inside]: _weight(known, names[inside], inside) for inside in peft.active_adapters if inside in names}


def set_active(model: nn.Module, weights: Mapping[str, float]) -> None:
    """Let exactly the adapters of `weights` take part in the forward, each scaled by its weight.

    An adapter's scale becomes its weight times alpha / r (alpha / sqrt(r) with rsLoRA); that of every adapter that
    no longer takes part becomes alpha / r again. A weight of 0 is the same as leaving the adapter out, and an empty
    mapping leaves the base alone. A whole saved module cannot be scaled: the copy is used as it is. Nothing else
    changes, `requires_grad` included; no rank is asked. The cost is O(layers x active).

    Raises:
        UsageError: an unknown adapter, a weight that is not finite, or several active adapters that each bring their
            own copy of one module.
        UnsupportedError: adapters are merged into the base.
    """
    chosen, holders = check_active(model, weights)
    peft = peft_model(model)
    known = record(peft)
    inside = {name: known.members[name].inside for name in chosen}
    keys = list(inside.values())

    before = [known.members[name].inside for name in known.weights]
    before += [key for key in peft.active_adapters if key not in before]
    scales = {**dict.fromkeys(before, 1.0), **{inside[name]: weight for name, weight in chosen.items()}}
    for site, holder in zip(known.sites, holders, strict=True):
        _activate_site(site.layer, keys, scales, holder)
    peft.base_model.active_adapter = keys
    if keys:  # PeftModel's own attribute must name one adapter, whatever takes part
        peft.active_adapter = keys[0]
    known.weights = chosen


def check_active(model: nn.Module, weights: Mapping[str, float]) -> tuple[dict[str, float], list[str | None]]:
    """The weights that are not 0, and for each site the adapter whose copy of the module is used; changes nothing.

    Raises:
        UsageError, UnsupportedError: `set_active` would refuse these weights.
    """
    known = record(peft_model(model))
    chosen = _check_weights(known, weights)
    keys = [known.members[name].inside for name in chosen]
    return chosen, [_check_site(site, keys) for site in known.sites]


def trainable_adapters(model: nn.Module) -> set[str]:
    """The adapters of which any parameter requires gradients."""
    known = record(model)
    return {
        name
        for name, member in known.members.items()
        if any(tensor.requires_grad for site in known.sites for _, tensor in entries(site, member.inside))
    }


def set_trainable(model: nn.Module, names: Iterable[str]) -> None:
    """Let exactly the adapters `names` receive gradients; which ones take part in the forward stays as it is.

    Factors that PEFT's variant keeps frozen (`lora_B` of MiCA) stay frozen.

    Raises:
        UsageError: an unknown adapter, or a call in the middle of a forward, where flags cannot be set.
    """
    peft = peft_model(model)
    known = record(peft)
    wanted = [known.member(name).name for name in names]
    for name in known.members:
        set_flags(peft, name, name in wanted)


def set_flags(peft: PeftModel, name: str, trainable: bool) -> None:
    """Let adapter `name` receive gradients, or not."""
    known = record(peft)
    inside = known.member(name).inside
    for site in known.sites:
        frozen = getattr(site.layer, "frozen_peft_weight_names", {}).get(inside, ())
        for key, tensor in entries(site, inside):
            fixed = any(f".{holder}" in key[len(site.path) :] for holder in frozen)
            _set_flag(tensor, trainable and not fixed, key)
    peft.peft_config[inside].inference_mode = not trainable


def _set_flag(tensor: torch.Tensor, flag: bool, key: str) -> None:
    if tensor.requires_grad == flag or not isinstance(tensor, nn.Parameter):
        return
    if not tensor.is_leaf:
        raise UsageError(
            f"{key} is a view inside a running forward, its requires_grad cannot be set",
            remedy="call this between steps; reshard an FSDP model first",
        )
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.requires_grad_(flag)


def _check_weights(known: AssemblyRecord, weights: Mapping[str, float]) -> dict[str, float]:
    chosen: dict[str, float] = {}
    for name, weight in weights.items():
        known.member(name)
        given: object = weight  # whatever a caller without a type checker gave
        if not isinstance(given, SupportsFloat):
            raise UsageError(f"adapter {name!r}: weight {given!r} is not a number", name=name)
        if not math.isfinite(weight):
            raise UsageError(f"adapter {name!r}: weight {weight!r} is not finite", name=name)
        if weight != 0:
            chosen[name] = float(weight)
    return chosen


def _check_site(site: Site, keys: list[str]) -> str | None:
    """The one adapter of `keys` that brings a copy of the module at `site`; None if none does or it is a target."""
    layer = site.layer
    if isinstance(layer, BaseTunerLayer):
        if layer.merged_adapters:
            raise UnsupportedError(
                f"adapters {', '.join(layer.merged_adapters)} are merged into {site.path}",
                why="activating others now would change the merged weights for good",
                remedy="call unmerge_adapter() first",
            )
        return None
    assert isinstance(layer, AuxiliaryTrainingWrapper)
    present = layer._get_available_adapters()
    found = [key for key in keys if key in present]
    if len(found) > 1:
        raise UsageError(
            f"adapters {', '.join(found)} each bring their own {site.path}, only one of them can be active",
            why="a whole module is not a low-rank change that could be added to another",
            remedy="activate one of them, or merge them with a rule for saved modules",
            path=site.path,
            adapters=found,
        )
    return found[0] if found else None


def _activate_site(layer: Any, keys: list[str], scales: Mapping[str, float], holder: str | None) -> None:
    if isinstance(layer, AuxiliaryTrainingWrapper):
        layer._active_adapter = holder if holder is not None else []
        if isinstance(layer, TrainableTokensWrapper):
            layer.token_adapter._active_adapter = [holder] if holder is not None else []
        return
    layer._active_adapter = list(keys)
    if isinstance(layer, LoraLayer):
        for key, scale in scales.items():
            layer.set_scale(key, scale)


def _weight(known: AssemblyRecord, name: str, inside: str) -> float:
    """The weight of an active adapter, read from the live scale; as recorded where the scale agrees with that."""
    recorded = known.weights.get(name, 1.0)
    for site in known.sites:
        layer = site.layer
        if isinstance(layer, LoraLayer) and inside in layer.scaling:
            rank = layer.r[inside]
            root = math.sqrt(rank) if layer.use_rslora.get(inside) else rank
            alpha = layer.lora_alpha[inside]
            scale = float(layer.scaling[inside])
            return recorded if scale == recorded * alpha / root or not alpha else scale * root / alpha
    return recorded
