"""gc: frees what no state names any more, by a rule that needs no clock to be right.

What the folded state does not name is purged through the journal first: from then on nobody can name it
again, for a writer whose commit meets the purge uploads anew. Files go when the purge is older than the
grace period, by the storage's own clock; that protects readers and saves work, nothing rests on it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from multilora_store.errors import ConflictError, DamagedError, StorageError, UsageError
from multilora_store.storage.blobs import BlobInfo, Blobs
from multilora_store.storage.changes import Change, Purge, check_directory
from multilora_store.storage.contents import RECORD_FILE
from multilora_store.storage.entries import entry_key, parse_journal_key
from multilora_store.storage.local import LocalBlobs
from multilora_store.storage.progress import Listener, Meter
from multilora_store.storage.state import State

if TYPE_CHECKING:
    from multilora_store.storage.changing import ChangingStore

__all__ = ["Directory", "GcPlan", "GcReport", "gc", "plan_gc"]

DAY: Final = timedelta(days=1)
_WRITE: Final = timedelta(hours=1)  # no single write takes longer: an older temporary file is nobody's
_AT_ONCE: Final = 300  # folders, of three files each: no more than one request of S3 deletes
_ROOTS: Final = ("adapters/", "snapshots/")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """One folder of a version or of a snapshot as it lies on storage, and what gc makes of it.

    Attributes:
        path: Below the root.
        keys: Its files; the record, which makes it a version, first.
        nbytes: Bytes of its files.
        newest: When the last of them was written, by the storage's clock.
        why: Why it is purged, freed or kept.
    """

    path: str
    keys: tuple[str, ...]
    nbytes: int
    newest: datetime
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "files": len(self.keys), "nbytes": self.nbytes, "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlan:
    """What one pass would do: name in a purge entry, remove, and leave alone."""

    purge: tuple[Directory, ...]
    free: tuple[Directory, ...]
    keep: tuple[Directory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What a gc did, or would do.

    Attributes:
        purged: Folders that the purge entry of this gc names; their files stay for the grace period.
        freed: Folders that were removed.
        kept: Every other folder, and why.
        seq: The purge entry; None if nothing was purged.
        dry_run: Whether nothing was written or removed.
    """

    purged: tuple[Directory, ...]
    freed: tuple[Directory, ...]
    kept: tuple[Directory, ...]
    seq: int | None
    dry_run: bool

    @property
    def nbytes(self) -> int:
        """Bytes that were freed."""
        return sum(directory.nbytes for directory in self.freed)

    def to_json(self) -> dict[str, Any]:
        return {
            "purged": [d.to_json() for d in self.purged], "freed": [d.to_json() for d in self.freed],
            "kept": [d.to_json() for d in self.kept], "nbytes": self.nbytes, "seq": self.seq, "dry_run": self.dry_run,
        }  # fmt: skip


def gc(
    store: ChangingStore, *, grace: timedelta = DAY, dry_run: bool = False, progress: Listener | None = None
) -> GcReport:
    """Frees the files of deleted versions, dropped snapshots and abandoned uploads.

    Safe beside any number of writers and readers, and to kill at any moment. A storage without exclusive
    creation has one writer only: there a purge and the removal of its files take two calls, and a folder that
    looks like a save at work refuses the gc.

    Args:
        store: The store.
        grace: How long purged files stay, and how long an upload that no entry names is taken for one at work.
        dry_run: Changes nothing; ages are then judged by this machine's clock.
        progress: Called as folders are removed, with the bytes of their files.

    Raises:
        UsageError: `grace` is negative.
        ConflictError: a save is at work on a storage for a single writer.
        StorageError: the storage failed; the next gc goes on where this one stopped.
    """
    if grace < timedelta(0):
        raise UsageError(f"the grace period is {grace}", remedy="give zero or more")
    journal = store.journal
    single = journal.marker.single_writer
    listing = _list(store.blobs)
    state = journal.state()
    now = datetime.now(UTC) if dry_run else _storage_time(store.blobs)
    times = _purge_times(store.blobs, state, listing, single=single)
    plan = plan_gc(state, listing, purged_at=times, now=now, grace=grace)
    if single:
        _refuse_beside_save(store, plan, state, now, grace)
    if dry_run:
        # With no grace, what is purged is freed by the same call.
        freed = plan.free + (plan.purge if not grace and not single else ())
        return GcReport(purged=plan.purge, freed=freed, kept=plan.keep, seq=None, dry_run=True)
    before = plan.free

    def decide(newest: State) -> list[Change]:
        nonlocal plan
        plan = plan_gc(newest, listing, purged_at=times, now=now, grace=grace)
        return [Purge(directories=tuple(d.path for d in plan.purge))] if plan.purge else []

    done = journal.commit(decide)
    if not single:
        times = {**times, **_purge_times(store.blobs, done.state, listing, single=False, known=times)}
    final = plan_gc(done.state, listing, purged_at=times, now=max([now, *times.values()]), grace=grace)
    free = [d for d in (before if single else final.free) if d.path not in done.state.directories()]
    _remove(store.blobs, free, progress)
    if isinstance(store.blobs, LocalBlobs):
        store.blobs.sweep(now - max(grace, _WRITE))
    removed = {d.path for d in free}
    return GcReport(
        purged=plan.purge, freed=tuple(free), kept=tuple(d for d in final.keep if d.path not in removed),
        seq=None if done.entry is None else done.entry.seq, dry_run=False,
    )  # fmt: skip


def plan_gc(
    state: State, listing: Iterable[Directory], *, purged_at: Mapping[int, datetime], now: datetime, grace: timedelta
) -> GcPlan:
    """What to purge, free and keep of the folders on storage.

    Args:
        state: The newest state; what it names is kept, whatever else holds.
        listing: The folders on storage, listed before `state` was read or after: both are safe.
        purged_at: When purge entries were written, by the storage's clock; one that is missing is too young.
        now: The storage's time.
        grace: See `gc`.
    """
    named, gone = _named(state), _gone(state)
    purge: list[Directory] = []
    free: list[Directory] = []
    keep: list[Directory] = []
    for found in listing:
        entry = state.purged.get(found.path)
        if found.path in named:
            keep.append(_because(found, named[found.path]))
        elif entry is not None:
            moment = purged_at.get(entry)
            if moment is not None and now - moment >= grace:
                free.append(_because(found, f"purged by entry {entry}"))
            else:
                keep.append(_because(found, f"purged by entry {entry}, younger than the grace period of {grace}"))
        elif found.path in gone:
            purge.append(_because(found, gone[found.path]))
        elif now - found.newest >= grace:
            purge.append(_because(found, "no entry of the present state names it"))
        else:
            keep.append(_because(found, f"not named, but written less than {grace} ago: perhaps a save at work"))
    return GcPlan(purge=tuple(purge), free=tuple(free), keep=tuple(keep))


def _because(directory: Directory, why: str) -> Directory:
    return Directory(
        path=directory.path, keys=directory.keys, nbytes=directory.nbytes, newest=directory.newest, why=why
    )


def _named(state: State) -> dict[str, str]:
    """Every folder that the state names, and by what."""
    holders: dict[str, list[str]] = defaultdict(list)
    snapshots: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for snapshot in state.snapshots.values():
        holders[snapshot.directory].append(f"snapshot {snapshot.id}")
        for name, member in snapshot.adapters.items():
            snapshots[name, member.version].append(f"snapshot {snapshot.id}")
    for name, adapter in state.adapters.items():
        tags: dict[str, list[str]] = defaultdict(list)
        for tag, identity in adapter.tags.items():
            tags[identity].append(f"tag {tag}")
        for version in adapter.versions.values():
            words = [str(version), *tags[version.id], *snapshots[name, version.id]]
            holders[version.directory].append(", ".join(words))
    return {path: "; ".join(words) for path, words in holders.items()}


def _gone(state: State) -> dict[str, str]:
    """Folders of deleted versions, by what deleted them."""
    return {
        stone.directory: f"{name}@{identity} was deleted by entry {stone.seq}"
        for (name, identity), stone in state.deleted.items()
    }


def _list(blobs: Blobs) -> list[Directory]:
    """The folders of versions and snapshots on storage; files that are not ours are left alone."""
    found: dict[str, list[BlobInfo]] = defaultdict(list)
    for root in _ROOTS:
        depth = 3 if root == "adapters/" else 2
        for info in blobs.list(root):
            parts = info.key.split("/")
            path = "/".join(parts[:depth])
            if len(parts) > depth and _ours(path):
                found[path].append(info)
    return [_directory(path, infos) for path, infos in sorted(found.items())]


def _ours(path: str) -> bool:
    try:
        check_directory(path)
    except DamagedError:
        log.warning("gc leaves %s alone: it is not the folder of a version", path)
        return False
    return True


def _directory(path: str, infos: Sequence[BlobInfo]) -> Directory:
    record = f"{path}/{RECORD_FILE}"
    keys = sorted((info.key for info in infos), key=lambda key: (key != record, key))
    return Directory(
        path=path, keys=tuple(keys), nbytes=sum(info.size for info in infos), newest=max(info.mtime for info in infos)
    )


def _purge_times(
    blobs: Blobs,
    state: State,
    listing: Iterable[Directory],
    *,
    single: bool,
    known: Mapping[int, datetime] | None = None,
) -> dict[int, datetime]:
    """When the purge entries that still have files on storage were written, by the storage's clock."""
    wanted = {state.purged[d.path] for d in listing if d.path in state.purged} - set(known or ())
    if not wanted:
        return {}
    if single:
        listed = [(parse_journal_key(info.key), info.mtime) for info in blobs.list("journal/")]
        return {key.seq: moment for key, moment in listed if key and not key.checkpoint and key.seq in wanted}
    found = ((seq, blobs.stat(entry_key(seq))) for seq in sorted(wanted))
    return {seq: info.mtime for seq, info in found if info is not None}


def _storage_time(blobs: Blobs) -> datetime:
    """The storage's time now: that of a file written for it."""
    key = f"probes/clock-{secrets.token_hex(6)}"
    try:
        blobs.write(key, b"now\n")
        info = blobs.stat(key)
    finally:
        blobs.delete([key])
    if info is None:
        raise StorageError(
            f"{blobs.url} does not show a file that was just written",
            remedy="gc needs a storage that reads what it wrote; try again",
        )
    return info.mtime


def _refuse_beside_save(store: ChangingStore, plan: GcPlan, state: State, now: datetime, grace: timedelta) -> None:
    directories = state.directories()
    young = [d for d in plan.keep if d.path not in directories and d.path not in state.purged]
    if young:
        raise ConflictError(
            f"{store.url} is for a single writer, and {young[0].path} looks like a save at work",
            why=f"it was written {now - young[0].newest} ago and no entry names it",
            remedy=f"run gc when nobody saves; an abandoned upload stops counting as one after {grace}",
            directory=young[0].path,
        )


def _remove(blobs: Blobs, directories: Sequence[Directory], progress: Listener | None) -> None:
    """Removes the files of purged folders, each record before the files that it describes."""
    meter = Meter(progress, files=len(directories), nbytes=sum(directory.nbytes for directory in directories))
    for at in range(0, len(directories), _AT_ONCE):
        some = directories[at : at + _AT_ONCE]
        doomed = [key for directory in some for key in directory.keys]
        started = time.monotonic()
        blobs.delete(doomed)
        log.info("gc removed %d files of %s in %.1f s", len(doomed), blobs.url, time.monotonic() - started)
        meter.add(sum(directory.nbytes for directory in some), files=len(some))
