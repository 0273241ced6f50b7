"""The tensors of one adapter on a live model, found by position and named as PEFT names them in files."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any, Final, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from multilora_store.adapter import AdapterConfig
from multilora_store.assembly.bridge.record import Site, record
from multilora_store.assembly.bridge.unwrap import walk

__all__ = [
    "Slot",
    "adapter_buffers",
    "adapter_config",
    "adapter_modules",
    "adapter_names",
    "adapter_parameters",
    "entries",
    "slots",
]

PREFIX: Final = "base_model.model."
_MAGNITUDE: Final = "lora_magnitude_vector"


class Slot(NamedTuple):
    """One place on the model that holds a tensor of one adapter.

    Attributes:
        key: The tensor's canonical name.
        owner: The module whose parameter or buffer it is.
        attribute: Its name there.
        site: The PEFT layer around it.
    """

    key: str
    owner: nn.Module
    attribute: str
    site: Site

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter; else a buffer."""
        return self.attribute not in self.owner._buffers

    @property
    def tensor(self) -> torch.Tensor:
        """What lies there now."""
        found: torch.Tensor | None = self.owner._parameters.get(self.attribute)  # a module's getattr takes far longer
        return found if found is not None else getattr(self.owner, self.attribute)

    @property
    def device(self) -> torch.device:
        """Where the module is that the adapter is on; the CPU if that has no bytes."""
        layer: Any = self.site.layer
        base = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer.original_module
        first = next(base.parameters(), None)
        return torch.device("cpu") if first is None or first.is_meta else first.device

    def put(self, tensor: torch.Tensor) -> None:
        """Lay `tensor` there, in the place of what was there."""
        if self.is_parameter:
            trainable = self.tensor.requires_grad
            self.owner._parameters[self.attribute] = nn.Parameter(tensor, requires_grad=trainable)
        else:
            self.owner._buffers[self.attribute] = tensor


def adapter_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the adapters that `model` carries, in the order of assembly."""
    return record(model).names


def adapter_config(model: nn.Module, name: str) -> AdapterConfig:
    """The configuration of adapter `name`, as stored.

    Raises:
        UsageError: the model carries no such adapter.
    """
    return record(model).member(name).config


def adapter_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Every parameter of adapter `name`, by its canonical name (`base_model.model.<path>.lora_A.weight`), sorted.

    The live objects: DTensors on a sharded model, meta tensors on an empty one. Under every wrapper the names are
    those of the file that PEFT writes: LoRA factors and biases, embeddings, magnitudes, whole saved modules,
    trainable tokens.

    Raises:
        UsageError: the model carries no such adapter.
    """
    return {key: tensor for key, tensor in _named(model, name) if isinstance(tensor, nn.Parameter)}


def adapter_buffers(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Every persistent buffer of adapter `name` by canonical name, sorted: those of saved modules (batch norm).

    Raises:
        UsageError: the model carries no such adapter.
    """
    return {key: tensor for key, tensor in _named(model, name) if not isinstance(tensor, nn.Parameter)}


def adapter_modules(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """Path from the innermost model -> the module that holds parameters of adapter `name` and of no other.

    What a wrap may take as a unit: `….lora_A.<name>`, `….lora_B.<name>`, `….lora_magnitude_vector.<name>`,
    `….modules_to_save.<name>`. Parameters of embeddings and trainable tokens lie in dictionaries that all adapters
    share; they are in no module of their own and are left out.

    Raises:
        UsageError: the model carries no such adapter.
    """
    known = record(model)
    inside = known.member(name).inside
    found: dict[str, nn.Module] = {}
    for site in known.sites:
        for holder, container in site.containers:
            if isinstance(container, nn.ModuleDict) and inside in container:
                module = container[inside]
                if next(module.parameters(), None) is not None:
                    found[f"{site.path}.{holder}.{inside}"] = module
    return found


def entries(site: Site, inside: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that `site` holds for the adapter called `inside` in the model, by canonical name."""
    for slot in slots(site, inside):
        yield slot.key, slot.tensor


def slots(site: Site, inside: str) -> Iterator[Slot]:
    """Every place that `site` has for a tensor of the adapter called `inside` in the model."""
    layer = site.layer
    if isinstance(layer, ModulesToSaveWrapper):
        if inside in layer.modules_to_save:
            yield from _of_module(f"{PREFIX}{site.path}", layer.modules_to_save[inside], site)
        return
    if isinstance(layer, TrainableTokensWrapper):
        tokens = layer.token_adapter
        if not tokens.tied_adapter and inside in tokens.trainable_tokens_delta:
            key = f"{PREFIX}{site.path}.token_adapter.trainable_tokens_delta"
            yield Slot(key, tokens.trainable_tokens_delta, inside, site)
        return
    for holder, container in site.containers:
        if not isinstance(container, nn.ModuleDict):
            if inside in container:
                yield Slot(f"{PREFIX}{site.path}.{holder}", container, inside, site)
        elif inside in container._modules:
            for slot in _of_module(f"{PREFIX}{site.path}.{holder}", container._modules[inside], site):
                # The magnitude became a module of its own in PEFT 0.12; its name in files stayed without a suffix.
                yield slot._replace(key=slot.key.removesuffix(".weight")) if holder == _MAGNITUDE else slot


def _named(model: nn.Module, name: str) -> list[tuple[str, torch.Tensor]]:
    known = record(model)
    inside = known.member(name).inside
    return sorted((entry for site in known.sites for entry in entries(site, inside)), key=itemgetter(0))


def _of_module(prefix: str, module: nn.Module | None, site: Site) -> Iterator[Slot]:
    if module is None:
        return
    # A factor has no children, and looking for wrappers inside it would take longer than all the rest.
    for path, child in walk(module) if module._modules else (("", module),):
        at = f"{prefix}.{path}." if path else f"{prefix}."
        for name, parameter in child._parameters.items():
            if parameter is not None:
                yield Slot(at + name, child, name, site)
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield Slot(at + name, child, name, site)
