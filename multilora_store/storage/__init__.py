"""Bytes: adapters, versions and snapshots on any storage, whole or absent, in one linear history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multilora_store.lazy import lazy
from multilora_store.storage.changes import FileRecord, SnapshotMember
from multilora_store.storage.peft_dirs import PeftFolder, export_adapter, import_peft, read_peft_dir
from multilora_store.storage.puts import StagedPut
from multilora_store.storage.repair import RepairReport, repair
from multilora_store.storage.snapshots import SnapshotDraft, new_snapshot_id
from multilora_store.storage.state import Snapshot, State, Version
from multilora_store.storage.store import Commit, Store, StoredAdapter, StoreLike, as_store, open_store
from multilora_store.storage.sync import SyncReport, sync
from multilora_store.storage.verify import Finding, VerifyReport

if TYPE_CHECKING:
    from multilora_store.storage.diff import StateDiff, diff_states
    from multilora_store.storage.following import Round, follow
    from multilora_store.storage.gc import GcReport
    from multilora_store.storage.restoring import RestoreReport, restore_state
    from multilora_store.storage.retention import RetentionReport, apply_retention

__all__ = [
    "Commit",
    "FileRecord",
    "Finding",
    "GcReport",
    "PeftFolder",
    "RepairReport",
    "RestoreReport",
    "RetentionReport",
    "Round",
    "Snapshot",
    "SnapshotDraft",
    "SnapshotMember",
    "StagedPut",
    "State",
    "StateDiff",
    "Store",
    "StoreLike",
    "StoredAdapter",
    "SyncReport",
    "VerifyReport",
    "Version",
    "apply_retention",
    "as_store",
    "diff_states",
    "export_adapter",
    "follow",
    "import_peft",
    "new_snapshot_id",
    "open_store",
    "read_peft_dir",
    "repair",
    "restore_state",
    "sync",
]

# Loaded on first use: a sync that finds nothing to do takes no longer than its imports.
_HOMES = {
    "GcReport": "gc",
    "RestoreReport": "restoring",
    "RetentionReport": "retention",
    "Round": "following",
    "StateDiff": "diff",
    "apply_retention": "retention",
    "diff_states": "diff",
    "follow": "following",
    "restore_state": "restoring",
}

__getattr__ = lazy(__name__, _HOMES)
