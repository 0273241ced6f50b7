"""The one place that knows PEFT's inside.

Every function takes any wrapper around the model (a PeftModel, DDP, FSDP1, FSDP2, compiled, checkpointed) and finds
the PeftModel in it. Adapters are found by the exact segment of their name and by the kind of the layer, never by
substring.
"""

from __future__ import annotations

from multilora_store.assembly.bridge.record import AssemblyRecord, Member, Site, inside_name, record
from multilora_store.assembly.bridge.state import active_adapters, set_active, set_trainable, trainable_adapters
from multilora_store.assembly.bridge.tensors import (
    adapter_buffers,
    adapter_config,
    adapter_modules,
    adapter_names,
    adapter_parameters,
)
from multilora_store.assembly.bridge.unwrap import innermost, peft_model, unwrap, walk

__all__ = [
    "AssemblyRecord",
    "Member",
    "Site",
    "active_adapters",
    "adapter_buffers",
    "adapter_config",
    "adapter_modules",
    "adapter_names",
    "adapter_parameters",
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
