"""Keeps a whole set of LoRA adapters on any fsspec storage and rebuilds the set before the FSDP wrap.

Public names are loaded on first use: importing the package imports neither torch nor PEFT.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from multilora_store.lazy import lazy

if TYPE_CHECKING:
    from multilora_store.adapter import AdapterConfig, Ref
    from multilora_store.assembly import assemble
    from multilora_store.distributed import (
        activate,
        active,
        attach,
        audit,
        detach,
        disabled,
        plan,
        restore,
        save,
        shard,
    )
    from multilora_store.manifest import AdapterSpec, Lock, Manifest
    from multilora_store.merging import merge
    from multilora_store.plugins import plugin
    from multilora_store.storage import Store, export_adapter, import_peft, open_store, sync

_HOMES = {
    "AdapterConfig": "adapter",
    "AdapterSpec": "manifest",
    "Lock": "manifest",
    "Manifest": "manifest",
    "Ref": "adapter",
    "Store": "storage",
    "activate": "distributed",
    "active": "distributed",
    "assemble": "assembly",
    "attach": "distributed",
    "audit": "distributed",
    "detach": "distributed",
    "disabled": "distributed",
    "export_adapter": "storage",
    "import_peft": "storage",
    "merge": "merging",
    "open_store": "storage",
    "plan": "distributed",
    "plugin": "plugins",
    "restore": "distributed",
    "save": "distributed",
    "shard": "distributed",
    "sync": "storage",
}

__all__ = [
    "AdapterConfig",
    "AdapterSpec",
    "Lock",
    "Manifest",
    "Ref",
    "Store",
    "activate",
    "active",
    "assemble",
    "attach",
    "audit",
    "detach",
    "disabled",
    "export_adapter",
    "import_peft",
    "merge",
    "open_store",
    "plan",
    "plugin",
    "restore",
    "save",
    "shard",
    "sync",
]

_load = lazy(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    return _load(name)


@cache
def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # a fifth of the time that importing us takes

    try:
        return version("multilora-store")
    except PackageNotFoundError:  # a checkout on the path, not installed
        return "0+checkout"


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
