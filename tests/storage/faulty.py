"""A storage that fails: the n-th call raises, or does half of its work and raises, or loses its answer."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from multilora_store.errors import StorageUnreachableError
from multilora_store.storage.blobs import BlobInfo, Blobs, Buffer, parts_of

Fault = Literal["fail", "truncate", "lose the answer"]


class FaultyBlobs:
    """Passes every call on to `inner`, but for number `at` (from 0 on), which goes wrong in one way.

    `truncate` leaves half of the bytes under the key, as a storage without whole writes would; for `create`
    it leaves nothing, since no storage of ours creates partly.
    """

    def __init__(self, inner: Blobs, at: int | None = None, fault: Fault = "fail", *, repeat: bool = False) -> None:
        self.inner = inner
        self.at = at
        self.fault = fault
        self.repeat = repeat
        self.calls: list[str] = []
        self._counting = threading.Lock()

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def endpoint(self) -> str:
        return self.inner.endpoint

    @property
    def exclusive(self) -> Any:
        return self.inner.exclusive

    def _goes_wrong(self, call: str) -> bool:
        with self._counting:
            self.calls.append(call)
            number = len(self.calls) - 1
        return self.at is not None and (number == self.at or (self.repeat and number > self.at))

    def _failure(self) -> StorageUnreachableError:
        return StorageUnreachableError(f"call {len(self.calls) - 1} ({self.calls[-1]}) was made to fail")

    def read(self, key: str) -> bytes | None:
        if self._goes_wrong(f"read {key}"):
            raise self._failure()
        return self.inner.read(key)

    def read_range(self, key: str, start: int, length: int) -> bytes | None:
        if self._goes_wrong(f"read_range {key}"):
            raise self._failure()
        return self.inner.read_range(key, start, length)

    def write(self, key: str, parts: Buffer | Sequence[Buffer]) -> None:
        if self._goes_wrong(f"write {key}"):
            whole = b"".join(parts_of(parts))
            if self.fault == "truncate":
                self.inner.write(key, whole[: len(whole) // 2])
            elif self.fault == "lose the answer":
                self.inner.write(key, whole)
            raise self._failure()
        self.inner.write(key, parts)

    def create(self, key: str, data: bytes) -> bool:
        if self._goes_wrong(f"create {key}"):
            if self.fault == "lose the answer":
                self.inner.create(key, data)
            raise self._failure()
        return self.inner.create(key, data)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        if self._goes_wrong(f"list {prefix}"):
            raise self._failure()
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        if self._goes_wrong("delete"):
            if self.fault == "truncate":
                self.inner.delete(keys[: len(keys) // 2])
            raise self._failure()
        self.inner.delete(keys)

    def stat(self, key: str) -> BlobInfo | None:
        if self._goes_wrong(f"stat {key}"):
            raise self._failure()
        return self.inner.stat(key)

    def local_path(self, key: str) -> Path | None:
        return self.inner.local_path(key)
