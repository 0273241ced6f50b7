"""Weights of a fresh adapter: PEFT's distributions, drawn from a generator that knows (seed, adapter, tensor) only.

The same on every rank and for every world size, whatever else is assembled and in which order; the global random
state is neither read nor moved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from multilora_store.assembly.bridge.record import Site
from multilora_store.assembly.bridge.tensors import Slot, slots
from multilora_store.errors import UnsupportedError

__all__ = ["fill_fresh", "generator"]


def generator(seed: int, adapter: str, tensor: str) -> torch.Generator:
    """A generator on the CPU seeded by SHA-256 over `seed`, the adapter's and the tensor's name."""
    digest = hashlib.sha256(f"{seed}\0{adapter}\0{tensor}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def fill_fresh(
    name: str, inside: str, config: LoraConfig, sites: Iterable[Site], *, seed: int, dtype: torch.dtype | None
) -> None:
    """Give every empty tensor of adapter `name` its initial value, as PEFT distributes it.

    Kaiming-uniform or Gaussian A and zero B (`init_lora_weights`), magnitudes of DoRA and copies of saved modules
    from the base.

    Args:
        name: The adapter.
        inside: Its name inside the model.
        config: PEFT's configuration of it.
        sites: The model's PEFT layers.
        seed: See `generator`.
        dtype: Of the factors; float32 if None.

    Raises:
        UnsupportedError: the base has no values to start from (it lies on meta), or an odd rank with `orthogonal`.
    """
    for site in sites:
        found = {slot.key: slot for slot in slots(site, inside)}
        if not found:
            continue
        if isinstance(site.layer, (ModulesToSaveWrapper, TrainableTokensWrapper)):
            _copy_base(name, inside, site, found)
            continue
        factors = {key: slot for key, slot in found.items() if not key.endswith("lora_magnitude_vector")}
        layer: Any = site.layer
        for key, value in _draw(name, config, layer.r[inside], factors, seed).items():
            found[key].put(value.to(dtype or torch.float32))
        if len(factors) < len(found):
            _measure(name, inside, site)


def _draw(name: str, config: LoraConfig, rank: int, factors: dict[str, Slot], seed: int) -> dict[str, torch.Tensor]:
    init = config.init_lora_weights
    if init == "orthogonal":
        return _orthogonal(name, rank, factors, seed)
    inputs = {_holder(key): slot.tensor for key, slot in factors.items() if key.endswith("weight")}
    values: dict[str, torch.Tensor] = {}
    for key, slot in factors.items():
        shape, draw = slot.tensor.shape, generator(seed, name, key)
        holder = _holder(key)
        if holder == "lora_A" and init == "gaussian":
            values[key] = torch.randn(shape, generator=draw) / rank
        elif holder == "lora_A" or (holder == "lora_B" and init is False):
            # nn.Linear's own default, and Kaiming with a = sqrt(5): uniform within 1 / sqrt(fan_in).
            bound = 1 / math.sqrt(math.prod(inputs[holder].shape[1:]))
            values[key] = (torch.rand(shape, generator=draw) * 2 - 1) * bound
        elif holder == "lora_embedding_B" or (holder == "lora_embedding_A" and init is False):
            values[key] = torch.randn(shape, generator=draw)
        else:
            values[key] = torch.zeros(shape)
    return values


def _orthogonal(name: str, rank: int, factors: dict[str, Slot], seed: int) -> dict[str, torch.Tensor]:
    """LoRA with orthogonal rows from one random rotation, as PEFT's `orthogonal_init`."""
    if rank % 2:
        raise UnsupportedError(f"adapter {name!r}: orthogonal initialisation needs an even rank, found {rank}")
    values: dict[str, torch.Tensor] = {}
    for key, slot in factors.items():
        shape, holder = slot.tensor.shape, _holder(key)
        if len(shape) != 2 or holder not in ("lora_A", "lora_B") or not key.endswith("weight"):
            raise UnsupportedError(
                f"adapter {name!r}: orthogonal initialisation works on linear layers only, not {key}"
            )
        pair = key.replace(f".{holder}.", ".lora_A+B.")
        rotation, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator(seed, name, pair)))
        draw = generator(seed, name, key)
        if holder == "lora_A":
            values[key] = (torch.randn(shape[1], rank // 2, generator=draw) @ rotation[0::2]).T.contiguous() / 10
        else:
            values[key] = torch.randn(shape[0], rank // 2, generator=draw) @ rotation[1::2] / 10
    return values


def _holder(key: str) -> str:
    return next(part for part in reversed(key.split(".")) if part.startswith("lora_"))


def _measure(name: str, inside: str, site: Site) -> None:
    """The magnitudes of DoRA: norms of the base's weight with the adapter added (Liu et al., arXiv 2402.09353, 4.1)."""
    layer: Any = site.layer
    if any(parameter.is_meta for parameter in layer.get_base_layer().parameters()):
        raise _no_values(name, site)
    if inside in layer.lora_A:
        factors = layer.lora_A[inside].weight, layer.lora_B[inside].weight
    else:
        factors = layer.lora_embedding_A[inside], layer.lora_embedding_B[inside]
    magnitude = layer.lora_magnitude_vector[inside]
    with torch.no_grad():
        magnitude.update_layer(
            base_layer=layer.get_base_layer(), lora_A=factors[0], lora_B=factors[1], scaling=layer.scaling[inside]
        )
    magnitude.weight.requires_grad_(False)


def _copy_base(name: str, inside: str, site: Site, found: dict[str, Slot]) -> None:
    layer: Any = site.layer
    if isinstance(layer, TrainableTokensWrapper):
        if any(slot.tensor.is_meta for slot in found.values()):
            raise _no_values(name, site)
        return  # PEFT has copied the rows of the base
    copied: nn.Module = layer.modules_to_save[inside]
    for path, module in layer.original_module.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if parameter.is_meta:
                    raise _no_values(name, site)
                value = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                copied.get_submodule(path)._parameters[key] = value


def _no_values(name: str, site: Site) -> UnsupportedError:
    return UnsupportedError(
        f"adapter {name!r} is fresh and starts from the values of {site.path}, but the base lies on meta",
        remedy="assemble on a base with values, or load a stored adapter",
        name=name,
    )
