"""What an adapter is, apart from its bytes: its name, its references, its configuration, its identity."""

from __future__ import annotations

from multilora_store.adapter.config import AdapterConfig
from multilora_store.adapter.digest import TensorInfo, content_digest, version_id
from multilora_store.adapter.keys import canonical_tensor_name
from multilora_store.adapter.names import (
    check_name,
    check_new_name,
    check_tag,
    module_name,
    name_from_module,
    name_from_storage,
    storage_name,
)
from multilora_store.adapter.refs import Ref, is_pattern, source_kind

__all__ = [
    "AdapterConfig",
    "Ref",
    "TensorInfo",
    "canonical_tensor_name",
    "check_name",
    "check_new_name",
    "check_tag",
    "content_digest",
    "is_pattern",
    "module_name",
    "name_from_module",
    "name_from_storage",
    "source_kind",
    "storage_name",
    "version_id",
]
