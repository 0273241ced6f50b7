"""A storage that counts its requests, and one that does something of ours before a request."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from multilora_store.storage import Store
from multilora_store.storage.blobs import BlobInfo, Blobs, Buffer, Sent


class CountingBlobs:
    """Passes every call on to `inner`, counts it, and calls `before` with its name and key."""

    def __init__(self, inner: Blobs, before: Callable[[str, str], None] | None = None) -> None:
        self.inner, self.before = inner, before
        self.calls: Counter[str] = Counter()
        self.keys: list[str] = []
        self._lock = threading.Lock()

    url = property(lambda self: self.inner.url)
    endpoint = property(lambda self: self.inner.endpoint)
    exclusive: Any = property(lambda self: self.inner.exclusive)

    def _count(self, call: str, key: str) -> None:
        if self.before is not None:
            self.before(call, key)
        with self._lock:
            self.calls[call] += 1
            self.keys.append(f"{call} {key}")

    @property
    def total(self) -> int:
        return self.calls.total()

    def read(self, key: str) -> bytes | None:
        self._count("read", key)
        return self.inner.read(key)

    def read_range(self, key: str, start: int, length: int) -> bytes | None:
        self._count("read_range", key)
        return self.inner.read_range(key, start, length)

    def write(self, key: str, parts: Buffer | Sequence[Buffer], sent: Sent | None = None) -> None:
        self._count("write", key)
        self.inner.write(key, parts, sent)

    def create(self, key: str, data: bytes) -> bool:
        self._count("create", key)
        return self.inner.create(key, data)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        self._count("list", prefix)
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._count("delete", "")
        self.inner.delete(keys)

    def stat(self, key: str) -> BlobInfo | None:
        self._count("stat", key)
        return self.inner.stat(key)

    def local_path(self, key: str) -> Path | None:
        return self.inner.local_path(key)


def counted(store: Store, before: Callable[[str, str], None] | None = None) -> tuple[Store, CountingBlobs]:
    """A fresh store over the same storage, and what counts its requests."""
    blobs = CountingBlobs(store.blobs, before)
    return Store(blobs), blobs
