"""Blobs in this process's memory: fsspec's `memory://`, with a lock of ours around every call."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

from multilora_store.storage.blobs import BlobInfo, Buffer, Exclusive
from multilora_store.storage.fsspec_blobs import FsspecBlobs

__all__ = ["MemoryBlobs"]

# fsspec keeps one memory file system for the process, and its own `mode="create"` lets several writers win.
_lock = threading.RLock()


class MemoryBlobs(FsspecBlobs):
    """Blobs under `memory://<root>`, shared by all threads of this process and by nobody else."""

    exclusive: Exclusive = "holds"

    def read(self, key: str) -> bytes | None:
        with _lock:
            return super().read(key)

    def read_range(self, key: str, start: int, length: int) -> bytes | None:
        with _lock:
            return super().read_range(key, start, length)

    def write(self, key: str, parts: Buffer | Sequence[Buffer]) -> None:
        with _lock:
            super().write(key, parts)

    def create(self, key: str, data: bytes) -> bool:
        with _lock:
            if super().stat(key) is not None:
                return False
            super().write(key, data)
            return True

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        with _lock:
            found = list(super().list(prefix))
        return iter(found)

    def delete(self, keys: Iterable[str]) -> None:
        with _lock:
            super().delete(keys)

    def stat(self, key: str) -> BlobInfo | None:
        with _lock:
            return super().stat(key)
