"""The local cache: copies of remote versions, keyed by content, and which local files are known to be whole.

A copy is made in a folder of its own, checked against its record, and gets its name in one step. The key is
the record's SHA-256, so two stores with one content share a copy and two URLs never share a folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from multilora_store.errors import DamagedError
from multilora_store.storage.checks import check_file_hashes, check_sizes
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE, RECORD_FILE, VersionRecord
from multilora_store.storage.failures import translated
from multilora_store.storage.locations import cache_folder, cache_limit, write_small
from multilora_store.storage.records import dump, parse, sha256

__all__ = ["VersionCache"]

log = logging.getLogger(__name__)
_locks: dict[str, threading.Lock] = {}
_locks_guard = threading.Lock()


class VersionCache:
    """Copies of versions under `<cache>/versions/<SHA-256 of version.json>/`.

    Args:
        folder: The cache's root; by default this user's.
        limit: Bytes of copies to keep; the longest unused go first. By default MULTILORA_CACHE_GB, or 50 GB.
    """

    def __init__(self, folder: Path | None = None, *, limit: int | None = None) -> None:
        self._given = folder
        self.limit = cache_limit() if limit is None else limit

    @property
    def folder(self) -> Path:
        return self._given or cache_folder()

    def fetched(self, record: VersionRecord, fetch: Callable[[str], bytes]) -> Path:
        """A checked local folder with the version's files; fetched by one thread of one process if need be.

        Args:
            record: What the files must be.
            fetch: Gives the bytes of one of the version's files.

        Raises:
            DamagedError: what was fetched is not what the record says.
        """
        data = record.to_bytes()
        key = sha256(data)
        target = self.folder / "versions" / key
        with _one_at_a_time(self.folder / "locks" / key):
            if not self._usable(target, record):
                self._make(target, record, data, fetch)
        self._touch(target)
        return target

    def known_whole(self, folder: Path, record_sha256: str) -> bool:
        """Whether the files in `folder` were checked against that record, and have not been touched since."""
        try:
            fields = parse(self._note_of(folder).read_bytes(), str(folder), largest=1 << 16)
            return fields.data.get("stamp") == [record_sha256, *_stamp(folder)]
        except (OSError, DamagedError):
            return False

    def note_whole(self, folder: Path, record_sha256: str) -> None:
        """Remembers that the files in `folder` are what that record says."""
        try:
            write_small(self._note_of(folder), dump({"stamp": [record_sha256, *_stamp(folder)]}))
        except OSError as error:
            log.debug("not remembered as checked: %s", error)

    def _note_of(self, folder: Path) -> Path:
        return self.folder / "checked" / f"{sha256(os.fsencode(folder))[:32]}.json"

    def _usable(self, target: Path, record: VersionRecord) -> bool:
        """Whether a copy is there and whole; one that is not is removed, to be fetched again."""
        if not target.is_dir():
            return False
        key = target.name
        try:
            check_sizes(target, record)
            if not self.known_whole(target, key):
                check_file_hashes(target, record)
                self.note_whole(target, key)
        except DamagedError as error:
            log.warning("a cached copy is damaged and will be fetched again: %s", error)
            with translated("removing a damaged copy", str(target)):
                shutil.rmtree(target)
            return False
        return True

    def _make(self, target: Path, record: VersionRecord, data: bytes, fetch: Callable[[str], bytes]) -> None:
        temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}"
        with translated("caching", str(target)):
            temporary.mkdir(parents=True)
        try:
            for file in (MODEL_FILE, CONFIG_FILE):
                body = fetch(file)
                with translated("caching", str(temporary / file)):
                    (temporary / file).write_bytes(body)
            with translated("caching", str(target)):
                (temporary / RECORD_FILE).write_bytes(data)
            check_file_hashes(temporary, record)
            with translated("caching", str(target)):
                os.replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.note_whole(target, target.name)
        self._shrink(keep=target)

    def _touch(self, target: Path) -> None:
        try:
            os.utime(target)
        except OSError as error:
            log.debug("last use not noted: %s", error)

    def _shrink(self, keep: Path) -> None:
        """Removes the longest unused copies beyond the limit; open files stay readable to who has them open."""
        copies = []
        for folder in (self.folder / "versions").iterdir():
            if folder != keep and not folder.name.startswith("."):
                size = sum(file.stat().st_size for file in folder.iterdir())
                copies.append((folder.stat().st_mtime, size, folder))
        total = sum(size for _, size, _ in copies) + sum(file.stat().st_size for file in keep.iterdir())
        for _, size, folder in sorted(copies):
            if total <= self.limit:
                return
            shutil.rmtree(folder, ignore_errors=True)
            total -= size


def _stamp(folder: Path) -> list[int]:
    """Size, time of change and inode of both files: any write, copy or restore changes one of them."""
    stamp: list[int] = []
    for file in (CONFIG_FILE, MODEL_FILE):
        status = os.stat(folder / file)
        stamp += [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    return stamp


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Holds a lock between the threads of this process and, by the lock file, between processes."""
    with _locks_guard:
        lock = _locks.setdefault(str(path), threading.Lock())
    with lock:
        with translated("locking", str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
