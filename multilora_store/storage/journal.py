"""The journal: one linear history of commits, and the only way in which a store changes.

`journal/00000042.json` is created if and only if it does not exist, so exactly one writer makes entry 42.
Everything else under the root is either a file that some entry names, or derived from the entries.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from multilora_store.errors import (
    ConflictError,
    MultiLoRAError,
    OutcomeUnknownError,
    StorageDeniedError,
    StorageError,
    StorageFullError,
    UsageError,
)
from multilora_store.storage.blobs import Blobs
from multilora_store.storage.changes import Change
from multilora_store.storage.entries import Entry, checkpoint_key, entry_key, new_token
from multilora_store.storage.history import CHECKPOINT_EVERY, HEAD, History
from multilora_store.storage.marker import create_marker, find_marker
from multilora_store.storage.probe import exclusive_create_holds
from multilora_store.storage.records import dump
from multilora_store.storage.state import Fold, State

__all__ = ["CHECKPOINT_EVERY", "HEAD", "Committed", "Journal"]

_FIRST_BACKOFF: Final = 0.010
_LONGEST_BACKOFF: Final = 1.0
_REPEATS: Final = 6

log = logging.getLogger(__name__)
_random = random.SystemRandom()  # workers that were forked from one process must not back off in step


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a commit came to: the state after it, and its entry (None if there was nothing to change)."""

    state: State
    entry: Entry | None


class Journal(History):
    """The journal as it is read and written. Safe to share between threads.

    Args:
        blobs: The storage.
        patience: Seconds for which `commit` keeps deciding again while others win.
    """

    def __init__(self, blobs: Blobs, *, patience: float = 300.0) -> None:
        super().__init__(blobs)
        self.patience = patience

    def commit(self, decide: Callable[[State], Sequence[Change]]) -> Committed:
        """Makes the next entry from what `decide` makes of the state; the root becomes a store if it is none.

        Args:
            decide: From the state to the changes; called again with the newer state whenever another writer
                was faster. It raises to refuse, and returns nothing to change nothing.

        Raises:
            ConflictError: others kept winning for `patience` seconds; nothing was written.
            OutcomeUnknownError: the storage failed such that nobody can tell whether the entry was made.
            StorageError: the storage failed, and the entry was not made.
            UsageError: a change holds a value that no reader would take; nothing was written.
        """
        self.make_store()
        deadline = time.monotonic() + self.patience
        backoff = _FIRST_BACKOFF
        while True:
            state = self.state()
            changes = tuple(decide(state))
            if not changes:
                return Committed(state=state, entry=None)
            entry = self._next_entry(state, changes)
            self._refuse_unreadable(entry)
            if self._try(entry):
                return self._settle(state, entry)
            if time.monotonic() > deadline:
                raise ConflictError(
                    f"entry {entry.seq} of {self.blobs.url} could not be made in {self.patience:.0f} s",
                    why="other writers were faster each time; nothing of this commit was written",
                    remedy="repeat it, or commit many changes at once",
                )
            time.sleep(_random.uniform(0, backoff))
            backoff = min(backoff * 2, _LONGEST_BACKOFF)

    def _next_entry(self, state: State, changes: tuple[Change, ...]) -> Entry:
        moment = max(datetime.now(UTC), state.time)  # a clock that jumped back must not reorder history
        return Entry(seq=state.seq + 1, prev=state.digest, writer=new_token(), time=moment, changes=changes)

    def _refuse_unreadable(self, entry: Entry) -> None:
        """An entry is never rewritten: one that its readers refuse would end the store for good."""
        try:
            Entry.from_bytes(entry.to_bytes(), "the new entry", entry.seq)
        except (MultiLoRAError, ValueError, TypeError) as error:
            raise UsageError(
                f"entry {entry.seq} of {self.blobs.url} was not made: no reader would take it",
                why=error.why or error.what if isinstance(error, MultiLoRAError) else str(error),
                remedy="give values of the documented types; the store is as it was",
                seq=entry.seq,
            ) from error

    def _try(self, entry: Entry) -> bool:
        """Creates the entry; True if it is ours, False if that number is somebody else's.

        The answer of the storage is never believed in doubt: the entry is read back and compared, which its
        writer's token makes exact. While it is absent, the same bytes are sent again under the same number.
        """
        key, data = entry_key(entry.seq, entry.writer if self.marker.single_writer else ""), entry.to_bytes()
        failure: StorageError | None = None
        for attempt in range(_REPEATS):
            if attempt:
                time.sleep(_random.uniform(0, min(0.05 * 2**attempt, 2.0)))
            try:
                if self.blobs.create(key, data):
                    return True
                failure = None
            except StorageError as error:
                failure = error
            try:
                found = self.blobs.read(key)
            except StorageError as error:
                failure = failure or error
                continue
            if found is not None:
                return found == data
            if isinstance(failure, (StorageDeniedError, StorageFullError)):
                raise failure
        raise OutcomeUnknownError(
            f"nobody can tell whether entry {entry.seq} of {self.blobs.url} was made",
            why=str(failure.why if failure else "the storage kept refusing to create it, yet it is absent"),
            remedy="read the log when the storage answers again: the entry is made if it carries this writer",
            seq=entry.seq,
            writer=entry.writer,
        ) from failure

    def _settle(self, before: State, entry: Entry) -> Committed:
        """Folds our own entry, and leaves the derived files for others; none of them may fail the commit."""
        state = self._fold(Fold(before), before, [entry])
        self._remember(state)
        try:
            if state.seq % CHECKPOINT_EVERY == 0 and not self.marker.single_writer:
                self.blobs.create(checkpoint_key(state.seq), state.to_bytes())
            self.write_hint(state)
        except MultiLoRAError as error:
            log.warning("the commit is made, but its hint is not: %s", error.what)
        return Committed(state=state, entry=entry)

    def write_hint(self, state: State) -> None:
        """Writes `head.json` for `state`; the checkpoint it names is written by whoever made that entry."""
        checkpoint = state.seq // CHECKPOINT_EVERY * CHECKPOINT_EVERY
        hint = {"seq": state.seq, "digest": state.digest, "checkpoint": checkpoint}
        self.blobs.write(HEAD, dump(hint))

    def make_store(self) -> None:
        """Makes the root a store if it is none, and checks that this version may write it.

        Raises:
            StoreFormatError: it may not.
            StorageError: the storage does not keep the exclusive creation that this store counts on.
        """
        if self._marker is None:
            self._marker = find_marker(self.blobs)
        if self._marker is None:
            self._marker = create_marker(self.blobs, single_writer=not exclusive_create_holds(self.blobs))
        self._marker.check_writable(self.blobs.url)
        if not self._marker.single_writer and not exclusive_create_holds(self.blobs):
            raise StorageError(
                f"{self.blobs.url} cannot be written here",
                why="its journal counts on exclusive creation, which this storage does not keep",
                remedy="write it through storage that does (see doctor), or sync it into a new store here",
            )

    def rebuild_hints(self) -> None:
        """Writes the newest checkpoint, if it is damaged or missing, and the hint anew, from the whole history.

        Raises:
            DamagedError: the history itself is damaged.
        """
        if self.marker.single_writer:
            return
        state = self.refold()
        seq = state.seq // CHECKPOINT_EVERY * CHECKPOINT_EVERY
        if seq and self._read_checkpoint(seq) is None:
            start = self._genesis()
            past = self._fold(Fold(start), start, self.entries(1, seq))
            self.blobs.write(checkpoint_key(seq), past.to_bytes())
        self.write_hint(state)

    def __getstate__(self) -> dict[str, Any]:
        return {"blobs": self.blobs, "patience": self.patience}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
