"""Ranks: the wrap, agreement, switching, audit, save and restore, attach and detach, and the plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multilora_store.distributed.activation import activate, active, disabled
    from multilora_store.distributed.audit import AuditReport, audit
    from multilora_store.distributed.live import attach, detach
    from multilora_store.distributed.plan import Plan, plan
    from multilora_store.distributed.restore import restore
    from multilora_store.distributed.save import SaveHandle, save
    from multilora_store.distributed.wrap import shard

_HOMES = {
    "AuditReport": "audit",
    "Plan": "plan",
    "SaveHandle": "save",
    "activate": "activation",
    "active": "activation",
    "attach": "live",
    "audit": "audit",
    "detach": "live",
    "disabled": "activation",
    "plan": "plan",
    "restore": "restore",
    "save": "save",
    "shard": "wrap",
}

__all__ = [
    "AuditReport",
    "Plan",
    "SaveHandle",
    "activate",
    "active",
    "attach",
    "audit",
    "detach",
    "disabled",
    "plan",
    "restore",
    "save",
    "shard",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = found  # a submodule of the same name must not shadow it
    return found
