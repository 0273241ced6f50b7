"""Bytes: adapters, versions and snapshots on any storage, whole or absent, in one linear history."""

from __future__ import annotations

from multilora_store.storage.changes import FileRecord, SnapshotMember
from multilora_store.storage.puts import StagedPut
from multilora_store.storage.snapshots import SnapshotDraft, new_snapshot_id
from multilora_store.storage.state import Snapshot, State, Version
from multilora_store.storage.store import Commit, Store, StoredAdapter, open_store

__all__ = [
    "Commit",
    "FileRecord",
    "Snapshot",
    "SnapshotDraft",
    "SnapshotMember",
    "StagedPut",
    "State",
    "Store",
    "StoredAdapter",
    "Version",
    "new_snapshot_id",
    "open_store",
]
