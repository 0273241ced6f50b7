"""The marker `multilora-store.json`: what makes a root a store, and who may read and write it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

from multilora_store.errors import StorageError, StoreFormatError, StoreNotFoundError
from multilora_store.storage.blobs import Blobs
from multilora_store.storage.records import dump, parse, sha256

__all__ = ["FORMAT", "MARKER", "SINGLE_WRITER", "Marker", "create_marker", "find_marker", "read_marker"]

MARKER: Final = "multilora-store.json"
FORMAT: Final = 1
SINGLE_WRITER: Final = "single-writer"
KNOWN_FEATURES: Final = frozenset({SINGLE_WRITER})
_REMEDY: Final = "the store was written by a newer multilora_store; install that"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """What the marker says.

    Attributes:
        id: The store's own id.
        reads: Features without which the store cannot be read.
        writes: Features without which the store must not be written.
    """

    id: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    @property
    def genesis(self) -> str:
        """What the first entry names as `prev`: it binds the journal to this store."""
        return sha256(self.id.encode())

    @property
    def single_writer(self) -> bool:
        """Whether entries carry their writer's token in their names, as exclusive creation does not hold."""
        return SINGLE_WRITER in self.reads

    def to_bytes(self) -> bytes:
        return dump({"format": FORMAT, "id": self.id, "reads": list(self.reads), "writes": list(self.writes)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Marker:
        """Reads the marker.

        Raises:
            StoreFormatError: a newer format, or a feature needed to read that this version does not know.
            DamagedError: not a marker at all.
        """
        fields = parse(data, where, largest=1 << 20)
        found = fields.whole("format", least=1)
        if found != FORMAT:
            raise StoreFormatError(
                f"{where} has format {found}; this version knows format {FORMAT}", remedy=_REMEDY, format=found
            )
        marker = cls(
            id=fields.text("id", longest=64),
            reads=fields.texts("reads", default=[]),
            writes=fields.texts("writes", default=[]),
        )
        unknown = sorted(set(marker.reads) - KNOWN_FEATURES)
        if unknown:
            raise StoreFormatError(
                f"{where} cannot be read without {', '.join(unknown)}", remedy=_REMEDY, features=unknown
            )
        return marker

    def check_writable(self, where: str) -> None:
        """Raises StoreFormatError if a feature needed to write is unknown to this version."""
        unknown = sorted(set(self.writes) - KNOWN_FEATURES)
        if unknown:
            raise StoreFormatError(
                f"{where} can be read but not written by this version",
                why=f"it does not know {', '.join(unknown)}",
                remedy=_REMEDY,
                features=unknown,
            )


def find_marker(blobs: Blobs) -> Marker | None:
    """The store's marker, or None if the root is no store."""
    data = blobs.read(MARKER)
    return None if data is None else Marker.from_bytes(data, f"{blobs.url}/{MARKER}")


def read_marker(blobs: Blobs) -> Marker:
    """The store's marker.

    Raises:
        StoreNotFoundError: the root is no store.
    """
    marker = find_marker(blobs)
    if marker is None:
        raise StoreNotFoundError(
            f"{blobs.url} is not a store",
            why=f"there is no {MARKER} at that root",
            remedy="check the URL for a typo; a store is made by the first command that writes to it",
            url=blobs.url,
        )
    return marker


def create_marker(blobs: Blobs, *, single_writer: bool) -> Marker:
    """Makes the root a store, or returns the marker of whoever made it one first."""
    marker = Marker(id=str(uuid.uuid4()), reads=(SINGLE_WRITER,) if single_writer else ())
    try:
        blobs.create(MARKER, marker.to_bytes())
    except StorageError:
        found = find_marker(blobs)  # the answer may have been lost, and not the marker
        if found is None:
            raise
        return found
    return read_marker(blobs)
