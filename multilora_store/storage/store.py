"""The store: adapters, versions and snapshots under one root."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilora_store.adapter import AdapterConfig, Ref, TensorInfo, check_name, check_new_name, check_tag
from multilora_store.errors import (
    ConflictError,
    NotInStoreError,
    ProtectedError,
    UsageError,
    choices,
)
from multilora_store.storage import snapshots as snapshot_files
from multilora_store.storage.blobs import Blobs, Buffer, open_blobs
from multilora_store.storage.cache import VersionCache
from multilora_store.storage.changes import Change, Delete, DropSnapshot, FileRecord, Tag, Untag
from multilora_store.storage.entries import Entry
from multilora_store.storage.journal import Journal
from multilora_store.storage.progress import Listener, Meter
from multilora_store.storage.puts import (
    Source,
    StagedPut,
    build_contents,
    check_tags,
    make_put,
    plan_directory,
    restage,
    upload,
)
from multilora_store.storage.reading import StoredFiles
from multilora_store.storage.refs import find_snapshot, resolve
from multilora_store.storage.snapshots import SnapshotDraft, plan_snapshot
from multilora_store.storage.state import Snapshot, State, Version

if TYPE_CHECKING:
    import torch

    from multilora_store.storage.gc import GcReport
    from multilora_store.storage.verify import VerifyReport

__all__ = ["Commit", "Store", "StoredAdapter", "open_store"]

_FRESH: float = 2.0


def open_store(url: str | os.PathLike[str], *, cache: bool = True, **storage_options: Any) -> Store:
    """The store at `url`: a folder, `memory://...`, or any fsspec URL. Does no I/O.

    Args:
        url: The root. Writing makes it a store; reading a root that is none raises StoreNotFoundError.
        cache: Whether versions of a remote store are kept on this machine (needed for `path`).
        storage_options: For the storage's driver; see `ObjectBlobs` for s3, gs and az.

    Raises:
        UsageError: an unknown scheme, or options that it does not take.
    """
    return Store(open_blobs(url, **storage_options), cache=VersionCache() if cache else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    """One version as it is read.

    Attributes:
        tensors: By name, made when asked for; a private view of the file, so it can be written to without harm.
        infos: Dtype, shape and recorded SHA-256 of every tensor, without reading one.
    """

    name: str
    version: Version
    config: AdapterConfig
    tensors: Mapping[str, torch.Tensor]
    infos: Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What one commit made: its versions by adapter name, its snapshot if it took one, its entry's number."""

    versions: Mapping[str, Version]
    snapshot: Snapshot | None
    seq: int


class Store:
    """Adapters under one root. Safe to share between threads, to pickle, and to use after a fork."""

    def __init__(self, blobs: Blobs, *, cache: VersionCache | None = None) -> None:
        self.blobs = blobs
        self.journal = Journal(blobs)
        self.files = StoredFiles(blobs, cache)

    @property
    def url(self) -> str:
        """The root, free of secrets."""
        return self.blobs.url

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    # Writing.

    def put(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        config: AdapterConfig | Mapping[str, Any],
        *,
        parents: Sequence[str | Version] = (),
        metadata: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        base: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
        step: int | None = None,
        files: Mapping[str, Buffer] | None = None,
        allow_nonfinite: bool = False,
    ) -> Version:
        """Saves one version of `name`; content that the store holds already is not written again.

        Args:
            name: The adapter.
            tensors: Whole, dense tensors by canonical name, on any device.
            config: The adapter's configuration.
            parents: The versions that it was made from.
            metadata, base, recipe, step: Recorded in the journal, beside the content.
            tags: Tags to set on it in the same entry.
            files: The bytes of `adapter_config.json` and `adapter_model.safetensors`, to be kept as they are;
                `tensors` may then be empty.
            allow_nonfinite: Stores NaN and infinities too.

        Raises:
            NameNotAllowedError, UsageError, ConfigError: what was given cannot be stored; nothing was written.
            StorageError: the storage failed; what was there before is still there.
        """
        staged = self.stage(
            name, tensors, config, parents=parents, metadata=metadata, tags=tags, base=base, recipe=recipe,
            step=step, files=files, allow_nonfinite=allow_nonfinite,
        )  # fmt: skip
        return self.commit([staged]).versions[name]

    def stage(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        config: AdapterConfig | Mapping[str, Any],
        *,
        parents: Sequence[str | Version] = (),
        metadata: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        base: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
        step: int | None = None,
        files: Mapping[str, Buffer] | None = None,
        allow_nonfinite: bool = False,
    ) -> StagedPut:
        """Uploads what `put` would, unless the store holds it, and leaves the entry to a later `commit`."""
        check_name(name)
        parsed = config if isinstance(config, AdapterConfig) else AdapterConfig.parse(config, where=f"config of {name}")
        source = Source(tensors=tensors, config=parsed, files=files)
        contents = build_contents(source, name, allow_nonfinite=allow_nonfinite)
        self.journal.make_store()
        state = self.journal.state(max_age=_FRESH)
        check_new_name(name, state.adapters)
        placed = plan_directory(state, name, contents)
        put = make_put(
            name, contents, placed, parents=[self._parent(p) for p in parents], metadata=metadata, base=base,
            recipe=recipe, step=step,
        )  # fmt: skip
        staged = StagedPut(put=put, tags=check_tags(tags), uploaded=placed[3], source=source)
        if staged.uploaded:
            upload(self.blobs, put.directory, contents)
        return staged

    def stage_many(
        self, requests: Sequence[Mapping[str, Any]], *, threads: int = 4, progress: Listener | None = None
    ) -> list[StagedPut]:
        """Stages several adapters side by side: while one is flushed to the storage, others are hashed.

        Args:
            requests: The arguments of `stage`, one mapping for each adapter.
            threads: How many are at work at once.
            progress: Called after each adapter.

        Returns:
            What `stage` returns for each, in the given order. If one fails, its error is raised after the others end.
        """
        self.journal.make_store()
        sizes = [_size(request) for request in requests] if progress is not None else [0] * len(requests)
        meter = Meter(progress, files=len(requests), nbytes=sum(sizes))

        def stage(request: Mapping[str, Any], size: int) -> StagedPut:
            staged = self.stage(**request)
            meter.add(size)
            return staged

        with ThreadPoolExecutor(max(1, threads)) as pool:
            return [done.result() for done in [pool.submit(stage, *one) for one in zip(requests, sizes, strict=True)]]

    def commit(
        self,
        puts: Sequence[StagedPut],
        *,
        snapshot: SnapshotDraft | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Commit:
        """Makes everything given true in one entry: all of it or none.

        Args:
            puts: Staged here or by other processes, at most one for each adapter.
            snapshot: A snapshot of the set, taken with them.
            tags: By adapter name, one more tag for the version that is put.

        Raises:
            ConflictError: others kept winning, or staged files were purged and cannot go up again from here.
            ExistsError, NotInStoreError, NameNotAllowedError: what the newest state does not allow.
        """
        names = [staged.name for staged in puts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"{twice[0]} is put twice in one commit", remedy="commit one version of each adapter")
        strays = sorted(set(tags or {}) - set(names))
        if strays:
            raise UsageError(f"the tag for {strays[0]} has no put in this commit", remedy=choices(strays[0], names))
        if snapshot is not None and not snapshot.files:
            snapshot = replace(snapshot, files=snapshot_files.staged_files(self.blobs, snapshot.id))

        def decide(state: State) -> list[Change]:
            known = dict.fromkeys(state.adapters)
            changes: list[Change] = []
            for staged in puts:
                known[check_new_name(staged.name, known)] = None
                changes.append(restage(self.blobs, staged, state).put)
            for staged in puts:
                wanted = [*staged.tags, *([check_tag(tags[staged.name])] if tags and staged.name in tags else [])]
                changes += [Tag(name=staged.name, tag=tag, id=staged.id) for tag in wanted]
            if snapshot is not None:
                changes.append(plan_snapshot(snapshot, state, {staged.name: staged.id for staged in puts}))
            return changes

        state = self.journal.commit(decide).state
        return Commit(
            versions={staged.name: state.adapters[staged.name].versions[staged.id] for staged in puts},
            snapshot=None if snapshot is None else state.snapshots[snapshot.id],
            seq=state.seq,
        )

    def tag(self, ref: str | Ref, tag: str) -> Version:
        """Points `tag` at the version that `ref` names now; a tag that exists moves."""
        check_tag(tag)
        version = self.resolve(ref)

        def decide(state: State) -> list[Change]:
            self._still_live(state, version)
            return [Tag(name=version.name, tag=tag, id=version.id)]

        self._existing().commit(decide)
        return version

    def untag(self, name: str, tag: str) -> None:
        """Removes `tag` from adapter `name`; the version that it named stays.

        Raises:
            NotInStoreError: there is no such tag.
        """
        check_name(name)

        def decide(state: State) -> list[Change]:
            tags = state.adapters[name].tags if name in state.adapters else {}
            if tag not in tags:
                raise NotInStoreError(f"{name} has no tag {tag!r} in {self.url}", remedy=choices(tag, tags, noun="tag"))
            return [Untag(name=name, tag=tag)]

        self._existing().commit(decide)

    def delete(self, ref: str | Ref) -> Version:
        """Deletes the version that `ref` names; its files stay until a gc.

        A tag in `ref` itself goes along; any other tag, and any snapshot, that names the version protects it.

        Raises:
            ProtectedError: a tag or a snapshot names it.
        """
        wanted = Ref.parse(ref) if isinstance(ref, str) else ref
        version = self.resolve(wanted)
        given = {wanted.selector} if wanted.kind == "tag" else set()

        def decide(state: State) -> list[Change]:
            self._still_live(state, version)
            _refuse_held(str(version), _holders(state, version, given), version=version.id)
            tags = state.adapters[version.name].tags
            untags: list[Change] = [
                Untag(name=version.name, tag=tag) for tag in sorted(tags) if tags[tag] == version.id
            ]
            return [*untags, Delete(name=version.name, id=version.id)]

        self._existing().commit(decide)
        return version

    def delete_all(self, name: str) -> list[Version]:
        """Deletes every version of `name` in one entry; their files stay until a gc.

        Returns:
            The versions that were live, oldest put first.

        Raises:
            NotInStoreError: there is no such adapter.
            ProtectedError: a tag or a snapshot names one of them; all of them stay.
        """
        gone = self.versions(name)

        def decide(state: State) -> list[Change]:
            gone[:] = state.versions(name)  # what came meanwhile goes too
            if not gone:
                raise ConflictError(f"{name} was deleted while this was decided", name=name)
            holders = [f"{holder} ({each.id})" for each in gone for holder in _holders(state, each)]
            _refuse_held(f"{name} with its {len(gone)} versions", holders, name=name)
            return [Delete(name=name, id=each.id) for each in gone]

        self._existing().commit(decide)
        return gone

    def drop_snapshot(self, snapshot_id: str) -> Snapshot:
        """Drops a snapshot; versions that only it protected may then be deleted."""
        snapshot = self.snapshot(snapshot_id)

        def decide(state: State) -> list[Change]:
            find_snapshot(state, snapshot.id, self.url)
            return [DropSnapshot(id=snapshot.id)]

        self._existing().commit(decide)
        return snapshot

    def stage_snapshot_file(self, snapshot_id: str, path: str, data: Buffer) -> FileRecord:
        """Uploads one file of a snapshot to come (`optimizer/a.safetensors`, `state.json`, `extra/x`).

        Returns:
            Its size and SHA-256, for `SnapshotDraft.files`.
        """
        self.journal.make_store()
        return snapshot_files.stage_file(self.blobs, snapshot_id, path, data)

    def new_snapshot_id(self) -> str:
        """An id that no other snapshot has."""
        return snapshot_files.new_snapshot_id()

    # Reading.

    def state(self) -> State:
        """Everything the store says now, as one frozen value."""
        return self.journal.state()

    def names(self) -> list[str]:
        """Adapters that have a version, sorted."""
        return self.state().names()

    def versions(self, name: str) -> list[Version]:
        """Versions of `name`, oldest put first.

        Raises:
            NotInStoreError: there is no such adapter.
        """
        state = self.state()
        found = state.versions(check_name(name))
        if not found:
            raise NotInStoreError(
                f"no adapter {name!r} in {self.url}", remedy=choices(name, state.names(), noun="adapter"), name=name
            )
        return list(found)

    def tags(self, name: str) -> dict[str, str]:
        """Version ids of `name` by tag."""
        adapter = self.state().adapters.get(check_name(name))
        return dict(adapter.tags) if adapter else {}

    def resolve(self, ref: str | Ref) -> Version:
        """The one version that `ref` names now.

        Raises:
            NotInStoreError: there is none; the error lists what there is.
            PurgedError: there was one, and a gc freed it.
        """
        wanted = Ref.parse(ref) if isinstance(ref, str) else ref
        return resolve(self.state(), wanted, self.url, at=self.journal.state_at_moment)

    def get(self, ref: str | Ref | Version) -> StoredAdapter:
        """Reads one version: its configuration now, its tensors when asked for, all checked.

        Raises:
            DamagedError: the files are not what was stored.
            ReplicaIncompleteError: they have not arrived yet.
        """
        version = ref if isinstance(ref, Version) else self.resolve(ref)
        record, config, tensors = self.files.open(version)
        return StoredAdapter(name=version.name, version=version, config=config, tensors=tensors, infos=record.tensors)

    def path(self, ref: str | Ref | Version) -> Path:
        """A local PEFT directory with the version's files, fetched if need be and checked."""
        version = ref if isinstance(ref, Version) else self.resolve(ref)
        return self.files.folder(version)

    def log(self) -> list[Entry]:
        """Every entry of the journal, oldest first."""
        self.journal.marker  # noqa: B018  (a root that is no store is an error, not an empty list)
        return self.journal.entries()

    def snapshots(self) -> list[Snapshot]:
        """Snapshots, oldest first."""
        return sorted(self.state().snapshots.values(), key=lambda snapshot: snapshot.seq)

    def snapshot(self, wanted: str = "latest") -> Snapshot:
        """One snapshot, by its id, a unique beginning of it, or `latest`.

        Raises:
            NotInStoreError: there is none.
        """
        return find_snapshot(self.state(), wanted, self.url)

    def snapshot_files(self, snapshot: Snapshot) -> list[str]:
        """Paths of the snapshot's own files, sorted."""
        return sorted(snapshot.files)

    def read_snapshot_file(self, snapshot: Snapshot, path: str) -> bytes:
        """One of the snapshot's own files, checked."""
        return snapshot_files.read_file(self.blobs, snapshot, path)

    def verify(
        self,
        ref: str | Ref | None = None,
        *,
        deep: bool = True,
        threads: int = 4,
        progress: Listener | None = None,
    ) -> VerifyReport:
        """Checks stored files against their records; see `storage.verify`."""
        from multilora_store.storage.verify import verify

        return verify(self, ref, deep=deep, threads=threads, progress=progress)

    def gc(self, *, grace: timedelta = timedelta(days=1), dry_run: bool = False) -> GcReport:
        """Frees what nothing names any more; see `storage.gc`."""
        from multilora_store.storage.gc import gc

        return gc(self, grace=grace, dry_run=dry_run)

    def _existing(self) -> Journal:
        """The journal of a store that exists; a change of what is there must not make a new store."""
        self.journal.marker  # noqa: B018
        return self.journal

    def _parent(self, parent: str | Version) -> str:
        return str(parent if isinstance(parent, Version) else self.resolve(parent))

    def _still_live(self, state: State, version: Version) -> None:
        if version.name not in state.adapters or version.id not in state.adapters[version.name].versions:
            raise ConflictError(
                f"{version} was deleted while this was decided", remedy="name another version", version=version.id
            )


def _size(request: Mapping[str, Any]) -> int:
    """Bytes of what `stage` is asked to store."""
    if request.get("files"):
        return sum(memoryview(data).nbytes for data in request["files"].values())
    return sum(tensor.nbytes for tensor in request["tensors"].values())


def _holders(state: State, version: Version, given: Collection[str] = ()) -> list[str]:
    """The tags but for `given`, and the snapshots, that name a version."""
    tags = state.adapters[version.name].tags
    holders = sorted(f"tag {tag}" for tag, identity in tags.items() if identity == version.id and tag not in given)
    return holders + [f"snapshot {snapshot.id}" for snapshot in state.snapshots.values() if snapshot.names(version)]


def _refuse_held(what: str, holders: Sequence[str], **facts: str) -> None:
    if holders:
        raise ProtectedError(
            f"{what} is named by {', '.join(holders[:5])}",
            why=f"and by {len(holders) - 5} more" if len(holders) > 5 else "",
            remedy="untag it and drop those snapshots first",
            holders=list(holders),
            **facts,
        )
