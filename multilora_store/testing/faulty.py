"""A storage that fails on purpose: one call raises, does half of its work, loses its answer, or takes its time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from multilora_store.errors import StorageUnreachableError
from multilora_store.storage.blobs import BlobInfo, Blobs, Buffer, Exclusive, Sent, parts_of

__all__ = ["Fault", "FaultyBlobs"]

Fault: TypeAlias = Literal["fail", "truncate", "lose the answer", "delay"]


class FaultyBlobs:
    """Passes every call on to `inner`, but for number `at`, which goes wrong in one way.

    Count the calls of a run once with `at=None`, then repeat the run with every number below `len(calls)`: each
    place where a process may die or a network may break is tried.

    Args:
        inner: The storage.
        at: The call that goes wrong, from 0 on; None: none does.
        fault: `fail`: nothing is done. `truncate`: half of the bytes stay under the key, as on a storage without
            whole writes, and half of the keys are deleted; `create` leaves nothing, for no storage of ours creates
            partly. `lose the answer`: all is done, and the caller is told that it failed. `delay`: all is done, late.
        repeat: Every later call goes wrong as well: the process is gone.
        delay: Seconds that a delayed call waits.

    Attributes:
        calls: Every call so far, as `write adapters/a/...`.
    """

    def __init__(
        self, inner: Blobs, at: int | None = None, fault: Fault = "fail", *, repeat: bool = False, delay: float = 0.05
    ) -> None:
        self.inner = inner
        self.at = at
        self.fault = fault
        self.repeat = repeat
        self.delay = delay
        self.calls: list[str] = []

    @property
    def url(self) -> str:
        """The root of the storage inside."""
        return self.inner.url

    @property
    def endpoint(self) -> str:
        """The service of the storage inside."""
        return self.inner.endpoint

    @property
    def exclusive(self) -> Exclusive:
        """What is known of `create` on the storage inside."""
        return self.inner.exclusive

    def read(self, key: str) -> bytes | None:
        """The whole blob, or None; a lost answer is a failure to the caller either way."""
        if self._goes_wrong(f"read {key}"):
            raise self._failure()
        return self.inner.read(key)

    def read_range(self, key: str, start: int, length: int) -> bytes | None:
        """A part of a blob, or None."""
        if self._goes_wrong(f"read_range {key}"):
            raise self._failure()
        return self.inner.read_range(key, start, length)

    def write(self, key: str, parts: Buffer | Sequence[Buffer], sent: Sent | None = None) -> None:
        """Writes a blob; truncated: half of it."""
        if self._goes_wrong(f"write {key}"):
            whole = b"".join(parts_of(parts))
            if self.fault == "truncate":
                self.inner.write(key, whole[: len(whole) // 2])
            elif self.fault == "lose the answer":
                self.inner.write(key, whole)
            raise self._failure()
        self.inner.write(key, parts, sent)

    def create(self, key: str, data: bytes) -> bool:
        """Creates a blob if the key is absent."""
        if self._goes_wrong(f"create {key}"):
            if self.fault == "lose the answer":
                self.inner.create(key, data)
            raise self._failure()
        return self.inner.create(key, data)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob below `prefix`."""
        if self._goes_wrong(f"list {prefix}"):
            raise self._failure()
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Removes blobs; truncated: the first half of them."""
        wanted = [*keys]
        if self._goes_wrong("delete"):
            if self.fault == "truncate":
                self.inner.delete(wanted[: len(wanted) // 2])
            elif self.fault == "lose the answer":
                self.inner.delete(wanted)
            raise self._failure()
        self.inner.delete(wanted)

    def stat(self, key: str) -> BlobInfo | None:
        """Size and time of a blob, or None."""
        if self._goes_wrong(f"stat {key}"):
            raise self._failure()
        return self.inner.stat(key)

    def local_path(self, key: str) -> Path | None:
        """The file of a blob on this machine; not a call to the storage."""
        return self.inner.local_path(key)

    def _goes_wrong(self, call: str) -> bool:
        self.calls.append(call)
        number = len(self.calls) - 1
        wrong = self.at is not None and (number == self.at or (self.repeat and number > self.at))
        if wrong and self.fault == "delay":
            time.sleep(self.delay)
            return False
        return wrong

    def _failure(self) -> StorageUnreachableError:
        return StorageUnreachableError(f"call {len(self.calls) - 1} ({self.calls[-1]}) was made to fail")
