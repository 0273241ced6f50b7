"""Missing and damaged entries of a journal, from another copy of the same store, as far as digests prove them.

Each entry names the digest of the one before it. So where both journals hold one entry in equal bytes, all entries
before it must be equal too, and whichever of ours is not, is damaged: the other's is put in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from multilora_store.errors import DamagedError, StoreFormatError
from multilora_store.storage.entries import Entry, entry_key
from multilora_store.storage.records import sha256
from multilora_store.storage.view import StoreView

__all__ = ["EntriesPlan", "plan_entries", "restore_entries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesPlan:
    """What can be restored.

    Attributes:
        entries: The true bytes by entry number, where ours are missing or others.
        left: Why no more can be; empty: nothing is wrong any more.
    """

    entries: Mapping[int, bytes] = field(default_factory=dict)
    left: str = ""


def plan_entries(store: StoreView, other: StoreView) -> EntriesPlan:
    """The entries of `other` that belong where those of `store` are missing or damaged.

    Raises:
        DamagedError: the journal of `other` is damaged as well.
    """
    ours, theirs = store.journal, other.journal
    if ours.marker.id != theirs.marker.id:
        return EntriesPlan(
            left=f"{other.url} has a history of its own, so its entries are not ours: only a copy of this very store "
            "holds them; a new store can be synced from it"
        )
    if ours.marker.single_writer:
        return EntriesPlan(left="entries of a single writer carry its tokens: copy the files of journal/ themselves")
    last = max((seq for seq, _ in ours.listed()), default=0)
    hint = ours.hinted()
    proven, previous = 0, theirs.marker.genesis
    differing: dict[int, bytes] = {}
    own = ours.raw(last)
    for seq, (mine, true) in enumerate(zip(own, theirs.raw(last), strict=True), 1):
        if true is None:
            break
        entry = Entry.from_bytes(true, f"{other.url}/{entry_key(seq)}", seq)
        if entry.prev != previous:
            raise DamagedError(
                f"entry {seq} of {other.url} does not follow the entry before it",
                remedy="name another copy of the store",
                seq=seq,
            )
        previous = entry.digest
        if mine == true or (seq, sha256(true)) == hint:
            proven = seq
        if mine != true:
            differing[seq] = true
    entries = {seq: data for seq, data in differing.items() if seq <= proven}
    unproven = [seq for seq in range(proven + 1, last + 1) if not _readable(own[seq - 1], seq)]
    left = f"nothing that both hold follows entry {unproven[0]}, so nobody can tell what it was" if unproven else ""
    return EntriesPlan(entries=entries, left=left)


def restore_entries(store: StoreView, plan: EntriesPlan) -> list[str]:
    """Puts the entries in place; what lay there is kept under `quarantine/`. The keys that were kept."""
    kept = []
    for seq, data in sorted(plan.entries.items(), reverse=True):  # a gap closes last: until then, readers stop at it
        key = entry_key(seq)
        there = store.blobs.read(key)
        if there is not None:
            store.blobs.write(f"quarantine/{key}", there)
            kept.append(f"quarantine/{key}")
            store.blobs.write(key, data)
        elif not store.blobs.create(key, data) and store.blobs.read(key) != data:
            raise DamagedError(f"entry {seq} of {store.url} was made anew meanwhile", remedy="repair again", seq=seq)
    store.journal.forget()
    return kept


def _readable(data: bytes | None, seq: int) -> bool:
    try:
        return data is not None and Entry.from_bytes(data, "", seq).seq == seq
    except (DamagedError, StoreFormatError):
        return False
