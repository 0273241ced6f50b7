"""Snapshots: ids, drafts, and the files of optimizer and trainer that lie beside the set."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from multilora_store.errors import (
    ConflictError,
    DamagedError,
    ExistsError,
    NotInStoreError,
    ReplicaIncompleteError,
    UsageError,
    choices,
)
from multilora_store.storage.blobs import Blobs, Buffer
from multilora_store.storage.changes import (
    FileRecord,
    SnapshotMember,
    TakeSnapshot,
    check_snapshot_file,
    check_snapshot_id,
)
from multilora_store.storage.puts import check_step
from multilora_store.storage.records import plain_json, sha256
from multilora_store.storage.state import Snapshot, State

__all__ = ["SnapshotDraft", "new_snapshot_id", "plan_snapshot", "read_file", "stage_file", "staged_files"]


def new_snapshot_id() -> str:
    """An id that no other snapshot has; ids sort by the time they were made."""
    return f"s{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDraft:
    """A snapshot that a commit will take.

    Attributes:
        id: From `new_snapshot_id`; its files were staged under it.
        adapters: By name, in the set's order. A member without a version takes the one that the commit puts.
        files: What `stage_snapshot_file` returned, by path; where empty, the files are listed (sizes only).
    """

    id: str
    step: int | None = None
    adapters: Mapping[str, SnapshotMember]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)


def plan_snapshot(draft: SnapshotDraft, state: State, put: Mapping[str, str]) -> TakeSnapshot:
    """The change that takes `draft`, every member resolved to one live version.

    Args:
        put: Versions that the same commit puts, by adapter name.

    Raises:
        ExistsError: the id is taken.
        ConflictError: a gc has purged its files.
        NotInStoreError: a member's version is not live.
        UsageError: the draft is empty, or a member without a version is not put.
    """
    if not draft.adapters:
        raise UsageError(f"snapshot {draft.id} names no adapter", remedy="a snapshot holds a set of at least one")
    if draft.id in state.snapshots:
        raise ExistsError(f"snapshot {draft.id} exists already", remedy="take a new id for every snapshot")
    if f"snapshots/{draft.id}" in state.purged:
        raise ConflictError(
            f"the files of snapshot {draft.id} were purged before the commit",
            why=f"entry {state.purged[f'snapshots/{draft.id}']} took them for an abandoned upload",
            remedy="save again under a new snapshot id, with a longer grace period for gc",
        )
    members = {name: _plan_member(name, member, state, put) for name, member in draft.adapters.items()}
    return TakeSnapshot(
        id=check_snapshot_id(draft.id),
        step=check_step(draft.step),
        adapters=members,
        metadata=plain_json(dict(draft.metadata), "the snapshot's metadata"),
        files={check_snapshot_file(path): record for path, record in draft.files.items()},
    )


def _plan_member(name: str, member: SnapshotMember, state: State, put: Mapping[str, str]) -> SnapshotMember:
    wanted = member.version or put.get(name)
    if wanted is None:
        raise UsageError(
            f"the snapshot's member {name!r} has no version and is not put by this commit",
            remedy="name its version, or put it in the same commit",
        )
    live = {version.id for version in state.versions(name)}
    if wanted != put.get(name) and wanted not in live:
        raise NotInStoreError(
            f"the snapshot names {name}@{wanted}, which is not in the store",
            remedy=choices(wanted, live, noun="version"),
        )
    return replace(member, version=wanted, weight=float(member.weight))


def stage_file(blobs: Blobs, snapshot_id: str, path: str, data: Buffer) -> FileRecord:
    """Writes one file of a snapshot to come; no snapshot names it until a commit does."""
    key = f"snapshots/{check_snapshot_id(snapshot_id)}/{check_snapshot_file(path)}"
    blobs.write(key, data)
    return FileRecord(size=memoryview(data).nbytes, sha256=sha256(bytes(data)))


def staged_files(blobs: Blobs, snapshot_id: str) -> dict[str, FileRecord]:
    """What lies under a snapshot's folder, with sizes: for a draft whose caller kept no records."""
    stem = f"snapshots/{check_snapshot_id(snapshot_id)}/"
    return {info.key.removeprefix(stem): FileRecord(size=info.size) for info in blobs.list(stem)}


def read_file(blobs: Blobs, snapshot: Snapshot, path: str) -> bytes:
    """One file of a snapshot, checked against its record.

    Raises:
        NotInStoreError: the snapshot has no such file.
        ReplicaIncompleteError: it is named, but not there.
        DamagedError: it is not what was stored.
    """
    record = snapshot.files.get(path)
    if record is None:
        raise NotInStoreError(
            f"snapshot {snapshot.id} has no file {path!r}", remedy=choices(path, snapshot.files, noun="file")
        )
    key = f"{snapshot.directory}/{check_snapshot_file(path)}"
    data = blobs.read(key)
    if data is None:
        raise ReplicaIncompleteError(
            f"{blobs.url}/{key} is missing",
            why=f"snapshot {snapshot.id} names it",
            remedy="wait for the replication, or restore it from another store",
        )
    if len(data) != record.size or (record.sha256 and sha256(data) != record.sha256):
        raise DamagedError(
            f"{blobs.url}/{key} is not what was stored",
            why=f"{len(data)} bytes, {record.size} were recorded, or other bytes of that number",
            remedy="restore it from another store, or from an earlier snapshot",
        )
    return data
