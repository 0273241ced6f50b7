"""The view: what a store says, and nothing that changes it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from multilora_store.adapter import AdapterConfig, Ref, TensorInfo, check_name
from multilora_store.errors import NotInStoreError, choices
from multilora_store.storage import snapshots as snapshot_files
from multilora_store.storage.arguments import as_ref, of_type
from multilora_store.storage.blobs import Blobs
from multilora_store.storage.entries import Entry
from multilora_store.storage.journal import Journal
from multilora_store.storage.progress import Listener
from multilora_store.storage.reading import StoredFiles
from multilora_store.storage.refs import find_snapshot, resolve
from multilora_store.storage.state import Snapshot, State, Version

if TYPE_CHECKING:
    import torch

    from multilora_store.storage.verify import VerifyReport

__all__ = ["StoreView", "StoredAdapter"]


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


class StoreView:
    """The reading half of a store."""

    blobs: Blobs
    journal: Journal
    files: StoredFiles

    @property
    def url(self) -> str:
        """The root, free of secrets."""
        return self.blobs.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

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
        return resolve(self.state(), as_ref(ref), self.url, at=self.journal.state_at_moment)

    def get(self, ref: str | Ref | Version) -> StoredAdapter:
        """Reads one version: its configuration now, its tensors when asked for, all checked.

        Raises:
            DamagedError: the files are not what was stored.
            ReplicaIncompleteError: they have not arrived yet.
            UntrustedError: the store was opened with trusted keys, and none of them signed it.
        """
        version = ref if isinstance(ref, Version) else self.resolve(ref)
        record, config, tensors = self.files.open(version)
        return StoredAdapter(name=version.name, version=version, config=config, tensors=tensors, infos=record.tensors)

    def path(self, ref: str | Ref | Version, *, progress: Listener | None = None) -> Path:
        """A local PEFT directory with the version's files, fetched if need be (`progress` is told) and checked."""
        version = ref if isinstance(ref, Version) else self.resolve(ref)
        return self.files.folder(version, progress)

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
        of_type(wanted, str, "the snapshot", "latest, or a snapshot's id")
        return find_snapshot(self.state(), wanted, self.url)

    def snapshot_files(self, snapshot: Snapshot) -> list[str]:
        """Paths of the snapshot's own files, sorted."""
        return sorted(_as_snapshot(snapshot).files)

    def read_snapshot_file(self, snapshot: Snapshot, path: str) -> bytes:
        """One of the snapshot's own files, checked."""
        return snapshot_files.read_file(self.blobs, _as_snapshot(snapshot), path)

    def verify(
        self,
        ref: str | Ref | None = None,
        *,
        deep: bool = True,
        threads: int = 4,
        progress: Listener | None = None,
        trusted_keys: Iterable[str | os.PathLike[str]] | None = None,
    ) -> VerifyReport:
        """Checks stored files against their records, and signatures where keys are trusted; see `storage.verify`."""
        from multilora_store.storage.verify import verify

        return verify(self, ref, deep=deep, threads=threads, progress=progress, trusted_keys=trusted_keys)


def _as_snapshot(given: Snapshot) -> Snapshot:
    return of_type(given, Snapshot, "the snapshot", "a Snapshot, as store.snapshot(...) returns it")
