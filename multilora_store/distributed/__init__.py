"""Ranks: the wrap, agreement, switching, audit, save and restore, attach and detach, and the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multilora_store.lazy import lazy

if TYPE_CHECKING:
    from multilora_store.distributed.activation import activate, active, disabled
    from multilora_store.distributed.auditing import AuditReport, audit
    from multilora_store.distributed.handle import SaveHandle
    from multilora_store.distributed.live import attach, detach
    from multilora_store.distributed.planning import Plan, plan
    from multilora_store.distributed.restoring import restore
    from multilora_store.distributed.saving import save
    from multilora_store.distributed.schedule import SaveSchedule
    from multilora_store.distributed.wrap import shard

_HOMES = {
    "AuditReport": "auditing",
    "Plan": "planning",
    "SaveHandle": "handle",
    "SaveSchedule": "schedule",
    "activate": "activation",
    "active": "activation",
    "attach": "live",
    "audit": "auditing",
    "detach": "live",
    "disabled": "activation",
    "plan": "planning",
    "restore": "restoring",
    "save": "saving",
    "shard": "wrap",
}

__all__ = [
    "AuditReport",
    "Plan",
    "SaveHandle",
    "SaveSchedule",
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

__getattr__ = lazy(__name__, _HOMES)
