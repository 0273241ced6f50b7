"""Restoring: brings adapters, or the whole store, back to a past state - as a new entry, never a rewrite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from multilora_store.errors import NotInStoreError, PurgedError, choices
from multilora_store.storage.arguments import of_type
from multilora_store.storage.changes import Change, Delete, DropSnapshot, Put, Tag, Untag
from multilora_store.storage.diff import StateDiff, diff_states
from multilora_store.storage.state import AdapterState, Fold, State, Version

if TYPE_CHECKING:
    from multilora_store.storage.store import Store

__all__ = ["RestoreReport", "plan_restore", "restore_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did: the difference that it made, and its entry (None: nothing differed, or a dry run)."""

    diff: StateDiff
    seq: int | None
    dry_run: bool


def restore_state(
    store: Store,
    to: int | datetime | State,
    *,
    adapters: Sequence[str] = ("*",),
    exact: bool = False,
    dry_run: bool = False,
) -> RestoreReport:
    """Makes the past state the present one: latest versions, tags and snapshots are there again as they were.

    Args:
        store: The store.
        to: The number of an entry, a moment, or a state of this store.
        adapters: Patterns of the adapters to bring back; snapshots go along with the whole store only.
        exact: Also removes what came later; without it nothing is removed: later versions, tags, adapters and
            snapshots stay.
        dry_run: Only plans.

    Raises:
        NotInStoreError: no such entry, or no such adapter then.
        PurgedError: a version or snapshot of that state has been freed since.
    """
    past = _state_at(store, to)
    chosen = [name for name in past.adapters if any(fnmatchcase(name, pattern) for pattern in adapters)]
    if not chosen and past.adapters and tuple(adapters) != ("*",):
        raise NotInStoreError(
            f"{store.url} had no adapter like {', '.join(adapters)} after entry {past.seq}",
            remedy=choices(adapters[0], past.names(), noun="adapter"),
        )
    before: list[State] = []

    def decide(state: State) -> list[Change]:
        before.append(state)
        return plan_restore(state, past, adapters=adapters, exact=exact, where=store.url)

    if dry_run:
        changes = decide(store.state())
        return RestoreReport(diff=diff_states(before[-1], _folded(before[-1], changes)), seq=None, dry_run=True)
    store.journal.marker  # noqa: B018  (a root that is no store is an error)
    done = store.journal.commit(decide)
    return RestoreReport(
        diff=diff_states(before[-1], done.state), seq=done.entry.seq if done.entry else None, dry_run=False
    )


def plan_restore(
    state: State, past: State, *, adapters: Sequence[str] = ("*",), exact: bool = False, where: str = "the store"
) -> list[Change]:
    """The changes that make `past` the present.

    Raises:
        PurgedError: something of it has been freed.
    """
    whole = tuple(adapters) == ("*",)
    names = sorted(n for n in {*past.adapters, *state.adapters} if any(fnmatchcase(n, p) for p in adapters))
    # Snapshots stay as they are when single adapters go back, and so does what they name.
    staying = () if whole else state.snapshots.values()
    held = {(name, member.version) for snapshot in staying for name, member in snapshot.adapters.items()}
    puts: list[Change] = []
    tags: list[Change] = []
    removals: list[Change] = []
    for name in names:
        then, now = past.adapters.get(name, AdapterState()), state.adapters.get(name, AdapterState())
        puts.extend(_puts(state, then, now, where))
        tags += [Tag(name=name, tag=t, id=i) for t, i in sorted(then.tags.items()) if now.tags.get(t) != i]
        if exact:
            tags += [Untag(name=name, tag=t) for t in sorted(now.tags) if t not in then.tags]
        if exact:
            later = (i for i in now.versions if i not in then.versions and (name, i) not in held)
            removals += [Delete(name=name, id=i) for i in later]
    takes = _takes(state, past, where) if whole else []
    drops = [DropSnapshot(id=i) for i in state.snapshots if i not in past.snapshots] if whole and exact else []
    return [*puts, *takes, *tags, *drops, *removals]


def _puts(state: State, then: AdapterState, now: AdapterState, where: str) -> list[Put]:
    """Versions to bring back, in their old order, so that the latest of then is the latest."""
    missing = [version for version in then.versions.values() if version.id not in now.versions]
    latest = then.latest
    puts = [_placed(state, version, where) for version in missing if latest is None or version.id != latest.id]
    current = puts[-1].id if puts else (now.latest.id if now.latest else None)
    if latest is not None and (current != latest.id or latest in missing):
        puts.append(_placed(state, now.versions.get(latest.id, latest), where))
    return puts


def _placed(state: State, version: Version, where: str) -> Put:
    held = state.holding(version.digest)
    if held is not None:
        return replace(version.as_put(), directory=held.directory, record=held.record, nbytes=held.nbytes)
    entry = state.purged.get(version.directory)
    if entry is not None:
        raise PurgedError(
            f"{version} cannot be restored in {where}: entry {entry} purged it",
            why="it was deleted, and a gc freed its files",
            remedy="sync it from another store that still holds it, or restore other adapters",
            version=version.id,
            entry=entry,
        )
    return version.as_put()


def _takes(state: State, past: State, where: str) -> list[Change]:
    taken: list[Change] = []
    for snapshot in past.snapshots.values():
        if snapshot.id in state.snapshots:
            continue
        entry = state.purged.get(snapshot.directory)
        if entry is not None:
            raise PurgedError(
                f"snapshot {snapshot.id} cannot be restored in {where}: entry {entry} purged its files",
                remedy="restore single adapters (adapters=...), which leaves snapshots as they are",
                entry=entry,
            )
        taken.append(snapshot.as_change())
    return taken


def _state_at(store: Store, to: int | datetime | State) -> State:
    if isinstance(to, State):
        return to
    if isinstance(to, datetime):
        return store.journal.state_at_moment(to)
    of_type(to, int, "the state to restore", "the number of an entry, a datetime, or a State")
    newest = store.state().seq
    if not 0 <= to <= newest:
        raise NotInStoreError(f"{store.url} has no entry {to}", remedy=f"its entries are 1 to {newest}", seq=to)
    return store.journal.state_at(to)


def _folded(state: State, changes: Sequence[Change]) -> State:
    fold = Fold(state)
    for change in changes:
        fold.apply(change, state.seq + 1, state.time)
    return fold.finish(state.seq + 1, state.digest, state.time)
