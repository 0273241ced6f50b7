"""Entries: one commit each, and the names of the journal's files."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Final

from multilora_store.errors import StoreFormatError
from multilora_store.storage.changes import Change, read_change, spell_all
from multilora_store.storage.records import dump, parse, sha256, time_text

__all__ = ["Entry", "JournalKey", "checkpoint_key", "entry_key", "new_token", "parse_journal_key"]

LARGEST_ENTRY: Final = 64 << 20
KNOWN_NEEDS: Final[frozenset[str]] = frozenset()
_KEY: Final = re.compile(r"journal/(\d{8,12})(?:-([0-9a-f]{16,32}))?(\.state)?\.json", re.ASCII)


def new_token() -> str:
    """A token that no other writer has: 128 random bits in hex."""
    return secrets.token_hex(16)


def entry_key(seq: int, token: str = "") -> str:
    """The key of entry `seq`; with its writer's token where exclusive creation does not hold."""
    return f"journal/{seq:08d}-{token}.json" if token else f"journal/{seq:08d}.json"


def checkpoint_key(seq: int) -> str:
    """The key of the folded state after entry `seq`."""
    return f"journal/{seq:08d}.state.json"


@dataclass(frozen=True, slots=True)
class JournalKey:
    """What a key under `journal/` says."""

    seq: int
    token: str
    checkpoint: bool


def parse_journal_key(key: str) -> JournalKey | None:
    """Reads a key under `journal/`; None if it is none of ours."""
    found = _KEY.fullmatch(key)
    return None if found is None else JournalKey(int(found[1]), found[2] or "", found[3] is not None)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One commit.

    Attributes:
        seq: Its number, from 1 on without gaps.
        prev: SHA-256 of the bytes of the entry before it; of the store's id for the first.
        writer: A token that only its writer has, and only for this number.
        time: When it was written, by its writer's clock, never before the entry ahead of it.
        changes: What happens, together or not at all.
        needs: Features without which it cannot be understood.
    """

    seq: int
    prev: str
    writer: str
    time: datetime
    changes: tuple[Change, ...]
    needs: tuple[str, ...] = field(default=())

    @cached_property
    def data(self) -> bytes:
        """Its bytes on storage."""
        return dump({
            "seq": self.seq, "prev": self.prev, "writer": self.writer, "time": time_text(self.time),
            "changes": spell_all(self.changes), "needs": list(self.needs),
        })  # fmt: skip

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its bytes: what the next entry names as `prev`."""
        return sha256(self.data)

    def to_bytes(self) -> bytes:
        return self.data

    @classmethod
    def from_bytes(cls, data: bytes, where: str, seq: int) -> Entry:
        """Reads entry `seq`.

        Raises:
            DamagedError: not such an entry, or a hostile value in it.
            StoreFormatError: a change or a need that this version does not know.
        """
        fields = parse(data, where, largest=LARGEST_ENTRY)
        needs = fields.texts("needs", default=[])
        unknown = sorted(set(needs) - KNOWN_NEEDS)
        if unknown:
            raise StoreFormatError(
                f"{where} needs {', '.join(unknown)}, which this version does not know",
                remedy="the store was written by a newer multilora_store; install that",
                needs=unknown,
            )
        if fields.whole("seq") != seq:
            fields.refuse("seq", fields.data["seq"], f"{seq}, as its name says,")
        entry = cls(
            seq=seq,
            prev=fields.digest("prev"),
            writer=fields.text("writer", longest=64),
            time=fields.moment("time"),
            changes=tuple(read_change(row) for row in fields.rows("changes")),
            needs=needs,
        )
        # Another spelling of the same entry hashes differently: what counts is what lies on storage.
        entry.__dict__["data"] = data
        return entry
