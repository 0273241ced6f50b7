"""Bytes: adapters, versions and snapshots on any storage, whole or absent, in one linear history."""

from __future__ import annotations

from multilora_store.storage.changes import FileRecord, SnapshotMember
from multilora_store.storage.peft_dirs import PeftFolder, export_adapter, import_peft, read_peft_dir
from multilora_store.storage.puts import StagedPut
from multilora_store.storage.snapshots import SnapshotDraft, new_snapshot_id
from multilora_store.storage.state import Snapshot, State, Version
from multilora_store.storage.store import Commit, Store, StoredAdapter, open_store
from multilora_store.storage.sync import SyncReport, sync
from multilora_store.storage.verify import Finding, VerifyReport

__all__ = [
    "Commit",
    "FileRecord",
    "Finding",
    "PeftFolder",
    "Snapshot",
    "SnapshotDraft",
    "SnapshotMember",
    "StagedPut",
    "State",
    "Store",
    "StoredAdapter",
    "SyncReport",
    "VerifyReport",
    "Version",
    "export_adapter",
    "import_peft",
    "new_snapshot_id",
    "open_store",
    "read_peft_dir",
    "sync",
]
