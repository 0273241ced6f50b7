"""The store: adapters, versions and snapshots under one root, and how new ones come into it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

from multilora_store.adapter import AdapterConfig, Ref, check_name, check_new_name, check_tag
from multilora_store.errors import UsageError, choices
from multilora_store.storage import snapshots as snapshot_files
from multilora_store.storage.arguments import as_mapping, as_several, of_type
from multilora_store.storage.blobs import Blobs, Buffer, Sent, open_blobs
from multilora_store.storage.cache import VersionCache
from multilora_store.storage.changes import Change, FileRecord, Tag
from multilora_store.storage.changing import ChangingStore
from multilora_store.storage.journal import Journal
from multilora_store.storage.progress import Listener, Meter
from multilora_store.storage.puts import (
    Source,
    StagedPut,
    build_contents,
    is_latest,
    make_put,
    plan_directory,
    restage,
    upload,
)
from multilora_store.storage.reading import StoredFiles
from multilora_store.storage.signing import Signer, TrustedKeys
from multilora_store.storage.snapshots import SnapshotDraft, plan_snapshot
from multilora_store.storage.state import Snapshot, State, Version
from multilora_store.storage.view import StoredAdapter

if TYPE_CHECKING:
    import torch

__all__ = ["Commit", "PutOptions", "Store", "StoredAdapter", "open_store"]

_FRESH: float = 2.0


def open_store(
    url: str | os.PathLike[str],
    *,
    cache: bool = True,
    signing_key: str | os.PathLike[str] | None = None,
    trusted_keys: Iterable[str | os.PathLike[str]] | TrustedKeys | None = None,
    **storage_options: Any,
) -> Store:
    """The store at `url`: a folder, `memory://...`, or any fsspec URL. Does no I/O there.

    Args:
        url: The root. Writing makes it a store; reading a root that is none raises StoreNotFoundError.
        cache: Whether versions of a remote store are kept on this machine (needed for `path`).
        signing_key: Signs every put: a file with an ed25519 private key, or `env:NAME` of a variable with its text.
        trusted_keys: Files of ed25519 public keys; a version that none of them signed is not read.
        storage_options: For the storage's driver; see `ObjectBlobs` for s3, gs and az.

    Raises:
        UsageError: an unknown scheme, options that it does not take, or a key that is none.
    """
    return Store(
        open_blobs(url, **storage_options), cache=VersionCache() if cache else None,
        signing_key=signing_key, trusted_keys=TrustedKeys.of(trusted_keys),
    )  # fmt: skip


def as_store(given: StoreLike) -> Store:
    """The store itself, or the one at a URL.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(given, (str, os.PathLike)):
        return open_store(given)
    if not hasattr(given, "commit"):
        raise UsageError(f"the store is {given!r:.80}, of type {type(given).__name__}", remedy="give open_store(URL)")
    return given


StoreLike: TypeAlias = "Store | str | os.PathLike[str]"
"""A store, or the URL of one."""


class PutOptions(TypedDict, total=False):
    """What may be said of a put; see `Store.stage`."""

    parents: Sequence[str | Ref | Version]
    metadata: Mapping[str, Any] | None
    tags: Sequence[str]
    base: Mapping[str, Any] | None
    recipe: Mapping[str, Any] | None
    step: int | None
    files: Mapping[str, Buffer] | None
    allow_nonfinite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What one commit made: its versions by adapter name, its snapshot if it took one, its entry's number.

    Attributes:
        new: Whether there is a new entry; equal content that is said the same of, and is the latest, needs none.
    """

    versions: Mapping[str, Version]
    snapshot: Snapshot | None
    seq: int
    new: bool = True


class Store(ChangingStore):
    """Adapters under one root. Safe to share between threads, to pickle, and to use after a fork."""

    def __init__(
        self,
        blobs: Blobs,
        *,
        cache: VersionCache | None = None,
        signing_key: str | os.PathLike[str] | None = None,
        trusted_keys: TrustedKeys | None = None,
    ) -> None:
        self.blobs = blobs
        self.journal = Journal(blobs)
        self.files = StoredFiles(blobs, cache, trusted_keys)
        self._signer = Signer.of(signing_key)

    def put(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        config: AdapterConfig | Mapping[str, Any],
        **options: Unpack[PutOptions],
    ) -> Version:
        """Saves one version of `name`; content that the store holds already is not written again.

        Equal content of which the same is said, and which is the latest already, makes no entry either.

        Args:
            name, tensors, config, options: As for `stage`.

        Raises:
            NameNotAllowedError, UsageError, ConfigError: what was given cannot be stored; nothing was written.
            StorageError: the storage failed; what was there before is still there.
        """
        return self.commit([self.stage(name, tensors, config, **options)]).versions[name]

    def stage(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        config: AdapterConfig | Mapping[str, Any],
        *,
        parents: Sequence[str | Ref | Version] = (),
        metadata: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        base: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
        step: int | None = None,
        files: Mapping[str, Buffer] | None = None,
        allow_nonfinite: bool = False,
        sent: Sent | None = None,
    ) -> StagedPut:
        """Uploads what `put` would, unless the store holds it, and leaves the entry to a later `commit`.

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
            sent: Told how many of its bytes are on their way to the storage.
        """
        check_name(name)
        parsed = config if isinstance(config, AdapterConfig) else AdapterConfig.parse(config, where=f"config of {name}")
        given = None if files is None else as_mapping(files, f"the files of {name}")
        source = Source(tensors=as_mapping(tensors, f"the tensors of {name}"), config=parsed, files=given)
        marks = tuple(dict.fromkeys(check_tag(tag) for tag in as_several(tags, "tags")))
        sign = None if self._signer is None else self._signer.ready()
        contents = build_contents(source, name, allow_nonfinite=allow_nonfinite)
        self.journal.make_store()
        state = self.journal.state(max_age=_FRESH)
        check_new_name(name, state.adapters)
        placed = plan_directory(state, name, contents)
        put = make_put(
            name, contents, placed, parents=[self._parent(p) for p in as_several(parents, "parents")],
            metadata=metadata, base=base, recipe=recipe, step=step,
        )  # fmt: skip
        if sign is not None:
            put = sign(put)
        staged = StagedPut(put=put, tags=marks, uploaded=placed[3], source=source)
        if staged.uploaded:
            upload(self.blobs, put.directory, contents, sent)
        return staged

    def stage_many(
        self, requests: Sequence[Mapping[str, Any]], *, threads: int = 4, progress: Listener | None = None
    ) -> list[StagedPut]:
        """Stages several adapters side by side: while one is flushed to the storage, others are hashed.

        Args:
            requests: The arguments of `stage`, one mapping for each adapter.
            threads: How many are at work at once.
            progress: Called as their bytes go to the storage, and after each adapter.

        Returns:
            What `stage` returns for each, in the given order. If one fails, its error is raised after the others end.
        """
        for request in as_several(requests, "the requests"):
            as_mapping(request, "a request")
        self.journal.make_store()
        sizes = [_size(request) for request in requests] if progress is not None else [0] * len(requests)
        meter = Meter(progress, files=len(requests), nbytes=sum(sizes))

        def stage(request: Mapping[str, Any], size: int) -> StagedPut:
            piece = meter.piece(size)
            staged = self.stage(**request, sent=piece.reached)
            piece.done()
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
        """Makes everything given true in one entry: all of it or none; no entry if all of it is true already.

        Args:
            puts: Staged here or by other processes, at most one for each adapter.
            snapshot: A snapshot of the set, taken with them.
            tags: By adapter name, one more tag for the version that is put.

        Raises:
            ConflictError: others kept winning, or staged files were purged and cannot go up again from here.
            ExistsError, NotInStoreError, NameNotAllowedError: what the newest state does not allow.
        """
        for staged in as_several(puts, "puts"):
            of_type(staged, StagedPut, "a put of the commit", "what stage(...) returned")
        if snapshot is not None:
            of_type(snapshot, SnapshotDraft, "the snapshot of the commit", "a SnapshotDraft")
        names = [staged.name for staged in puts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"{twice[0]} is put twice in one commit", remedy="commit one version of each adapter")
        strays = sorted(set(as_mapping(tags or {}, "tags")) - set(names))
        if strays:
            raise UsageError(f"the tag for {strays[0]} has no put in this commit", remedy=choices(strays[0], names))
        if snapshot is not None and not snapshot.files:
            snapshot = replace(snapshot, files=snapshot_files.staged_files(self.blobs, snapshot.id))

        def decide(state: State) -> list[Change]:
            known = dict.fromkeys(state.adapters)
            changes: list[Change] = []
            for staged in puts:
                known[check_new_name(staged.name, known)] = None
                if not is_latest(staged.put, state):
                    changes.append(restage(self.blobs, staged, state).put)
            for staged in puts:
                wanted = [*staged.tags, *([check_tag(tags[staged.name])] if tags and staged.name in tags else [])]
                there = state.adapters[staged.name].tags if staged.name in state.adapters else {}
                changes += [
                    Tag(name=staged.name, tag=tag, id=staged.id) for tag in wanted if there.get(tag) != staged.id
                ]
            if snapshot is not None:
                changes.append(plan_snapshot(snapshot, state, {staged.name: staged.id for staged in puts}))
            return changes

        done = self.journal.commit(decide)
        state = done.state
        return Commit(
            versions={staged.name: state.adapters[staged.name].versions[staged.id] for staged in puts},
            snapshot=None if snapshot is None else state.snapshots[snapshot.id],
            seq=state.seq,
            new=done.entry is not None,
        )

    def stage_snapshot_file(self, snapshot_id: str, path: str, data: Buffer) -> FileRecord:
        """Uploads one file of a snapshot to come (`optimizer/a.safetensors`, `state.json`, `extra/x`).

        Returns:
            Its size and SHA-256, for `SnapshotDraft.files`.
        """
        of_type(snapshot_id, str, "the snapshot's id", "an id, as new_snapshot_id() returns it")
        self.journal.make_store()
        return snapshot_files.stage_file(self.blobs, snapshot_id, path, data)

    def new_snapshot_id(self) -> str:
        """An id that no other snapshot has."""
        return snapshot_files.new_snapshot_id()

    def _parent(self, parent: str | Ref | Version) -> str:
        return str(parent if isinstance(parent, Version) else self.resolve(parent))


def _size(request: Mapping[str, Any]) -> int:
    """Bytes of what `stage` is asked to store."""
    if request.get("files"):
        return sum(memoryview(data).nbytes for data in request["files"].values())
    return sum(tensor.nbytes for tensor in request["tensors"].values())
