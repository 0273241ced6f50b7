"""Reading: the files of one version, from the disk they lie on or through the cache, checked on the way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import DamagedError, ReplicaIncompleteError, UsageError
from multilora_store.storage.blobs import Blobs, Sent, read_in_pieces
from multilora_store.storage.cache import VersionCache
from multilora_store.storage.checks import check_config, check_file_hashes, check_header, check_identity, check_sizes
from multilora_store.storage.codec import LazyTensors, lazy_from_bytes, lazy_from_file
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE, RECORD_FILE, VersionRecord
from multilora_store.storage.failures import translated
from multilora_store.storage.progress import Listener, Meter
from multilora_store.storage.records import sha256
from multilora_store.storage.signing import TrustedKeys
from multilora_store.storage.state import Version

if TYPE_CHECKING:
    import torch

__all__ = ["StoredFiles"]


class StoredFiles:
    """The files of a store's versions.

    Args:
        blobs: The storage.
        cache: Where copies of remote versions are kept; None: nowhere.
        trusted: The keys of which one must have signed a version before it is read; None: none need have.
    """

    def __init__(self, blobs: Blobs, cache: VersionCache | None, trusted: TrustedKeys | None = None) -> None:
        self._blobs = blobs
        self._cache = cache
        self.trusted = trusted

    def record(self, version: Version) -> VersionRecord:
        """The version's `version.json`, if the version is trusted; see `recorded`.

        Raises:
            UntrustedError: no trusted key signed what the version claims.
        """
        if self.trusted is not None:
            self.trusted.check(version, self._blobs.url)
        return self.recorded(version)

    def recorded(self, version: Version) -> VersionRecord:
        """The version's `version.json`, which is what its entry says it is.

        Raises:
            ReplicaIncompleteError: it is not there.
            DamagedError: it is not the recorded one.
        """
        key = f"{version.directory}/{RECORD_FILE}"
        data = self._read(version, RECORD_FILE)
        if sha256(data) != version.record:
            raise DamagedError(
                f"{self._blobs.url}/{key} is not what was stored",
                why=f"its SHA-256 is not the {version.record[:16]}... that entry {version.seq} or an earlier one names",
                remedy="restore the version from another store, or save it again",
                version=version.id,
            )
        record = VersionRecord.from_bytes(data, f"{self._blobs.url}/{key}")
        if record.digest != version.digest:
            raise DamagedError(f"{self._blobs.url}/{key} describes {record.id}, not {version.id}", version=version.id)
        return record

    def open(self, version: Version) -> tuple[VersionRecord, AdapterConfig, Mapping[str, torch.Tensor]]:
        """Record, configuration and lazy tensors of a version.

        A local file is mapped, and a tensor is compared with its recorded digest when it is first asked for,
        unless the files are known to be whole. A remote file is read whole, once, and compared before use.
        """
        record = self.record(version)
        folder = self._local(version)
        if folder is None and self._cache is not None:
            folder, known = self._fetch(version, record), True
        else:
            known = folder is not None and self._cache is not None and self._cache.known_whole(folder, version.record)
        if folder is None:
            return record, *self._open_unkept(version, record)
        check_sizes(folder, record)
        with translated("reading", str(folder)):
            config_data = (folder / CONFIG_FILE).read_bytes()
        config = self._config(config_data, record, f"{folder}/{CONFIG_FILE}")
        path = folder / MODEL_FILE
        tensors = lazy_from_file(path, None if known else record.tensors)
        check_header(tensors.header, record, tensors.head(), str(path))
        return record, config, tensors

    def folder(self, version: Version, progress: Listener | None = None) -> Path:
        """A local folder with the version's files, every byte checked once and remembered.

        Raises:
            UsageError: the store is remote and the cache is off.
        """
        record = self.record(version)
        folder = self._local(version)
        if folder is None:
            if self._cache is None:
                raise UsageError(
                    f"{version} of {self._blobs.url} has no path on this machine",
                    why="the store is remote and its cache is off",
                    remedy="open the store with cache=True, or export the version",
                )
            return self._identified(self._fetch(version, record, progress), record)
        if self._cache is None or not self._cache.known_whole(folder, version.record):
            check_file_hashes(folder, record)
            if self._cache is not None:
                self._cache.note_whole(folder, version.record)
        return self._identified(folder, record)

    def read_all(self, version: Version, read: Sent | None = None) -> dict[str, bytes]:
        """The bytes of both files of a version, as they are on storage, checked; `read` is told on the way."""
        record = self.record(version)
        files = {
            CONFIG_FILE: self._read(version, CONFIG_FILE),
            MODEL_FILE: self._read_told(version, record, read),
        }
        where = f"{self._blobs.url}/{version.directory}"
        self._config(files[CONFIG_FILE], record, f"{where}/{CONFIG_FILE}")
        self._lazy(files[MODEL_FILE], record, f"{where}/{MODEL_FILE}").touch()
        return files

    def _open_unkept(self, version: Version, record: VersionRecord) -> tuple[AdapterConfig, LazyTensors]:
        where = f"{self._blobs.url}/{version.directory}"
        config = self._config(self._read(version, CONFIG_FILE), record, f"{where}/{CONFIG_FILE}")
        return config, self._lazy(self._read(version, MODEL_FILE), record, f"{where}/{MODEL_FILE}")

    def _lazy(self, data: bytes, record: VersionRecord, where: str) -> LazyTensors:
        if len(data) != record.model_size:
            raise DamagedError(
                f"{where} is {len(data)} bytes long, {record.model_size} were recorded",
                why="it was truncated or replaced",
                remedy="restore the version from another store, or save it again",
            )
        tensors = lazy_from_bytes(data, where, record.tensors)
        check_header(tensors.header, record, tensors.head(), where)
        return tensors

    def _config(self, data: bytes, record: VersionRecord, where: str) -> AdapterConfig:
        check_config(data, record, where)
        config = AdapterConfig.parse(data, where=where)
        if self.trusted is not None:  # else it is enough that the record is the one that was put
            check_identity(config, record, where)
        return config

    def _identified(self, folder: Path, record: VersionRecord) -> Path:
        """`folder`, whose configuration and tensors are those that a trusted version's digest stands for."""
        if self.trusted is not None:
            path = folder / CONFIG_FILE
            with translated("reading", str(path)):
                data = path.read_bytes()
            self._config(data, record, str(path))
        return folder

    def _fetch(self, version: Version, record: VersionRecord, progress: Listener | None = None) -> Path:
        """A checked copy in the cache; who listens is told of every piece of the model file."""
        assert self._cache is not None
        meter = Meter(progress, files=1, nbytes=record.model_size)

        def fetch(file: str) -> bytes:
            if progress is None or file != MODEL_FILE:
                return self._read(version, file)
            piece = meter.piece(record.model_size)
            data = self._read_told(version, record, piece.reached)
            piece.done()
            return data

        return self._cache.fetched(record, fetch)

    def _local(self, version: Version) -> Path | None:
        path = self._blobs.local_path(f"{version.directory}/{RECORD_FILE}")
        return None if path is None else path.parent

    def _read_told(self, version: Version, record: VersionRecord, read: Sent | None) -> bytes:
        """The model file; `read` is told on the way."""
        key, data = f"{version.directory}/{MODEL_FILE}", None
        if read is not None:
            data = read_in_pieces(self._blobs, key, record.model_size, read)
        return self._read(version, MODEL_FILE) if data is None else data  # which says what is missing

    def _read(self, version: Version, file: str) -> bytes:
        key = f"{version.directory}/{file}"
        data = self._blobs.read(key)
        if data is None:
            raise ReplicaIncompleteError(
                f"{self._blobs.url}/{key} is missing",
                why=f"entry {version.seq} names {version}, its files are not there (yet)",
                remedy="wait if this is a replica in the making; else restore the version from another store",
                version=version.id,
                name=version.name,
            )
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredFiles, (self._blobs, self._cache, self.trusted)
