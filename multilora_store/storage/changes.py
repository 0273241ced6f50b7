"""Changes: what one commit can do, as frozen values with one spelling in JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

from multilora_store.adapter import check_name, check_tag, version_id
from multilora_store.errors import DamagedError, StoreFormatError
from multilora_store.storage.records import Fields

__all__ = [
    "Change",
    "Delete",
    "DropSnapshot",
    "FileRecord",
    "Import",
    "Origin",
    "Purge",
    "Put",
    "Signature",
    "SnapshotMember",
    "Tag",
    "TakeSnapshot",
    "Untag",
    "check_directory",
    "check_snapshot_file",
    "check_snapshot_id",
    "is_of_version",
    "read_change",
]

_DIRECTORY: Final = re.compile(r"adapters/([A-Za-z0-9_.-]+)/(v[0-9a-f]{16})-([a-z0-9]{6,12})", re.ASCII)
_SNAPSHOT_DIRECTORY: Final = re.compile(r"snapshots/([0-9A-Za-z][0-9A-Za-z_-]{0,63})", re.ASCII)
_SNAPSHOT_ID: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}", re.ASCII)
_SNAPSHOT_FILE: Final = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9_.=+@%~-]*(/[A-Za-z0-9_][A-Za-z0-9_.=+@%~-]*){0,7}", re.ASCII
)


def check_directory(path: str) -> str:
    """Returns `path` if it is the folder of a version, `adapters/<name>/<id>-<attempt>`, or of a snapshot.

    Raises:
        DamagedError: anything else; it could lead out of the root.
    """
    if _SNAPSHOT_DIRECTORY.fullmatch(path):
        return path
    found = _DIRECTORY.fullmatch(path)
    if found is None or found[1].strip(".") == "":
        raise DamagedError(
            f"{path[:120]!r} is not the folder of a version", remedy="the record was not written by this library"
        )
    return path


def is_of_version(key: str) -> bool:
    """Whether a file with this key lies in the folder of a version: its root is a store, or will be one."""
    return _DIRECTORY.fullmatch(key.rpartition("/")[0]) is not None


def check_snapshot_id(text: str) -> str:
    """Returns `text` if it may be a snapshot's id.

    Raises:
        DamagedError: it may not.
    """
    if not _SNAPSHOT_ID.fullmatch(text):
        raise DamagedError(
            f"{text[:80]!r} is not a snapshot's id", remedy="an id is up to 64 letters, digits, '_' and '-'"
        )
    return text


def check_snapshot_file(path: str) -> str:
    """Returns `path` if it may be a file of a snapshot: relative, plain, at most eight segments.

    Raises:
        DamagedError: it may not.
    """
    if len(path) > 400 or not _SNAPSHOT_FILE.fullmatch(path):
        raise DamagedError(
            f"{path[:120]!r} may not be a file of a snapshot",
            remedy="relative paths of plain segments, such as optimizer/a.safetensors or extra/scheduler.json",
        )
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size in bytes and SHA-256 (hex; empty where only the size is known) of one file."""

    size: int
    sha256: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"size": self.size, "sha256": self.sha256} if self.sha256 else {"size": self.size}

    @classmethod
    def read(cls, fields: Fields) -> FileRecord:
        return cls(size=fields.whole("size"), sha256="" if "sha256" not in fields.data else fields.digest("sha256"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Who vouches for a put: the id of an ed25519 key, and the signature in base64; see `storage.signing`."""

    key: str
    value: str

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value}

    @classmethod
    def read(cls, fields: Fields) -> Signature:
        return cls(key=fields.text("key", longest=64), value=fields.text("value", longest=256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """A new version of `name`; its files lie in `directory` already.

    Attributes:
        id: The version's id, from its content.
        sha256: The full content digest that the id abbreviates.
        directory: `adapters/<name>/<id>-<attempt>`, of this adapter or of another one with equal content.
        record: SHA-256 of the bytes of `version.json` there.
        nbytes: Bytes of all files there.
        signature: Who vouches for what it claims; None: nobody.
    """

    verb: ClassVar[str] = "put"
    name: str
    id: str
    sha256: str
    directory: str
    record: str
    nbytes: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()
    recipe: Mapping[str, Any] | None = None
    base: Mapping[str, Any] | None = None
    step: int | None = None
    signature: Signature | None = None

    def to_json(self) -> dict[str, Any]:
        signature = None if self.signature is None else self.signature.to_json()
        optional = {"recipe": self.recipe, "base": self.base, "step": self.step, "signature": signature}
        return {
            "name": self.name, "id": self.id, "sha256": self.sha256, "directory": self.directory,
            "record": self.record, "nbytes": self.nbytes, "metadata": dict(self.metadata),
            "parents": list(self.parents), **{key: value for key, value in optional.items() if value is not None},
        }  # fmt: skip

    @classmethod
    def read(cls, fields: Fields) -> Put:
        digest, identity = fields.digest("sha256"), fields.version_id("id")
        directory = fields.checked("directory", check_directory)
        if version_id(digest) != identity:
            fields.refuse("id", identity, f"{version_id(digest)}, the start of its digest,")
        if f"/{identity}-" not in directory:
            fields.refuse("directory", directory, f"a folder of {identity}")
        return cls(
            name=fields.checked("name", check_name), id=identity, sha256=digest, directory=directory,
            record=fields.digest("record"), nbytes=fields.whole("nbytes"), metadata=fields.free("metadata"),
            parents=fields.texts("parents", default=[]), recipe=fields.optional_free("recipe"),
            base=fields.optional_free("base"), step=fields.optional_whole("step"),
            signature=None if "signature" not in fields.data else Signature.read(fields.inner("signature")),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """`tag` of `name` points to version `id` from now on."""

    verb: ClassVar[str] = "tag"
    name: str
    tag: str
    id: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "tag": self.tag, "id": self.id}

    @classmethod
    def read(cls, fields: Fields) -> Tag:
        return cls(
            name=fields.checked("name", check_name), tag=fields.checked("tag", check_tag), id=fields.version_id("id")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Untag:
    """`tag` of `name` is gone."""

    verb: ClassVar[str] = "untag"
    name: str
    tag: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "tag": self.tag}

    @classmethod
    def read(cls, fields: Fields) -> Untag:
        return cls(name=fields.checked("name", check_name), tag=fields.checked("tag", check_tag))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Version `id` of `name` is gone from the state; its files stay until a purge."""

    verb: ClassVar[str] = "delete"
    name: str
    id: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "id": self.id}

    @classmethod
    def read(cls, fields: Fields) -> Delete:
        return cls(name=fields.checked("name", check_name), id=fields.version_id("id"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMember:
    """One adapter of a set: which version, and how it was used.

    `version` is the version's id; None in a draft means the version that the same commit puts.
    """

    active: bool = True
    trainable: bool = False
    weight: float = 1.0
    version: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"version": self.version, "active": self.active, "trainable": self.trainable, "weight": self.weight}

    @classmethod
    def read(cls, fields: Fields) -> SnapshotMember:
        return cls(
            version=fields.version_id("version"),
            active=fields.flag("active", default=True),
            trainable=fields.flag("trainable", default=False),
            weight=fields.number("weight", default=1.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """One version for every adapter of a set, and the files of optimizer and trainer that belong to it."""

    verb: ClassVar[str] = "snapshot"
    id: str
    step: int | None
    adapters: Mapping[str, SnapshotMember]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        # A list, not an object: the order of the set is the manifest's, and records are written with sorted keys.
        members = [{"name": name, **member.to_json()} for name, member in self.adapters.items()]
        files = {path: record.to_json() for path, record in self.files.items()}
        step = {} if self.step is None else {"step": self.step}
        return {"id": self.id, **step, "adapters": members, "metadata": dict(self.metadata), "files": files}

    @classmethod
    def read(cls, fields: Fields) -> TakeSnapshot:
        members: dict[str, SnapshotMember] = {}
        for row in fields.rows("adapters"):
            name = row.checked("name", check_name)
            if name in members:
                row.refuse("name", name, "a name that stands in the set once")
            members[name] = SnapshotMember.read(row)
        return cls(
            id=fields.checked("id", check_snapshot_id),
            step=fields.optional_whole("step"),
            adapters=members,
            metadata=fields.free("metadata"),
            files={
                path: FileRecord.read(row)
                for path, row in zip(
                    fields.inner("files").keys(check_snapshot_file), fields.inners("files").values(), strict=True
                )
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DropSnapshot:
    """Snapshot `id` is gone; what only it protected may be deleted."""

    verb: ClassVar[str] = "drop snapshot"
    id: str

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id}

    @classmethod
    def read(cls, fields: Fields) -> DropSnapshot:
        return cls(id=fields.checked("id", check_snapshot_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Purge:
    """The files in `directories` may be removed: what is named here never resolves again."""

    verb: ClassVar[str] = "purge"
    directories: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"directories": list(self.directories)}

    @classmethod
    def read(cls, fields: Fields) -> Purge:
        return cls(directories=tuple(check_directory(path) for path in fields.texts("directories")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where an import came from: a store, and the entry that its state was read at.

    Attributes:
        store: The other store's id.
        seq: Its entry.
        digest: That entry's digest.
        scope: Which part was taken over, as a digest of the selection; empty: everything.
        delete: Whether deletions were taken over as well.
        at: The entry of this store that took it over; known once that entry is folded.
    """

    store: str
    seq: int
    digest: str
    scope: str = ""
    delete: bool = False
    at: int = 0

    @property
    def key(self) -> str:
        """What a state keeps the newest origin under: the store and the scope."""
        return f"{self.store}/{self.scope}" if self.scope else self.store

    def to_json(self) -> dict[str, Any]:
        optional = {"scope": self.scope, "delete": self.delete, "at": self.at}
        return {
            "store": self.store, "seq": self.seq, "digest": self.digest,
            **{key: value for key, value in optional.items() if value},
        }  # fmt: skip

    @classmethod
    def read(cls, fields: Fields) -> Origin:
        return cls(
            store=fields.text("store", longest=64),
            seq=fields.whole("seq"),
            digest=fields.digest("digest"),
            scope=fields.text("scope", default="", longest=64),
            delete=fields.flag("delete", default=False),
            at=fields.whole("at", default=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """A sync from another store: its changes, which happen together, and the point it brings this store to."""

    verb: ClassVar[str] = "import"
    origin: Origin
    changes: tuple[Change, ...]

    def to_json(self) -> dict[str, Any]:
        return {"origin": self.origin.to_json(), "changes": [spell(change) for change in self.changes]}

    @classmethod
    def read(cls, fields: Fields) -> Import:
        inner = tuple(read_change(row) for row in fields.rows("changes"))
        if any(isinstance(change, Import) for change in inner):
            fields.refuse("changes", "import", "changes other than an import")
        return cls(origin=Origin.read(fields.inner("origin")), changes=inner)


Change: TypeAlias = Put | Tag | Untag | Delete | TakeSnapshot | DropSnapshot | Purge | Import

_READERS: Final[dict[str, Callable[[Fields], Change]]] = {
    kind.verb: kind.read for kind in (Put, Tag, Untag, Delete, TakeSnapshot, DropSnapshot, Purge, Import)
}


def spell(change: Change) -> dict[str, Any]:
    """The change as it stands in an entry."""
    return {"change": change.verb, **change.to_json()}


def spell_all(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """The changes as they stand in an entry."""
    return [spell(change) for change in changes]


def read_change(fields: Fields) -> Change:
    """Reads one change of an entry, whatever it claims to be.

    Raises:
        StoreFormatError: a change that this version does not know.
        DamagedError: a known change with a field that is missing or hostile.
    """
    verb = fields.text("change", longest=64)
    reader = _READERS.get(verb)
    if reader is None:
        raise StoreFormatError(
            f"{fields.where} holds a change {verb!r} that this version does not know",
            why=f"known: {', '.join(sorted(_READERS))}",
            remedy="the store was written by a newer multilora_store; install that",
            change=verb,
        )
    return reader(fields)
