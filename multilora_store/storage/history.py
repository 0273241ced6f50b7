"""The history: reading the journal. Entries are the truth, checkpoints are derived, hints are never trusted."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from multilora_store.errors import DamagedError, StorageError, StoreFormatError
from multilora_store.storage.blobs import Blobs
from multilora_store.storage.entries import Entry, checkpoint_key, entry_key, parse_journal_key
from multilora_store.storage.marker import Marker, read_marker
from multilora_store.storage.records import parse, sha256
from multilora_store.storage.state import Fold, State

__all__ = ["CHECKPOINT_EVERY", "HEAD", "History"]

HEAD: Final = "head.json"
CHECKPOINT_EVERY: Final = 64
_BATCH: Final = 16
_ALL: Final = 1 << 40

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hint:
    seq: int
    digest: str
    checkpoint: int


class History:
    """The journal of the store whose files `blobs` holds, as it is read. Safe to share between threads."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs = blobs
        self._marker: Marker | None = None
        self._state: State | None = None
        self._read_at = 0.0
        self._seen: dict[str, Entry] = {}  # of a single writer, whose entries are listed and read each time

    @property
    def marker(self) -> Marker:
        """The store's marker.

        Raises:
            StoreNotFoundError: the root is no store.
        """
        if self._marker is None:
            self._marker = read_marker(self.blobs)
        return self._marker

    def state(self, *, max_age: float = 0.0) -> State:
        """The state now: everything that was committed before this call is in it.

        Args:
            max_age: Seconds for which a state that was read before will do.

        Raises:
            StoreNotFoundError: the root is no store.
            StoreFormatError: an entry of a newer format.
            DamagedError: an entry that is altered, or does not follow the one before it.
        """
        if self._state is not None and time.monotonic() - self._read_at < max_age:
            return self._state
        known, ahead = self._state, 1
        if known is None or self.marker.single_writer:  # there a late entry may join an earlier number
            known, ahead = self._open()
        state = self._walk(known, ahead)
        self._remember(state)
        return state

    def peek(self) -> Entry | None:
        """The newest entry in two round trips, whatever the store's size; None where only a walk would tell."""
        if self.marker.single_writer:
            return None
        hint = self._read_hint()
        if hint is None:
            return None
        data, after = self._read_all([entry_key(hint.seq), entry_key(hint.seq + 1)])
        if data is None or after is not None or sha256(data) != hint.digest:
            return None
        return Entry.from_bytes(data, f"{self.blobs.url}/{entry_key(hint.seq)}", hint.seq)

    def state_at(self, seq: int) -> State:
        """The state after entry `seq` of the past, folded from the nearest checkpoint before it."""
        state = self._read_checkpoint(seq // CHECKPOINT_EVERY * CHECKPOINT_EVERY)
        if state is None:
            state = self._genesis()
        fold, entries = Fold(state), list(self.entries(state.seq + 1, seq))
        return self._fold(fold, state, entries)

    def state_at_moment(self, moment: datetime) -> State:
        """The state as of `moment`: after the last entry that was written by then."""
        low, high = 0, self.state().seq  # entries up to `low` are old enough, entries after `high` are not
        while low < high:
            middle = (low + high + 1) // 2
            if self.entry(middle).time <= moment:
                low = middle
            else:
                high = middle - 1
        return self.state_at(low)

    def refold(self) -> State:
        """The state now, folded from the first entry without a checkpoint: the whole history is checked."""
        return self._walk(self._genesis(), _ALL if self.marker.single_writer else _BATCH)

    def listed(self) -> list[tuple[int, str]]:
        """Number and key of every entry that a listing shows, in no order."""
        found = [(parse_journal_key(info.key), info.key) for info in self.blobs.list("journal/")]
        return [(name.seq, key) for name, key in found if name and not name.checkpoint]

    def stray_entries(self, seq: int) -> list[str]:
        """Keys of entries that are numbered after `seq`, as a listing shows them."""
        return sorted(key for number, key in self.listed() if number > seq)

    def raw(self, last: int) -> list[bytes | None]:
        """The bytes of entries 1 to `last`, whatever they are; None where there are none."""
        keys = [entry_key(seq) for seq in range(1, last + 1)]
        return [data for at in range(0, last, _BATCH) for data in self._read_all(keys[at : at + _BATCH])]

    def hinted(self) -> tuple[int, str] | None:
        """Number and digest of the entry that the hint names, which need not be true."""
        hint = self._read_hint()
        return None if hint is None else (hint.seq, hint.digest)

    def forget(self) -> None:
        """Forgets what was read: the files under it have been mended."""
        self._state = None
        self._seen.clear()

    def entries(self, first: int = 1, last: int | None = None) -> list[Entry]:
        """Entries `first` to `last` (to the end if None), in order and unchecked against each other."""
        found: list[Entry] = []
        while last is None or first <= last:
            count = _BATCH if last is None else min(_BATCH, last - first + 1)
            batch = self._read_entries(first, count)
            found.extend(batch)
            first += count
            if len({entry.seq for entry in batch}) < count:
                break
        return found

    def entry(self, seq: int) -> Entry:
        """Entry `seq`.

        Raises:
            DamagedError: it is gone, which never happens to a whole journal.
        """
        found = self._read_entries(seq, 1)
        if not found:
            raise self._gap(seq)
        return found[-1]

    def _genesis(self) -> State:
        return State(store_id=self.marker.id, digest=self.marker.genesis)

    def _remember(self, state: State) -> None:
        known = self._state
        if known is None or known.seq <= state.seq:
            self._state, self._read_at = state, time.monotonic()

    def _open(self) -> tuple[State, int]:
        """The state to start walking from, and how many entries to ask for at first.

        It is the hinted or else the newest checkpoint, or the beginning.
        """
        with ThreadPoolExecutor(2) as pool:
            marker, hint = pool.submit(lambda: self.marker), pool.submit(self._read_hint)
            marker.result()
            hinted = hint.result()
        if self.marker.single_writer:
            return self._genesis(), _ALL
        if hinted is not None and self._confirmed(hinted):
            ahead = max(1, min(hinted.seq - hinted.checkpoint + 1, CHECKPOINT_EVERY + 1))
            state = self._read_checkpoint(hinted.checkpoint) if hinted.checkpoint else self._genesis()
            if state is not None:
                return state, ahead
        keys = [parse_journal_key(info.key) for info in self.blobs.list("journal/")]
        for seq in sorted({found.seq for found in keys if found and found.checkpoint}, reverse=True):
            state = self._read_checkpoint(seq)
            if state is not None:
                return state, _BATCH
        return self._genesis(), _BATCH

    def _confirmed(self, hint: _Hint) -> bool:
        """Whether the journal holds the hinted entry; a hint of a restored backup or another store does not."""
        data = self.blobs.read(entry_key(hint.seq))
        return data is not None and sha256(data) == hint.digest

    def _read_hint(self) -> _Hint | None:
        """The hint, or None: a hint that cannot be read is no hint."""
        try:
            data = self.blobs.read(HEAD)
            if data is None:
                return None
            fields = parse(data, HEAD, largest=1 << 16)
            return _Hint(
                seq=fields.whole("seq", least=1), digest=fields.digest("digest"), checkpoint=fields.whole("checkpoint")
            )
        except (DamagedError, StorageError) as error:
            log.debug("no hint at %s: %s", self.blobs.url, error)
            return None

    def _read_checkpoint(self, seq: int) -> State | None:
        """The checkpoint at `seq` if it is whole and belongs to this journal; it is derived, so never needed."""
        if seq < 1 or self.marker.single_writer:
            return None
        key = checkpoint_key(seq)
        data = self.blobs.read(key)
        entry = self.blobs.read(entry_key(seq)) if data is not None else None
        if data is None or entry is None:
            return None
        try:
            state = State.from_bytes(data, f"{self.blobs.url}/{key}")
        except (DamagedError, StoreFormatError) as error:
            log.warning("folding without a checkpoint: %s", error)
            return None
        return state if (state.seq, state.digest, state.store_id) == (seq, sha256(entry), self.marker.id) else None

    def _walk(self, state: State, count: int) -> State:
        """Folds every entry after `state`, up to the first number that is absent; `count` are asked for first."""
        while True:
            entries = self._read_entries(state.seq + 1, count)
            if entries:
                state = self._fold(Fold(state), state, entries)
            if len({entry.seq for entry in entries}) < count:
                return state
            count = min(count * 4, _BATCH * 4)

    def _fold(self, fold: Fold, state: State, entries: Sequence[Entry]) -> State:
        """Folds entries that follow `state`, checking that each follows the one before it."""
        seq, moment = state.seq, state.time
        accepted = {state.digest}
        newest = state.digest
        for entry in entries:
            if entry.seq == seq + 1:
                seq, previous, accepted = entry.seq, accepted, set()
            elif entry.seq != seq or not self.marker.single_writer:
                raise self._gap(seq + 1)
            if entry.prev not in previous:
                raise DamagedError(
                    f"entry {entry.seq} of {self.blobs.url} does not follow the entry before it",
                    why="the history was altered, or mixed with that of another store",
                    remedy="restore the journal from a copy of the store; a diverged copy needs a store of its own",
                    seq=entry.seq,
                )
            for change in entry.changes:
                fold.apply(change, entry.seq, entry.time)
            newest = entry.digest
            accepted.add(newest)
            moment = max(moment, entry.time)
        return fold.finish(seq, newest, moment)

    def _read_entries(self, first: int, count: int) -> list[Entry]:
        """Entries `first` to `first + count - 1`, as far as they are there without a gap."""
        if self.marker.single_writer:
            return self._list_entries(first, count)
        keys = [entry_key(seq) for seq in range(first, first + count)]
        found: list[Entry] = []
        for key, data in zip(keys, self._read_all(keys), strict=True):
            if data is None:
                break
            found.append(Entry.from_bytes(data, f"{self.blobs.url}/{key}", first + len(found)))
        return found

    def _list_entries(self, first: int, count: int) -> list[Entry]:
        """The same where entries are found by listing; two entries of one number are both there."""
        listed = [parse_journal_key(info.key) for info in self.blobs.list("journal/")]
        wanted = sorted(
            (found.seq, found.token) for found in listed if found and first <= found.seq < first + count and found.token
        )
        found: list[Entry] = []
        for seq, token in wanted:
            if seq > (found[-1].seq + 1 if found else first):
                break
            if found and found[-1].seq == seq:
                log.warning("two writers made entry %d of %s, where only one may write", seq, self.blobs.url)
            key = entry_key(seq, token)
            if key not in self._seen:
                data = self.blobs.read(key)
                if data is None:
                    break
                self._seen[key] = Entry.from_bytes(data, f"{self.blobs.url}/{key}", seq)
            found.append(self._seen[key])
        return found

    def _read_all(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        if len(keys) == 1 or self.blobs.local_path(keys[0]) is not None:
            return [self.blobs.read(key) for key in keys]
        with ThreadPoolExecutor(min(len(keys), _BATCH)) as pool:
            return list(pool.map(self.blobs.read, keys))

    def _gap(self, seq: int) -> DamagedError:
        return DamagedError(
            f"entry {seq} of {self.blobs.url} is missing",
            why="entries are never deleted; a replica may hold later entries before earlier ones",
            remedy="wait for the replication, or restore the journal from a copy of the store",
            seq=seq,
        )
