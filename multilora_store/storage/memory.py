"""Blobs in this process's memory: the dictionary behind fsspec's `memory://`, with a lock of ours."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from multilora_store.errors import UsageError
from multilora_store.storage.blobs import BlobInfo, Buffer, Exclusive, Sent, check_key, pieces_of

__all__ = ["MemoryBlobs"]

# fsspec's own exclusive mode looks first and writes then, so that several writers win.
_lock = threading.Lock()


class MemoryBlobs:
    """Blobs under `memory://<root>`, shared by all threads of this process and by nobody else.

    They are fsspec's: what anybody wrote to `memory://` with fsspec is here, and the reverse.
    """

    exclusive: Exclusive = "holds"
    endpoint = "memory"

    def __init__(self, url: str) -> None:
        root = "/" + url.partition("://")[2].strip("/")
        if root == "/":
            raise UsageError("memory:// names no root", remedy="give it a name, as in memory://run7")
        self.url = f"memory:/{root}"
        self._root = root

    def __repr__(self) -> str:
        return f"MemoryBlobs({self.url!r})"

    def read(self, key: str) -> bytes | None:
        path = self._path(key)
        with _lock:
            file = _files().get(path)
            return None if file is None else bytes(file.getvalue())

    def read_range(self, key: str, start: int, length: int) -> bytes | None:
        path = self._path(key)
        with _lock:
            file = _files().get(path)
            return None if file is None else bytes(file.getbuffer()[start : start + length])

    def write(self, key: str, parts: Buffer | Sequence[Buffer], sent: Sent | None = None) -> None:
        path, body = self._path(key), b"".join(pieces_of(parts, sent))
        with _lock:
            _store(path, body)

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with _lock:
            if path in _files():
                return False
            _store(path, bytes(data))
            return True

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        if prefix:
            check_key(prefix.rstrip("/"))
        stem = f"{self._root}/{prefix}"
        with _lock:
            found = [
                BlobInfo(path[len(self._root) + 1 :], _size(file), _time(file))
                for path, file in _files().items()
                if path.startswith(stem)
            ]
        return iter(found)

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in keys]
        with _lock:
            for path in paths:
                _files().pop(path, None)

    def stat(self, key: str) -> BlobInfo | None:
        path = self._path(key)
        with _lock:
            file = _files().get(path)
            return None if file is None else BlobInfo(key, _size(file), _time(file))

    def local_path(self, key: str) -> Path | None:
        check_key(key)
        return None

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"


def _files() -> dict[str, Any]:
    from fsspec.implementations.memory import MemoryFileSystem

    files: dict[str, Any] = MemoryFileSystem.store
    return files


def _store(path: str, body: bytes) -> None:
    from fsspec.implementations.memory import MemoryFile

    _files()[path] = MemoryFile(None, path, body)


def _size(file: Any) -> int:
    return len(file.getbuffer())


def _time(file: Any) -> datetime:
    found: datetime = file.modified
    return found if found.tzinfo else found.replace(tzinfo=UTC)
