"""Transfer: the files of versions and snapshots from one storage to another, each compared with its record.

A folder's name in the target is a function of the bytes that go there, so a transfer that was killed finds
its files again, and two transfers of one content write equal bytes to equal names.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from multilora_store.adapter import storage_name
from multilora_store.errors import DamagedError, ReplicaIncompleteError, StorageError
from multilora_store.storage.blobs import BatchingBlobs, Blobs, Buffer, CopyingBlobs, Sent, read_in_pieces
from multilora_store.storage.changes import check_snapshot_file
from multilora_store.storage.checks import check_config, check_model
from multilora_store.storage.codec import read_header
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE, RECORD_FILE, VersionRecord
from multilora_store.storage.progress import Listener, Meter
from multilora_store.storage.records import sha256
from multilora_store.storage.state import Snapshot, State, Version

__all__ = ["Transfer", "VanishedError", "bound_directory"]

log = logging.getLogger(__name__)

IN_FLIGHT: Final = 512 << 20


class VanishedError(ReplicaIncompleteError):
    """A file of the source was not there: perhaps a gc freed it after the state was read."""


def bound_directory(state: State, version: Version) -> str:
    """The folder in the store of `state` that is bound to exactly the bytes of `version`, and is not purged."""
    generation = 0
    while True:
        seed = f"{version.record}:{state.store_id}:{generation}".encode()
        attempt = base64.b32encode(hashlib.sha256(seed).digest()).decode().lower()[:10]
        directory = f"adapters/{storage_name(version.name)}/{version.id}-{attempt}"
        if directory not in state.purged:
            return directory
        generation += 1


@dataclass(frozen=True, slots=True)
class _Item:
    """One file to write: its key and size in the target, what gives its checked bytes, its key in the source."""

    key: str
    size: int
    content: Callable[[Sent], Buffer]
    origin: str = ""


class Transfer:
    """Copies files from `source` to `target` with bounded concurrency, memory and bandwidth.

    Args:
        jobs: How many versions or files are under way at a time.
        bandwidth: Bytes a second, all jobs together; None: no limit.
        progress: Called after each file, from the threads of the transfer, one call at a time.

    Attributes:
        present: Sizes by key of what a killed transfer has left in the target.
        resumed: How many of the files that are there now were found there.
    """

    def __init__(
        self,
        source: Blobs,
        target: Blobs,
        *,
        jobs: int,
        bandwidth: float | None = None,
        progress: Listener | None = None,
    ) -> None:
        self.source, self.target = source, target
        self.jobs = max(1, jobs)
        self.present: Mapping[str, int] = {}
        self.resumed = 0
        self._meter, self._lock = Meter(progress), threading.Lock()
        self._pace = _Pace(bandwidth)
        self._room = _Room(IN_FLIGHT)
        self._copies = True

    @property
    def files(self) -> int:
        """Files that are there now."""
        return self._meter.files

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self._meter.nbytes

    def run(self, versions: Mapping[str, Version], snapshots: Sequence[Snapshot] = ()) -> None:
        """Copies versions to the folders that key them, and the files of snapshots.

        Raises:
            VanishedError: a file of the source is not there.
            DamagedError: a file of the source is not what was stored.
            StorageError: one of the storages failed.
        """
        files = [(snapshot, path) for snapshot in snapshots for path in snapshot.files]
        nbytes = sum(v.nbytes for v in versions.values()) + sum(s.files[p].size for s, p in files)
        self._meter.expect(3 * len(versions) + len(files), nbytes)
        pool = ThreadPoolExecutor(min(self.jobs, max(1, len(versions) + len(files))))
        try:
            futures: list[Future[None]] = []
            futures += [pool.submit(self._version, version, directory) for directory, version in versions.items()]
            futures += [pool.submit(self._snapshot_file, snapshot, path) for snapshot, path in files]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _version(self, version: Version, directory: str) -> None:
        where = f"{self.source.url}/{version.directory}"
        data = self._read(version.directory, RECORD_FILE, str(version))
        if sha256(data) != version.record:
            raise DamagedError(
                f"{where}/{RECORD_FILE} is not what was stored",
                why=f"its SHA-256 is not the recorded {version.record[:16]}...",
                remedy="verify and repair the source, then sync again",
                version=version.id,
            )
        record = VersionRecord.from_bytes(data, f"{where}/{RECORD_FILE}")
        if record.digest != version.digest:
            raise DamagedError(f"{where}/{RECORD_FILE} describes {record.id}, not {version.id}", version=version.id)

        def config(_: Sent) -> Buffer:
            found = self._read(version.directory, CONFIG_FILE, str(version))
            check_config(found, record, f"{where}/{CONFIG_FILE}")
            return found

        def model(read: Sent) -> Buffer:
            found = self._read(version.directory, MODEL_FILE, str(version), record.model_size, read)
            _check_model_bytes(found, record, f"{where}/{MODEL_FILE}")
            return found

        origin = f"{version.directory}/{MODEL_FILE}"
        with self._room.taken(record.model_size):
            self._send(
                _Item(f"{directory}/{MODEL_FILE}", record.model_size, model, origin),
                _Item(f"{directory}/{CONFIG_FILE}", record.config_size, config),
                _Item(f"{directory}/{RECORD_FILE}", len(data), lambda _: data),
            )

    def _snapshot_file(self, snapshot: Snapshot, path: str) -> None:
        record = snapshot.files[path]

        def content(read: Sent) -> Buffer:
            subject = f"snapshot {snapshot.id}"
            found = self._read(snapshot.directory, check_snapshot_file(path), subject, record.size, read)
            if len(found) != record.size or (record.sha256 and sha256(found) != record.sha256):
                raise DamagedError(
                    f"{self.source.url}/{snapshot.directory}/{path} is not what was stored",
                    remedy="verify and repair the source, or drop the snapshot, then sync again",
                    snapshot=snapshot.id,
                )
            return found

        with self._room.taken(record.size):
            key = f"{snapshot.directory}/{path}"
            self._send(_Item(key, record.size, content, key))

    def _send(self, *items: _Item) -> None:
        """Writes files, but those that a killed transfer has written and those that the service copies by itself.

        A name is bound to its bytes, so a file of the right size is whole. What the service has copied is compared
        by whoever reads it first, as always.
        """
        left = [item for item in items if not self._there(item) and not self._copied(item)]
        told = {item.key: self._meter.piece(item.size) for item in items}
        if len(left) > 1 and isinstance(self.target, BatchingBlobs):
            batch = [(item.key, item.content(told[item.key].reached)) for item in left]
            self._pace.wait(sum(item.size for item in left))
            self.target.write_many(batch, told[left[0].key].reached)
            left = []
        for item in items:
            piece = told[item.key]
            if item in left:
                data = item.content(piece.reached)
                self._pace.wait(item.size)
                self.target.write(item.key, data, piece.reached)
            piece.done()

    def _there(self, item: _Item) -> bool:
        there = self.present.get(item.key) == item.size
        with self._lock:
            self.resumed += there
        return there

    def _copied(self, item: _Item) -> bool:
        """Whether both storages are one service, which has copied the file whole."""
        if not item.origin or not self._copies or not isinstance(self.target, CopyingBlobs):
            return False
        try:
            self._copies = self.target.copy_from(self.source, item.origin, item.key)
            found = self.target.stat(item.key) if self._copies else None
        except StorageError as error:
            log.info("sending through this machine what the service does not copy: %s", error.what)
            self._copies = False
            return False
        return found is not None and found.size == item.size

    def _read(self, directory: str, file: str, subject: str, size: int = 0, read: Sent = lambda _: None) -> bytes:
        data = read_in_pieces(self.source, f"{directory}/{file}", size, read)
        if data is None:
            raise VanishedError(
                f"{self.source.url}/{directory}/{file} is missing",
                why=f"{subject} is named by the journal, its files are not there",
                remedy="a gc may have freed it, or this is a replica in the making: sync again; else repair the source",
                subject=subject,
            )
        return data


def _check_model_bytes(data: bytes, record: VersionRecord, where: str) -> None:
    if len(data) != record.model_size:
        raise DamagedError(
            f"{where} is not what was stored",
            why=f"it is {len(data)} bytes long, {record.model_size} were recorded",
            remedy="verify and repair the source, then sync again",
            where=where,
        )
    view = memoryview(data)

    def read(start: int, length: int) -> memoryview:
        return view[start : start + length]

    check_model(read, read_header(lambda start, length: bytes(read(start, length)), len(data), where), record, where)


class _Pace:
    """A limit of bytes a second, shared by all threads."""

    def __init__(self, bandwidth: float | None) -> None:
        self._bandwidth, self._lock, self._free_at = bandwidth, threading.Lock(), 0.0

    def wait(self, size: int) -> None:
        """Returns when `size` more bytes may be sent."""
        if not self._bandwidth:
            return
        with self._lock:
            now = time.monotonic()
            free_at = self._free_at = max(now, self._free_at) + size / self._bandwidth
        time.sleep(free_at - now)


class _Room:
    """Memory for files under way; one that is larger than all of it waits until it is alone."""

    def __init__(self, size: int) -> None:
        self._size, self._used, self._change = size, 0, threading.Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Holds `size` bytes of it."""
        size = min(size, self._size)
        with self._change:
            self._change.wait_for(lambda: self._used + size <= self._size)
            self._used += size
        try:
            yield
        finally:
            with self._change:
                self._used -= size
                self._change.notify_all()
