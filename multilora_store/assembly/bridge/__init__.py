"""The one place that knows PEFT's inside.

Every function takes any wrapper around the model (a PeftModel, DDP, FSDP1, FSDP2, compiled, checkpointed) and finds
the PeftModel in it. Adapters are found by the exact segment of their name and by the kind of the layer, never by
substring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multilora_store.assembly.bridge.record import AssemblyRecord, Member, Origin, Site, inside_name, record
from multilora_store.assembly.bridge.state import (
    active_adapters,
    check_active,
    set_active,
    set_trainable,
    trainable_adapters,
)
from multilora_store.assembly.bridge.tensors import (
    adapter_buffers,
    adapter_config,
    adapter_modules,
    adapter_names,
    adapter_parameters,
)
from multilora_store.assembly.bridge.unwrap import innermost, peft_model, unwrap, walk
from multilora_store.lazy import lazy

if TYPE_CHECKING:
    from multilora_store.assembly.fingerprint import base_fingerprint
    from multilora_store.assembly.live import eject_adapter, inject_adapter

# These stand on the steps of an assembly, which stand on this package.
_HOMES = {"base_fingerprint": ".fingerprint", "eject_adapter": ".live", "inject_adapter": ".live"}

__all__ = [
    "AssemblyRecord",
    "Member",
    "Origin",
    "Site",
    "active_adapters",
    "adapter_buffers",
    "adapter_config",
    "adapter_modules",
    "adapter_names",
    "adapter_parameters",
    "base_fingerprint",
    "check_active",
    "eject_adapter",
    "inject_adapter",
    "innermost",
    "inside_name",
    "peft_model",
    "record",
    "set_active",
    "set_trainable",
    "trainable_adapters",
    "unwrap",
    "walk",
]

__getattr__ = lazy(__name__, _HOMES)
