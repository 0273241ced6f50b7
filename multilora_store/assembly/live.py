"""One adapter more, or one less, on a model that is in use: what attach and detach are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from multilora_store.adapter import AdapterConfig, canonical_tensor_name
from multilora_store.assembly.bridge.record import record
from multilora_store.assembly.bridge.remove import remove_adapter
from multilora_store.assembly.bridge.state import active_adapters, set_active
from multilora_store.assembly.bridge.unwrap import peft_model
from multilora_store.assembly.fingerprint import BaseIdentity
from multilora_store.assembly.rollback import untouched_on_failure
from multilora_store.assembly.steps import STEPS, Adapter, Assembly
from multilora_store.errors import UsageError
from multilora_store.manifest import AdapterSpec
from multilora_store.plugins import default_registry

__all__ = ["eject_adapter", "inject_adapter"]


def inject_adapter(
    model: nn.Module,
    name: str,
    config: AdapterConfig | Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    seed: int = 0,
    trainable: bool = False,
    active: bool = False,
    weight: float = 1.0,
    version: Any = None,
    base: BaseIdentity | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    allow_base_mismatch: bool = False,
) -> None:
    """Put one adapter on a model that carries others; nothing about these changes. On failure, nothing does at all.

    On a sharded model the new tensors are plain: the caller wraps them.

    Args:
        model: The model, under any wrapper.
        name: The new adapter's name.
        config: Its configuration.
        tensors: Its tensors, by the names of its file; None: a fresh adapter from `config` and `seed`.
        seed: Of a fresh adapter.
        trainable: Whether it receives gradients.
        active: Whether it takes part in the forward from now on, beside those that do.
        weight: Its weight when active.
        version: The stored version that it is, for the record.
        base: The base that it was made for, as far as that is recorded.
        dtype: Its dtype; as stored if None.
        device: Where its tensors go; to the layers they are on if None.
        allow_base_mismatch: Take it even if it was made for another base.

    Raises:
        UsageError: the name is taken.
        UnsupportedError, BaseMismatchError, CoverageError: as `assemble`.
    """
    peft = peft_model(model)
    parsed = config if isinstance(config, AdapterConfig) else AdapterConfig.parse(config, where=f"adapter {name!r}")
    named = {canonical_tensor_name(key): tensor for key, tensor in tensors.items()} if tensors is not None else None
    spec = AdapterSpec(name=name, active=active, trainable=trainable, weight=weight)
    adapter = Adapter(
        spec=spec,
        config=parsed,
        tensors=named,
        shapes={key: tuple(tensor.shape) for key, tensor in (named or {}).items()},
        version=version,
        base=base or BaseIdentity(),
    )
    work = Assembly(
        base=peft,
        manifest={},
        store=None,
        dtype=dtype,
        device=torch.device(device) if device is not None else None,
        seed=seed,
        rename={},
        identity=record(peft).base,
        allow_base_mismatch=allow_base_mismatch,
        registry=default_registry(),
        adapters=[adapter],
    )
    with untouched_on_failure(peft):
        for step in ("check", "inject", "cover", "load", "activate"):
            STEPS[step](work)


def eject_adapter(model: nn.Module, name: str) -> None:
    """Take one adapter off a model: every tensor of it, copies of saved modules included; the others keep their state.

    Raises:
        UsageError: the model carries no such adapter, or no other.
        UnsupportedError: it is merged into the base.
    """
    peft = peft_model(model)
    known = record(peft)
    inside = known.member(name).inside
    if len(known.members) == 1:
        raise UsageError(
            f"adapter {name!r} is the last one on the model",
            why="a PeftModel needs one",
            remedy="call unload() on the model to get the base back",
            name=name,
        )
    active = {other: weight for other, weight in active_adapters(peft).items() if other != name}
    remove_adapter(peft, inside)
    del known.members[name]
    known.weights.pop(name, None)
    set_active(peft, active)
