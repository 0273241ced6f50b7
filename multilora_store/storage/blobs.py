"""Blobs: bytes under keys, the one seam between the store and any storage.

Everything above this file works on a `Blobs`; a storage is a class with these nine methods. A fake for a
test takes ten lines. Failures come out as the typed errors of `multilora_store.errors`; that a key is
absent is an answer (`None`), not a failure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable
from urllib.parse import urlsplit

from multilora_store.errors import NameNotAllowedError, UsageError

__all__ = [
    "PIECE",
    "BatchingBlobs",
    "BlobInfo",
    "Blobs",
    "Buffer",
    "CopyingBlobs",
    "Exclusive",
    "Sent",
    "check_key",
    "open_blobs",
    "parts_of",
    "pieces_of",
    "read_in_pieces",
    "redact",
    "url_text",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
Exclusive: TypeAlias = Literal["holds", "unknown", "absent"]
"""Whether `create` is exclusive between writers: known to hold, to be probed, or known to be absent."""

Sent: TypeAlias = Callable[[int], None]
"""Told how many bytes of a write are on their way; from the start again where the write begins anew."""

PIECE: Final = 8 << 20
"""Bytes between two words of how far a write is."""
_RANGE: Final = 32 << 20
"""The same of a read, of which each is a request."""

_SEGMENT = re.compile(r"[A-Za-z0-9_~.%+=@-]+", re.ASCII)
_LONGEST_KEY = 900


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """One stored blob: its key below the root, its size in bytes, and the storage's own time of writing."""

    key: str
    size: int
    mtime: datetime


class Blobs(Protocol):
    """Bytes under keys below one root. Keys are relative, `/`-separated, and pass `check_key`."""

    @property
    def url(self) -> str:
        """The root, free of secrets, for messages and records."""

    @property
    def exclusive(self) -> Exclusive:
        """What is known of `create` on this storage before any probe."""

    @property
    def endpoint(self) -> str:
        """What a probe of `create` holds for: one service, free of secrets."""

    def read(self, key: str) -> bytes | None:
        """The whole blob, or None if it is absent."""

    def read_range(self, key: str, start: int, length: int) -> bytes | None:
        """At most `length` bytes from `start` on, or None if the blob is absent."""

    def write(self, key: str, parts: Buffer | Sequence[Buffer], sent: Sent | None = None) -> None:
        """Writes the blob whole or not at all, whatever was there before; `sent` is told on the way, if it can be."""

    def create(self, key: str, data: bytes) -> bool:
        """Writes the blob whole if and only if the key is absent; False: something is there (ours or not)."""

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose key starts with `prefix` (a folder ending in `/`, or all), in no order."""

    def delete(self, keys: Iterable[str]) -> None:
        """Removes the blobs; a key that is absent is no error."""

    def stat(self, key: str) -> BlobInfo | None:
        """Size and time of one blob, or None if it is absent."""

    def local_path(self, key: str) -> Path | None:
        """The file that holds the blob, where it is one on this machine; it need not exist."""


@runtime_checkable
class CopyingBlobs(Protocol):
    """Blobs of a service that copies by itself, without the bytes coming here."""

    def copy_from(self, source: Blobs, from_: str, to: str) -> bool:
        """Copies a blob of `source` whole to the key `to`; False: both are not at one service, nothing was done."""


@runtime_checkable
class BatchingBlobs(Protocol):
    """Blobs of a storage to which several writes cost less than one after the other."""

    def write_many(self, files: Sequence[tuple[str, Buffer | Sequence[Buffer]]], sent: Sent | None = None) -> None:
        """Writes blobs as `write` does, in this order; none counts before all are there."""


def check_key(key: str) -> str:
    """Returns `key`, a relative path of plain segments that cannot leave its root.

    Raises:
        NameNotAllowedError: an empty, absolute, overlong or dotted key, or characters outside the safe set.
    """
    segments = key.split("/")
    if not key or len(key) > _LONGEST_KEY or any(s in ("", ".", "..") or not _SEGMENT.fullmatch(s) for s in segments):
        raise NameNotAllowedError(
            f"the storage key {key[:120]!r} is not allowed",
            why="keys are relative, without empty, '.' or '..' segments, of plain ASCII letters",
            remedy="a record that holds such a key was not written by this library; do not trust its source",
            key=key[:200],
        )
    return key


def parts_of(parts: Buffer | Sequence[Buffer]) -> list[memoryview]:
    """The buffers as flat byte views, none copied."""
    whole = [parts] if isinstance(parts, (bytes, bytearray, memoryview)) else parts
    return [memoryview(part).cast("B") for part in whole if memoryview(part).nbytes]


def pieces_of(parts: Buffer | Sequence[Buffer], sent: Sent | None, before: int = 0) -> Iterator[memoryview]:
    """The bytes in views of at most `PIECE`; `sent` is told whenever as many were taken, with `before` added."""
    told = before
    for part in parts_of(parts):
        for start in range(0, part.nbytes, PIECE):
            piece = part[start : start + PIECE]
            yield piece
            before += piece.nbytes
            if sent is not None and before - told >= PIECE:
                sent(before)
                told = before


def read_in_pieces(blobs: Blobs, key: str, size: int, read: Sent) -> bytes | None:
    """A blob of `size` bytes, or what there is of it; `read` is told on the way. None if it is absent."""
    if size <= _RANGE or blobs.local_path(key) is not None:
        return blobs.read(key)
    pieces: list[bytes] = []
    for start in range(0, size, _RANGE):
        piece = blobs.read_range(key, start, min(_RANGE, size - start))
        if piece is None:
            return None
        pieces.append(piece)
        read(start + len(piece))
    return b"".join(pieces)


def redact(url: str) -> str:
    """`url` without user, password and query, which may hold secrets; what Azure puts before the `@` is a container."""
    if "://" not in url:
        return url
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.split("?", 1)[0].split("#", 1)[0].partition("/")
    user, _, host = authority.rpartition("@")
    container = f"{user}@" if scheme in ("abfs", "abfss") and user and ":" not in user else ""
    return f"{scheme}://{container}{host}{slash}{path}"


def open_blobs(url: str | os.PathLike[str], **options: Any) -> Blobs:
    """The blobs below `url`: a plain path, `file://`, `memory://`, or any fsspec URL. Does no I/O.

    `s3://`, `gs://` and `az://` go through obstore where it is installed and through fsspec otherwise;
    `driver="obstore"` or `driver="fsspec"` forces one. Other options go to the driver as they are.

    Raises:
        UsageError: an unknown scheme or driver, or one whose package is not installed.
    """
    text = url_text(url)
    if "://" not in text or text.startswith(("file://", "local://")):
        return _local(text, options)
    scheme = urlsplit(text).scheme
    if scheme == "memory":
        from multilora_store.storage.memory import MemoryBlobs

        _refuse_options(text, options)
        return MemoryBlobs(text)
    return _remote(text, scheme, options)


def url_text(url: str | os.PathLike[str]) -> str:
    """The root as text.

    Raises:
        UsageError: it is empty, or neither a string nor a path.
    """
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        why = "it is empty" if url == "" else f"it is of type {type(url).__name__}"
        raise UsageError(f"the URL {url!r:.80} names no place", why=why, remedy="give a folder or an fsspec URL")
    return text


def _local(text: str, options: dict[str, Any]) -> Blobs:
    from multilora_store.storage.local import LocalBlobs

    path = text.split("://", 1)[1] if "://" in text else text
    if not path:
        raise UsageError(f"the store's URL {text!r} names no folder", remedy="give a path, as in file:///data")
    _refuse_options(text, options)
    return LocalBlobs(Path(path).expanduser())


def _refuse_options(text: str, options: dict[str, Any]) -> None:
    options.pop("driver", None)
    if options:
        raise UsageError(
            f"{redact(text)} takes no storage options, but got {', '.join(sorted(options))}",
            remedy="leave them out, or give the URL of the remote storage that they belong to",
        )


def _remote(text: str, scheme: str, options: dict[str, Any]) -> Blobs:
    from multilora_store.storage.fsspec_blobs import FsspecBlobs
    from multilora_store.storage.object_blobs import OBJECT_SCHEMES, ObjectBlobs, obstore_installed

    driver = options.pop("driver", None)
    if driver not in (None, "obstore", "fsspec"):
        raise UsageError(f"unknown storage driver {driver!r}", remedy="valid: obstore, fsspec")
    fast = scheme in OBJECT_SCHEMES and obstore_installed()
    if driver == "obstore" and not fast:
        raise UsageError(
            f"the obstore driver cannot open {redact(text)}",
            why=f"it serves {', '.join(sorted(OBJECT_SCHEMES))} and needs the obstore package",
            remedy="pip install obstore (of the extra s3), or driver=fsspec",
        )
    if driver == "obstore" or (driver is None and fast):
        return ObjectBlobs(text, **options)
    return FsspecBlobs(text, **options)
