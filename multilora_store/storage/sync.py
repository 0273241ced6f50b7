"""sync: brings one store up to another by content, in one entry, files before the entry that names them.

Both journals are folded and compared; nothing is decided by times, sizes or ETags. The import entry records
the point of the source that it brings the target to, so that the next sync knows at two requests a side
whether anything has happened since, and two stores that both moved on are a three-way decision.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

from multilora_store.errors import (
    ConflictError,
    ProtectedError,
    StoreNotFoundError,
    UntrustedError,
    UsageError,
)
from multilora_store.storage.arguments import as_several, of_type
from multilora_store.storage.changes import Change, Import, Origin
from multilora_store.storage.divergence import Diverged
from multilora_store.storage.journal import Journal
from multilora_store.storage.progress import Listener
from multilora_store.storage.selection import Selection
from multilora_store.storage.state import State
from multilora_store.storage.store import Store, open_store
from multilora_store.storage.sync_plan import SyncPlan, common_origin, plan_sync
from multilora_store.storage.transfer import VanishedError
from multilora_store.storage.upload import Upload

__all__ = ["SyncReport", "sync"]

MAX_DELETE: Final = 100
JOBS: Final = 32

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What a sync did, or would do.

    Attributes:
        source, target: The URLs, free of secrets.
        plan: The changes of the import entry.
        seq: That entry; None if nothing was written.
        contents: Versions whose files were copied (each content once).
        files, nbytes: What was copied or, in a dry run, what versions and snapshots would come to.
        resumed: Files that a killed sync had copied already.
        seconds: How long it took.
        dry_run: Whether nothing was written.
    """

    source: str
    target: str
    plan: SyncPlan
    seq: int | None = None
    contents: int = 0
    files: int = 0
    nbytes: int = 0
    resumed: int = 0
    seconds: float = 0.0
    dry_run: bool = False

    @property
    def unchanged(self) -> bool:
        """Whether the target was up to date."""
        return self.plan.empty

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "source": self.source, "target": self.target, "seq": self.seq, "dry_run": self.dry_run,
            "unchanged": self.unchanged, "versions": [str(version) for version in plan.puts],
            "snapshots": [snapshot.id for snapshot in plan.snapshots],
            "tags": [f"{tag.name}@{tag.tag} -> {tag.id}" for tag in plan.tags],
            "untagged": [f"{tag.name}@{tag.tag}" for tag in plan.untags],
            "deleted": [f"{gone.name}@{gone.id}" for gone in plan.deletes], "dropped": [d.id for d in plan.drops],
            "diverged": list(plan.diverged), "kept": list(plan.kept), "contents": self.contents, "files": self.files,
            "nbytes": self.nbytes, "resumed": self.resumed, "seconds": round(self.seconds, 3),
        }  # fmt: skip


def sync(
    source: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str] | Store,
    *,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    snapshot: str | None = None,
    tags: Sequence[str] | None = None,
    delete: bool = False,
    max_delete: int = MAX_DELETE,
    diverged: Diverged = "source",
    dry_run: bool = False,
    jobs: int = JOBS,
    bandwidth: float | None = None,
    progress: Listener | None = None,
) -> SyncReport:
    """Brings `target` up to `source`; safe to kill at any moment, to repeat, and to run twice at once.

    Args:
        source: A store, its URL, or a folder of plain PEFT adapters, which are imported.
        target: A store, its URL (it becomes one if it is none), or a folder of plain PEFT adapters, into which
            the latest versions are exported.
        include, exclude: Patterns of adapters.
        snapshot: Takes just the set of one snapshot, with its files: `latest` or an id.
        tags: Takes just the versions with a tag of these patterns.
        delete: Also removes what the source has removed since it was taken over. What only the target ever had
            stays, and so does what one of its tags or snapshots names.
        max_delete: Refuses, before anything is done, to remove more versions and snapshots than that.
        diverged: Whose `latest` and tags stay where both sides moved them: "source", "target", or "refuse".
        dry_run: Only plans.
        jobs: How many files are under way at a time.
        bandwidth: Bytes a second; None: no limit.
        progress: Called after each file.

    Raises:
        StoreNotFoundError: the source is neither a store nor a folder of adapters.
        ProtectedError: more would be removed than `max_delete`.
        ConflictError: the stores diverged and that is refused, or the source is not the one it was.
        DamagedError: a file of the source is not what was stored; the target is as it was.
        UntrustedError: a store was opened with trusted keys, and none of them signed what is to be brought.
        StorageError: one of the storages failed; repeat it, and what was copied is not copied again.
    """
    selection = Selection(
        include=as_several(include, "include"), exclude=as_several(exclude, "exclude"),
        tags=as_several(tags or (), "tags"), snapshot=snapshot,
    )  # fmt: skip
    of_type(jobs, int, "jobs", "a whole number")
    of_type(max_delete, int, "max_delete", "a whole number")
    started = time.monotonic()
    source, target = _opened(source), _opened(target)
    if source.url == target.url:
        raise UsageError(f"{source.url} is both source and target", remedy="give two roots")
    plain = _plain_sync(source, target, selection, dry_run)
    if plain is not None:
        return plain
    job = _Job(source, target, selection, delete, max_delete, diverged, jobs, bandwidth, progress)
    report = job.report(SyncPlan()) if job.unchanged() else job.again_if_vanished(dry_run)
    return replace(report, seconds=time.monotonic() - started, dry_run=dry_run)


def _opened(store: str | os.PathLike[str] | Store) -> Store:
    return store if isinstance(store, Store) else open_store(store)


def _plain_sync(source: Store, target: Store, selection: Selection, dry_run: bool) -> SyncReport | None:
    """A sync with a plain folder at one end; None: both ends are stores, or the target will be one."""
    from multilora_store.storage import plain_sync

    if not _is_store(source):
        if source.files.trusted is not None and plain_sync.holds_adapters(source.blobs):
            raise UntrustedError(
                f"{source.url} is a folder of plain adapters, which nobody signed",
                remedy="import it into a store with a signing_key, then sync that store",
            )
        return plain_sync.import_folder(source.blobs, target, selection, dry_run=dry_run)
    if not _is_store(target) and plain_sync.holds_adapters(target.blobs):
        return plain_sync.export_folder(source, target.blobs, selection, dry_run=dry_run)
    return None


def _is_store(store: Store) -> bool:
    try:
        store.journal.marker  # noqa: B018
    except StoreNotFoundError:
        return False
    return True


@dataclass
class _Job:
    """One sync between two stores."""

    source: Store
    target: Store
    selection: Selection
    delete: bool
    max_delete: int
    diverged: Diverged
    jobs: int
    bandwidth: float | None
    progress: Listener | None

    def unchanged(self) -> bool:
        """Whether the target's newest entry is the import of the source's newest; found without folding."""
        if not _is_store(self.target):
            return False
        ours, theirs = _both(self.source.journal.peek, self.target.journal.peek)
        if ours is None or theirs is None or len(theirs.changes) != 1:
            return False
        change = theirs.changes[0]
        if not isinstance(change, Import) or not (change.origin.delete or not self.delete):
            return False
        found = change.origin
        same = (found.store, found.digest) == (self.source.journal.marker.id, ours.digest)
        return same and found.scope in ("", self.selection.scope)

    def again_if_vanished(self, dry_run: bool) -> SyncReport:
        """Syncs; where a gc of the source freed what was about to be copied, once more from the newest state."""
        try:
            return self.sync_once(dry_run)
        except VanishedError as error:
            log.info("syncing again from the newest state: %s", error.what)
            return self.sync_once(dry_run)

    def sync_once(self, dry_run: bool) -> SyncReport:
        ours, theirs = _both(self.source.journal.state, self._target_state)
        plan, since = self.plan(ours, theirs)
        if dry_run:
            return self._dry_report(plan, theirs)
        if plan.empty and self._nothing_to_record(ours, theirs, since):
            return self.report(plan)
        self.target.journal.make_store()
        return self._apply(ours)

    def plan(self, ours: State, theirs: State) -> tuple[SyncPlan, Origin | None]:
        """The plan, and the point up to which the target has taken over the source.

        Raises:
            ProtectedError: it removes more than `max_delete`.
            UntrustedError: either store trusts keys, of which none signed a version that is to be brought.
        """
        since = self._since(ours, theirs)
        plan = plan_sync(
            ours, theirs, selection=self.selection, base=self._base(ours, theirs, since),
            known=self._known(ours, theirs, since), since=since,
            delete=self.delete, diverged=self.diverged, where=self.source.url,
        )  # fmt: skip
        for trusted in filter(None, (self.source.files.trusted, self.target.files.trusted)):
            for version in plan.puts:
                trusted.check(version, self.source.url)
        if plan.removals > self.max_delete:
            raise ProtectedError(
                f"the sync would remove {plan.removals} versions and snapshots from {self.target.url}",
                why=f"at most {self.max_delete} may go; nothing was done",
                remedy="look at dry_run, then raise max_delete if that is what you want",
                removals=plan.removals,
            )
        return plan, since

    def _apply(self, ours: State) -> SyncReport:
        upload = Upload(
            self.source.blobs, self.target.blobs, self.source.journal.marker.id, jobs=self.jobs,
            bandwidth=self.bandwidth, progress=self.progress,
        )  # fmt: skip
        made: list[SyncPlan] = []

        def decide(theirs: State) -> list[Change]:
            nonlocal ours
            known = common_origin(theirs, ours.store_id, self.selection.scope)
            if known is not None and known.seq > ours.seq:
                ours = self.source.journal.state()  # another sync was here with a newer source
            plan, since = self.plan(ours, theirs)
            made.append(plan)
            if plan.empty and self._nothing_to_record(ours, theirs, since):
                return []
            upload.bring(plan, theirs)
            changes = plan.changes(lambda version: upload.place(version, theirs))
            origin = Origin(
                store=ours.store_id, seq=ours.seq, digest=ours.digest, scope=self.selection.scope, delete=self.delete
            )
            return [Import(origin=origin, changes=tuple(changes))]

        done = self.target.journal.commit(decide)
        upload.finish()
        report = self.report(made[-1], None if done.entry is None else done.entry.seq)
        return replace(
            report, contents=upload.contents, files=upload.files, nbytes=upload.nbytes, resumed=upload.resumed
        )

    def _since(self, ours: State, theirs: State) -> Origin | None:
        since = common_origin(theirs, ours.store_id, self.selection.scope)
        if ours.store_id == theirs.store_id:  # a copy of the source's files: their journals begin alike
            shared = _shared_prefix(self.source.journal, self.target.journal, ours, theirs)
            if since is None or shared.seq > since.seq:
                since = shared
        return since

    def _base(self, ours: State, theirs: State, since: Origin | None) -> State | None:
        """One of the stores as it was when both were last known to agree."""
        back = common_origin(ours, theirs.store_id, "")
        if since is None and back is None:
            return None
        if since is not None and (back is None or since.seq >= back.at):
            return self._past(self.source.journal, ours, since)
        assert back is not None
        return self._past(self.target.journal, theirs, back)

    def _known(self, ours: State, theirs: State, since: Origin | None) -> tuple[State, ...]:
        """What the target knows already: the source as it last took it over, and what it gave the source itself."""
        back = common_origin(ours, theirs.store_id, "")
        taken = () if since is None else (self._past(self.source.journal, ours, since),)
        return taken if back is None else (*taken, self._past(self.target.journal, theirs, back))

    def _past(self, journal: Journal, now: State, point: Origin) -> State:
        if point.digest == now.digest:
            return now
        past = journal.state_at(point.seq) if point.seq <= now.seq else None
        if past is None or past.digest != point.digest:
            raise ConflictError(
                f"{journal.blobs.url} is not what it was when the stores were synced",
                why=f"its entry {point.seq} is {'gone' if past is None else 'another'}: it was restored or replaced",
                remedy="sync into a new store, or restore the newer copy of the journal",
                seq=point.seq,
            )
        return past

    def _nothing_to_record(self, ours: State, theirs: State, since: Origin | None) -> bool:
        """Whether an empty plan needs no entry: the point is known, or the source only took over the target."""
        if since is None:
            return not ours.seq
        if self.delete and not since.delete:
            return False
        if since.seq == ours.seq:
            return True
        return all(
            len(entry.changes) == 1
            and isinstance(change := entry.changes[0], Import)
            and change.origin.store == theirs.store_id
            and not change.changes
            for entry in self.source.journal.entries(since.seq + 1, ours.seq)
        )

    def _target_state(self) -> State:
        return self.target.journal.state() if _is_store(self.target) else State(store_id="")

    def _dry_report(self, plan: SyncPlan, theirs: State) -> SyncReport:
        contents = plan.contents(theirs)
        records = [record for snapshot in plan.snapshots for record in snapshot.files.values()]
        return replace(
            self.report(plan), contents=len(contents), files=3 * len(contents) + len(records),
            nbytes=sum(v.nbytes for v in contents) + sum(record.size for record in records),
        )  # fmt: skip

    def report(self, plan: SyncPlan, seq: int | None = None) -> SyncReport:
        return SyncReport(source=self.source.url, target=self.target.url, plan=plan, seq=seq)


def _both(left: Callable[[], Any], right: Callable[[], Any]) -> tuple[Any, Any]:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(right)
        return left(), other.result()


def _shared_prefix(source: Journal, target: Journal, ours: State, theirs: State) -> Origin:
    """The last entry that two journals of one store's copies have in common; halving, as each names the one before."""
    low, high = 0, min(ours.seq, theirs.seq)
    while low < high:
        middle = (low + high + 1) // 2
        if source.entry(middle).digest == target.entry(middle).digest:
            low = middle
        else:
            high = middle - 1
    digest = source.entry(low).digest if low else source.marker.genesis
    return Origin(store=ours.store_id, seq=low, digest=digest, at=low)
