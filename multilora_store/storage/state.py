"""State: what the journal says when it is folded; a frozen value, and the same for everyone who reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

from multilora_store.adapter import check_name, check_tag
from multilora_store.errors import StoreFormatError
from multilora_store.storage.changes import (
    Change,
    Delete,
    DropSnapshot,
    FileRecord,
    Import,
    Origin,
    Purge,
    Put,
    Signature,
    SnapshotMember,
    Tag,
    TakeSnapshot,
    Untag,
    check_directory,
    check_snapshot_id,
)
from multilora_store.storage.records import Fields, dump, parse, time_text

__all__ = ["AdapterState", "Fold", "Snapshot", "State", "Tombstone", "Version"]

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
STATE_FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One immutable saved state of one adapter, as the newest entry that put it says.

    Attributes:
        name: The adapter.
        id: `v` and 16 hex digits, from the content.
        digest: The full content digest (SHA-256, hex).
        directory: Where its files lie, below the root.
        seq: The entry that put it.
        time: When that entry was written, by its writer's clock (UTC, never before the entry ahead of it).
        record: SHA-256 of its `version.json`.
        nbytes: Bytes of its files.
        parents: References of the versions it was made from.
        recipe: How it was merged, if it was.
        base: The base's name, revision and layout fingerprint.
        step: The training step.
        signature: Who vouches for it; None: nobody.
    """

    name: str
    id: str
    digest: str
    directory: str
    seq: int
    time: datetime
    record: str
    nbytes: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()
    recipe: Mapping[str, Any] | None = None
    base: Mapping[str, Any] | None = None
    step: int | None = None
    signature: Signature | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.id}"

    def as_put(self) -> Put:
        """The change that puts this version."""
        return Put(
            name=self.name, id=self.id, sha256=self.digest, directory=self.directory, record=self.record,
            nbytes=self.nbytes, metadata=self.metadata, parents=self.parents, recipe=self.recipe,
            base=self.base, step=self.step, signature=self.signature,
        )  # fmt: skip

    @property
    def described(self) -> tuple[Any, ...]:
        """What its put says of it beside its content and its place."""
        return self.metadata, self.parents, self.recipe, self.base, self.step, self.signature

    @classmethod
    def from_put(cls, put: Put, seq: int, time: datetime) -> Version:
        return cls(
            name=put.name, id=put.id, digest=put.sha256, directory=put.directory, seq=seq, time=time,
            record=put.record, nbytes=put.nbytes, metadata=put.metadata, parents=put.parents,
            recipe=put.recipe, base=put.base, step=put.step, signature=put.signature,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One immutable record of a whole set.

    Attributes:
        adapters: By adapter name, in the set's order: its version's id, and how it was used.
        files: What lies under `snapshots/<id>/`, by path.
    """

    id: str
    step: int | None
    seq: int
    time: datetime
    adapters: Mapping[str, SnapshotMember]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        return f"snapshots/{self.id}"

    def as_change(self) -> TakeSnapshot:
        """The change that takes this snapshot."""
        return TakeSnapshot(
            id=self.id, step=self.step, adapters=self.adapters, metadata=self.metadata, files=self.files
        )

    def names(self, version: Version) -> bool:
        """Whether `version` belongs to the set."""
        member = self.adapters.get(version.name)
        return member is not None and member.version == version.id


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """One adapter: its live versions by id, oldest put first, and its tags."""

    versions: Mapping[str, Version] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def latest(self) -> Version | None:
        """The newest live put."""
        return next(reversed(self.versions.values()), None)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """A version that was deleted: by which entry, and where its files lay."""

    seq: int
    directory: str


@dataclass(frozen=True, kw_only=True)
class State:
    """The store after entry `seq`.

    Attributes:
        store_id: The store's own id.
        seq: The last entry that is folded in; 0 before the first.
        digest: What the next entry must name as `prev`.
        time: When entry `seq` was written.
        adapters: Every adapter that ever was, by name; one whose versions are all deleted has none.
        snapshots: Live snapshots by id, oldest first.
        deleted: Tombstones by (name, version id); a new put of the version removes its own.
        dropped: Snapshots that were dropped, by the entry that did.
        purged: Directories by the entry that purged them.
        origins: By another store's id (and scope), the point of its journal up to which this store has taken over.
    """

    store_id: str
    seq: int = 0
    digest: str = ""
    time: datetime = EPOCH
    adapters: Mapping[str, AdapterState] = field(default_factory=dict)
    snapshots: Mapping[str, Snapshot] = field(default_factory=dict)
    deleted: Mapping[tuple[str, str], Tombstone] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    purged: Mapping[str, int] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Adapters that have a live version, sorted."""
        return sorted(name for name, adapter in self.adapters.items() if adapter.versions)

    def versions(self, name: str) -> tuple[Version, ...]:
        """Live versions of `name`, oldest put first; empty if there is no such adapter."""
        adapter = self.adapters.get(name)
        return tuple(adapter.versions.values()) if adapter else ()

    def live(self) -> Iterable[Version]:
        """Every live version of every adapter."""
        return (version for adapter in self.adapters.values() for version in adapter.versions.values())

    def holding(self, digest: str) -> Version | None:
        """A live version with this content, of any adapter, whose files new puts may share."""
        return self._by_digest.get(digest)

    @cached_property
    def _by_digest(self) -> dict[str, Version]:
        return {v.digest: v for v in self.live() if v.directory not in self.purged}

    def directories(self) -> set[str]:
        """Every folder that the state names: of live versions and of live snapshots."""
        return {v.directory for v in self.live()} | {s.directory for s in self.snapshots.values()}

    def to_bytes(self) -> bytes:
        """The bytes of a checkpoint: a function of the state alone."""
        adapters = {
            name: {"versions": [_spell_version(v) for v in a.versions.values()], "tags": dict(a.tags)}
            for name, a in self.adapters.items()
        }
        snapshots = [
            {**s.as_change().to_json(), "seq": s.seq, "time": time_text(s.time)} for s in self.snapshots.values()
        ]
        deleted = [
            {"name": name, "id": identity, "seq": stone.seq, "directory": stone.directory}
            for (name, identity), stone in sorted(self.deleted.items())
        ]
        return dump({
            "state_format": STATE_FORMAT, "store": self.store_id, "seq": self.seq, "digest": self.digest,
            "time": time_text(self.time), "adapters": adapters, "snapshots": snapshots, "deleted": deleted,
            "dropped": dict(self.dropped), "purged": dict(self.purged),
            "origins": [o.to_json() for _, o in sorted(self.origins.items())],
        })  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> State:
        """Reads a checkpoint.

        Raises:
            StoreFormatError: written in a newer form.
            DamagedError: anything in it that is not what it should be.
        """
        fields = parse(data, where)
        if fields.whole("state_format") != STATE_FORMAT:
            raise StoreFormatError(
                f"{where} has a form that this version does not know", remedy="update multilora_store"
            )
        snapshots = [_read_snapshot(row) for row in fields.rows("snapshots")]
        origins = [Origin.read(row) for row in fields.rows("origins")]
        deleted = {
            (row.checked("name", check_name), row.version_id("id")): Tombstone(
                seq=row.whole("seq"), directory=row.checked("directory", check_directory)
            )
            for row in fields.rows("deleted")
        }
        dropped = Fields(fields.mapping("dropped"), f"{where} dropped")
        purged = Fields(fields.mapping("purged"), f"{where} purged")
        return cls(
            store_id=fields.text("store", longest=64),
            seq=fields.whole("seq"),
            digest=fields.digest("digest"),
            time=fields.moment("time"),
            adapters={
                name: _read_adapter(name, row)
                for name, row in zip(
                    fields.inner("adapters").keys(check_name), fields.inners("adapters").values(), strict=True
                )
            },
            snapshots={snapshot.id: snapshot for snapshot in snapshots},
            deleted=deleted,
            dropped={identity: dropped.whole(identity) for identity in dropped.keys(check_snapshot_id)},
            purged={path: purged.whole(path) for path in purged.keys(check_directory)},
            origins={origin.key: origin for origin in origins},
        )


def _spell_version(version: Version) -> dict[str, Any]:
    return {**version.as_put().to_json(), "seq": version.seq, "time": time_text(version.time)}


def _read_version(fields: Fields) -> Version:
    return Version.from_put(Put.read(fields), fields.whole("seq"), fields.moment("time"))


def _read_adapter(name: str, fields: Fields) -> AdapterState:
    versions = [_read_version(row) for row in fields.rows("versions")]
    for version in versions:
        if version.name != name:
            fields.refuse("versions", version.name, f"a version of {name}")
    by_id = {version.id: version for version in versions}
    tags = Fields(fields.mapping("tags"), f"{fields.where} tags")
    for tag in tags.keys(check_tag):
        if tags.version_id(tag) not in by_id:
            tags.refuse(tag, tags.data[tag], "a live version")
    return AdapterState(versions=by_id, tags=dict(tags.data))


def _read_snapshot(fields: Fields) -> Snapshot:
    taken = TakeSnapshot.read(fields)
    return Snapshot(
        id=taken.id, step=taken.step, seq=fields.whole("seq"), time=fields.moment("time"),
        adapters=taken.adapters, metadata=taken.metadata, files=taken.files,
    )  # fmt: skip


class Fold:
    """Folds changes into a state: copies it once, changes the copy, and hands out a new frozen state.

    Folding judges nothing: whether a change was allowed was decided by its writer. A change whose object
    is gone does nothing, so that any journal that could be written can be read.
    """

    def __init__(self, state: State) -> None:
        self._base = state
        self._adapters = dict(state.adapters)
        self._opened: dict[str, tuple[dict[str, Version], dict[str, str]]] = {}
        self._snapshots = dict(state.snapshots)
        self._deleted = dict(state.deleted)
        self._dropped = dict(state.dropped)
        self._purged = dict(state.purged)
        self._origins = dict(state.origins)

    def apply(self, change: Change, seq: int, time: datetime) -> None:
        """Folds one change of entry `seq`."""
        match change:
            case Put():
                versions, _ = self._open(change.name)
                versions.pop(change.id, None)  # a second put makes it the newest again
                versions[change.id] = Version.from_put(change, seq, time)
                self._deleted.pop((change.name, change.id), None)
            case Tag():
                versions, tags = self._open(change.name)
                if change.id in versions:
                    tags[change.tag] = change.id
            case Untag():
                self._open(change.name)[1].pop(change.tag, None)
            case Delete():
                self._delete(change, seq)
            case TakeSnapshot():
                self._snapshots[change.id] = Snapshot(
                    id=change.id, step=change.step, seq=seq, time=time,
                    adapters=change.adapters, metadata=change.metadata, files=change.files,
                )  # fmt: skip
                self._dropped.pop(change.id, None)
            case DropSnapshot():
                if self._snapshots.pop(change.id, None) is not None:
                    self._dropped[change.id] = seq
            case Purge():
                self._purged.update((directory, seq) for directory in change.directories)
            case Import():
                for inner in change.changes:
                    self.apply(inner, seq, time)
                self._origins[change.origin.key] = replace(change.origin, at=seq)

    def finish(self, seq: int, digest: str, time: datetime) -> State:
        """The state after entry `seq`, whose digest and time these are."""
        for name, (versions, tags) in self._opened.items():
            self._adapters[name] = AdapterState(versions=versions, tags=tags)
        return State(
            store_id=self._base.store_id, seq=seq, digest=digest, time=time,
            adapters=self._adapters, snapshots=self._snapshots, deleted=self._deleted,
            dropped=self._dropped, purged=self._purged, origins=self._origins,
        )  # fmt: skip

    def _delete(self, change: Delete, seq: int) -> None:
        versions, tags = self._open(change.name)
        version = versions.pop(change.id, None)
        if version is None:
            return
        self._deleted[change.name, change.id] = Tombstone(seq=seq, directory=version.directory)
        for tag in [tag for tag, identity in tags.items() if identity == change.id]:
            del tags[tag]

    def _open(self, name: str) -> tuple[dict[str, Version], dict[str, str]]:
        if name not in self._opened:
            adapter = self._adapters.get(name, AdapterState())
            self._opened[name] = (dict(adapter.versions), dict(adapter.tags))
        return self._opened[name]
