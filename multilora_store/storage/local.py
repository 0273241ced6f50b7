"""Blobs on a local or shared disk: whole files, exclusive creation by hard link, nothing outside the root."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from multilora_store.errors import DamagedError, StorageError
from multilora_store.storage.blobs import BlobInfo, Buffer, Exclusive, Sent, check_key, pieces_of
from multilora_store.storage.failures import translated

__all__ = ["LocalBlobs"]

log = logging.getLogger(__name__)

_TEMPORARY = ".tmp~"
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_FRAMED = b"mls-framed "
_FRAME_PATIENCE = 2.0
_FOLDER_PATIENCE = 20


class LocalBlobs:
    """Files below one folder.

    A write goes to a temporary file in the same folder, is flushed to the disk, and gets its name in one
    step (`os.replace`, or `os.link` for `create`); then the folder is flushed. Files and folders follow
    the umask, so that a store on a shared disk is readable to whom it should be.
    """

    exclusive: Exclusive = "holds"
    endpoint = "local"

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))
        self.url = str(self.root)

    def read(self, key: str) -> bytes | None:
        path = self.local_path(key)
        with translated("reading", str(path)):
            try:
                with open(path, "rb") as file:
                    data = file.read()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return _unframe(path, data) if data.startswith(_FRAMED) else data

    def read_range(self, key: str, start: int, length: int) -> bytes | None:
        path = self.local_path(key)
        with translated("reading", str(path)):
            try:
                with open(path, "rb") as file:
                    file.seek(start)
                    return file.read(length)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, key: str, parts: Buffer | Sequence[Buffer], sent: Sent | None = None) -> None:
        self.write_many([(key, parts)], sent)

    def write_many(self, files: Sequence[tuple[str, Buffer | Sequence[Buffer]]], sent: Sent | None = None) -> None:
        """Writes files that count together only: each whole, named in this order, all on the disk at the end.

        All are filled before the first is flushed, so that the disk writes them in one go.
        """
        paths = self._local_paths([key for key, _ in files])
        where = str(paths[0] if len(paths) == 1 else paths[0].parent)
        with translated("writing", where), ExitStack() as stack:
            filled: list[tuple[Path, BinaryIO]] = []
            folders: dict[Path, None] = {}
            before = 0
            for path, (_, parts) in zip(paths, files, strict=True):
                temporary, file, holders = self._fill_temporary(path, pieces_of(parts, sent, before))
                before += file.tell()
                stack.callback(_remove_quietly, temporary)
                stack.callback(file.close)
                filled.append((temporary, file))
                folders.update(dict.fromkeys([path.parent, *holders]))
            for _, file in filled:
                os.fsync(file.fileno())
            for path, (temporary, _) in zip(paths, filled, strict=True):
                os.replace(temporary, path)
            try:
                _sync_folders(*folders)
            except FileNotFoundError:
                # A gc without grace has freed them already. Its purge stands in the journal, where a commit finds it.
                log.debug("%s was removed as soon as it was written", where)

    def create(self, key: str, data: bytes) -> bool:
        path = self.local_path(key)
        with translated("creating", str(path)):
            if os.path.lexists(path):
                return False
            temporary, file, holders = self._fill_temporary(path, [data])
            try:
                with file:
                    os.fsync(file.fileno())
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return _create_framed(path, data)
            finally:
                _remove_quietly(temporary)
            _sync_folders(path.parent, *holders)
        return True

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        if prefix:
            check_key(prefix.rstrip("/"))
        folder = self.root / prefix if prefix.endswith("/") or not prefix else (self.root / prefix).parent
        with translated("listing", str(folder)):
            self._contain(folder)
            yield from (info for info in self._walk(folder) if info.key.startswith(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        folders: set[Path] = set()
        for key in keys:
            path = self.local_path(key)
            with translated("deleting", str(path)):
                try:
                    path.unlink()
                except (FileNotFoundError, NotADirectoryError):
                    continue
                folders.add(path.parent)
        for folder in folders:
            self._remove_if_empty(folder)

    def stat(self, key: str) -> BlobInfo | None:
        path = self.local_path(key)
        with translated("looking at", str(path)):
            try:
                status = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return BlobInfo(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))

    def sweep(self, before: datetime) -> int:
        """Removes temporary files that killed writers left before that moment; how many."""
        swept = 0
        found = [Path(folder, name) for folder, _, names in os.walk(self.root) for name in names]
        for path in (path for path in found if path.name.startswith(_TEMPORARY)):
            with translated("sweeping", str(path)):
                try:
                    if path.lstat().st_mtime < before.timestamp():
                        path.unlink()
                        swept += 1
                except FileNotFoundError:
                    continue
                self._remove_if_empty(path.parent)
        return swept

    def local_path(self, key: str) -> Path:
        path = self.root / check_key(key)
        self._contain(path)
        return path

    def _local_paths(self, keys: Sequence[str]) -> Sequence[Path]:
        """As `local_path`, with one look at each folder instead of one at each file."""
        paths = [self.root / check_key(key) for key in keys]
        for folder in {path.parent for path in paths}:
            self._contain(folder)
        for path in paths:
            if path.is_symlink():
                self._contain(path)
        return paths

    def _contain(self, path: Path) -> None:
        """Refuses a path that a symbolic link leads out of the root (the root itself may be a link)."""
        root, real = os.path.realpath(self.root), os.path.realpath(path)
        if real != root and not real.startswith(root.rstrip(os.sep) + os.sep):
            raise DamagedError(
                f"{path} leaves the store's root",
                why=f"a symbolic link leads to {real}",
                remedy="remove the link; copy what it points to into the store if it belongs there",
                path=str(path),
            )

    def _fill_temporary(self, path: Path, pieces: Iterable[Buffer]) -> tuple[Path, BinaryIO, Sequence[Path]]:
        """A file beside `path`, filled and open, yet to be flushed; and folders that hold names yet to be flushed."""
        temporary = path.parent / f"{_TEMPORARY}{path.name}~{secrets.token_hex(4)}"
        descriptor, holders = _open_in_folder(temporary)
        file = open(descriptor, "wb", buffering=1 << 20)  # noqa: SIM115 (the caller flushes and closes it)
        try:
            file.writelines(pieces)
            file.flush()
        except BaseException:
            _remove_quietly(temporary)
            file.close()  # on a full disk this fails once more
            raise
        return temporary, file, holders

    def _walk(self, folder: Path) -> Iterator[BlobInfo]:
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(Path(entry.path))
            elif entry.is_file(follow_symlinks=False) and not entry.name.startswith(_TEMPORARY):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                key = os.path.relpath(entry.path, self.root).replace(os.sep, "/")
                yield BlobInfo(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))

    def _remove_if_empty(self, folder: Path) -> None:
        """Removes a folder that a deletion left empty, and its parents, up to the root: tidiness, not truth."""
        while folder != self.root and self.root in folder.parents:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent


def _open_in_folder(path: Path) -> tuple[int, list[Path]]:
    """Creates `path`, and its folder as often as somebody who frees an empty folder takes it away again."""
    for attempt in range(_FOLDER_PATIENCE):
        try:
            holders = _make_folder(path.parent)
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666), holders
        except FileNotFoundError:
            if attempt + 1 == _FOLDER_PATIENCE:
                raise
    raise AssertionError("unreachable")


def _make_folder(folder: Path) -> list[Path]:
    """Makes the folder and its parents; returns the folders that hold new names, which are yet to be flushed.

    They are flushed after the file has its name: the disk then writes all of it in one go.
    """
    if folder.is_dir():
        return []
    holders = _make_folder(folder.parent)
    try:
        os.mkdir(folder)
    except FileExistsError:
        return holders  # another writer was faster, and flushes it before anything in it counts
    return [folder.parent, *holders]


def _sync_folders(*folders: Path) -> None:
    for folder in folders:
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # some network disks have no such call
            raise
    finally:
        os.close(descriptor)


def _remove_quietly(path: Path) -> None:
    """Removes a temporary file of ours; one that cannot be removed is garbage, not a failure."""
    try:
        path.unlink()
    except OSError:
        return


def _create_framed(path: Path, data: bytes) -> bool:
    """Exclusive creation without hard links: the name comes first, so length and digest stand in the body."""
    frame = f"{len(data)} {hashlib.sha256(data).hexdigest()}\n".encode()
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    with open(descriptor, "wb") as file:
        file.write(_FRAMED + frame + data)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)
    return True


def _unframe(path: Path, data: bytes) -> bytes:
    """The body of a framed file; waits a moment for a writer that has the name but not yet the bytes."""
    deadline = time.monotonic() + _FRAME_PATIENCE
    while True:
        head, _, body = data.removeprefix(_FRAMED).partition(b"\n")
        length, _, digest = head.partition(b" ")
        if length.isdigit() and len(body) == int(length) and hashlib.sha256(body).hexdigest() == digest.decode():
            return body
        if time.monotonic() > deadline:
            raise DamagedError(
                f"{path} is not whole",
                why="a writer died between naming and filling it, on a disk without hard links",
                remedy="if no writer is at work, remove this file: it was never a commit",
                path=str(path),
            )
        time.sleep(0.05)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StorageError(f"reading failed at {path}", why=str(error)) from error
