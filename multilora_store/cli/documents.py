"""Stored things as JSON documents: one spelling for every command, with keys that stay."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multilora_store.adapter import TensorInfo
    from multilora_store.storage import Snapshot, Version

__all__ = ["finding_line", "instant", "jsonable", "snapshot_document", "tensor_document", "version_document"]


def instant(moment: datetime) -> str:
    """A moment in UTC to the second."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def version_document(version: Version) -> dict[str, Any]:
    """One version."""
    return {
        "name": version.name,
        "version": version.id,
        "digest": version.digest,
        "seq": version.seq,
        "time": instant(version.time),
        "bytes": version.nbytes,
        "step": version.step,
        "parents": list(version.parents),
        "metadata": dict(version.metadata),
        "recipe": jsonable(version.recipe),
        "base": jsonable(version.base),
    }


def tensor_document(info: TensorInfo) -> dict[str, Any]:
    """One tensor of a version."""
    return {"name": info.name, "dtype": info.dtype, "shape": list(info.shape), "sha256": info.sha256}


def snapshot_document(snapshot: Snapshot) -> dict[str, Any]:
    """One snapshot with its members in the set's order."""
    return {
        "id": snapshot.id,
        "step": snapshot.step,
        "seq": snapshot.seq,
        "time": instant(snapshot.time),
        "adapters": {
            name: {
                "version": member.version,
                "active": member.active,
                "trainable": member.trainable,
                "weight": member.weight,
            }
            for name, member in snapshot.adapters.items()
        },
        "metadata": jsonable(snapshot.metadata),
    }


def finding_line(finding: Any) -> str:
    """One fault that `verify` found, on one line."""
    where = f" {finding.path}" if finding.path else ""
    line = f"{finding.kind}: {finding.subject}{where}: {finding.message}"
    return " ".join((line + (f" ({finding.remedy})" if finding.remedy else "")).split())


def jsonable(value: Any) -> Any:
    """`value` as plain JSON: dataclasses as mappings, moments and paths as text, sets sorted."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, datetime):
        return instant(value)
    if isinstance(value, Enum):
        return jsonable(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return jsonable(asdict(value))
    if hasattr(value, "items"):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((jsonable(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, PurePath) else repr(value)
