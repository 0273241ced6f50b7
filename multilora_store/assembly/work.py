"""The work of one assembly: what was asked for, and what its steps have made of it so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import nn

from multilora_store.adapter import AdapterConfig
from multilora_store.assembly.bridge.inject import Joining
from multilora_store.assembly.bridge.record import Origin
from multilora_store.assembly.bridge.tensors import Slot
from multilora_store.assembly.fingerprint import BaseIdentity
from multilora_store.manifest import AdapterSpec, Lock, Manifest
from multilora_store.plugins import Registry

if TYPE_CHECKING:
    from multilora_store.storage import Store
    from multilora_store.storage.progress import Listener

__all__ = ["Adapter", "Assembly"]


@dataclass(slots=True, kw_only=True)
class Adapter:
    """One adapter on its way onto the model.

    Attributes:
        spec: Its entry in the manifest.
        config: Its configuration, as stored.
        tensors: Its tensors by canonical name, made when asked for; None for a fresh adapter.
        shapes: Their shapes, known without making them.
        names: Name on the model -> name in the file, filled in by `cover`.
        slots: Its places on the model, filled in by `cover`.
        version: The stored version (`storage.Version`), None where there is none.
        base: The base it was made for, as far as that is recorded.
        origin: Of one without a version, what it was made from, where that is known.
        joining: What PEFT is told of it, filled in by `check`.
    """

    spec: AdapterSpec
    config: AdapterConfig
    tensors: Mapping[str, torch.Tensor] | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    version: Any = None
    base: BaseIdentity = field(default_factory=BaseIdentity)
    origin: Origin | None = None
    joining: Joining | None = None

    @property
    def name(self) -> str:
        """Its name in the set."""
        return self.spec.name


@dataclass(slots=True, kw_only=True)
class Assembly:
    """The work of one assembly: what was asked for, and what the steps have made of it.

    Attributes:
        base: The base; a model that carries adapters is added to.
        manifest: What was asked for.
        store: The store of entries that name none.
        dtype: Of every floating-point tensor, None: as each entry says, else as stored.
        device: Of the adapters' tensors; None: that of the layer each is on (CPU where that lies on meta).
        seed: Of fresh adapters.
        rename: Beginning of a path in the files -> beginning on the model.
        identity: What the base calls itself; read from it if None.
        allow_base_mismatch: Whether adapters made for another base are taken all the same.
        registry: Where plugins are looked up.
        progress: Told after each adapter that is loaded.
        lock: The manifest with versions (by `resolve`).
        adapters: The adapters, in order (by `read`).
        model: The model (by `inject`).
        notes: What is worth telling.
    """

    base: nn.Module
    manifest: Manifest | Lock | Mapping[str, Any]
    store: Store | None
    dtype: torch.dtype | None
    device: torch.device | None
    seed: int
    rename: Mapping[str, str]
    identity: BaseIdentity | None
    allow_base_mismatch: bool
    registry: Registry
    progress: Listener | None = None
    lock: Lock | None = None
    adapters: list[Adapter] = field(default_factory=list)
    model: PeftModel | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def peft(self) -> PeftModel:
        """The model; only after `inject`."""
        assert self.model is not None, "the step `inject` makes the model"
        return self.model
