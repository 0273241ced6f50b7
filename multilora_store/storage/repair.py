"""repair: damaged versions moved aside or mended from another store, snapshots' files and entries too, hints made anew.

The damaged bytes are kept under `quarantine/`, for whoever wants to know what happened. A version whose very
bytes another store holds is mended where it lies; one whose content another store holds in other bytes is put
again in a new folder; one that nobody holds is deleted, unless a tag or a snapshot names it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from multilora_store.errors import StoreError
from multilora_store.storage.arguments import of_type
from multilora_store.storage.changes import Change, Delete, check_directory
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE, RECORD_FILE
from multilora_store.storage.journal_repair import EntriesPlan, plan_entries, restore_entries
from multilora_store.storage.progress import Listener
from multilora_store.storage.state import Snapshot, State, Version
from multilora_store.storage.transfer import Transfer, bound_directory
from multilora_store.storage.verify import check_journal
from multilora_store.storage.view import StoreView

if TYPE_CHECKING:
    from multilora_store.storage.store import Store
    from multilora_store.storage.verify import Finding

__all__ = ["RepairPlan", "RepairReport", "plan_repair", "repair"]

# What is stored is not what was put; other findings (a NaN, a rank) are true of what was put.
_DAMAGE: Final = frozenset({"missing", "record", "config", "size", "header", "hash"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """What a repair does.

    Attributes:
        mend: By folder, the version of the other store whose bytes go there.
        renew: By folder, the version of the other store with the same content in other bytes.
        aside: Versions that nobody holds, to be deleted.
        files: Files of snapshots, (snapshot, path), that the other store holds.
        entries: Numbers of journal entries that a copy of this store holds, and whose place there is proved.
        left: What stays damaged, and why.
    """

    mend: Mapping[str, Version]
    renew: Mapping[str, Version]
    aside: tuple[Version, ...]
    files: tuple[tuple[Snapshot, str], ...]
    left: tuple[str, ...]
    entries: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What a repair found and did.

    Attributes:
        findings: What verify found before.
        plan: What was done about it.
        quarantined: Keys of the damaged files that were kept.
        seq: The entry that was made; None: none was needed.
        dry_run: Whether nothing was written.
    """

    findings: tuple[Finding, ...]
    plan: RepairPlan
    quarantined: tuple[str, ...] = ()
    seq: int | None = None
    dry_run: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing stays damaged."""
        return not self.plan.left

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "findings": [finding.to_json() for finding in self.findings], "mended": sorted(plan.mend),
            "renewed": sorted(plan.renew), "deleted": [str(version) for version in plan.aside],
            "snapshot_files": [f"{snapshot.directory}/{path}" for snapshot, path in plan.files],
            "entries": list(plan.entries), "left": list(plan.left),
            "quarantined": list(self.quarantined), "seq": self.seq, "dry_run": self.dry_run,
        }  # fmt: skip


def repair(
    store: Store,
    *,
    from_: Store | None = None,
    deep: bool = True,
    threads: int = 4,
    dry_run: bool = False,
    progress: Listener | None = None,
) -> RepairReport:
    """Verifies the store and mends what can be mended; safe to repeat.

    Args:
        store: The store.
        from_: Another store to take whole copies from, by content.
        deep: Reads every byte; without it, only sizes and records are compared.
        threads: How many versions are checked side by side.
        dry_run: Only verifies and plans.
        progress: Called after each version that is checked, then after each file that is copied.

    Raises:
        StorageError: one of the storages failed.
        DamagedError: the other store's copy is damaged as well.
    """
    if from_ is not None:
        of_type(from_, StoreView, "from_", "a store, as open_store(...) returns it")
    journal = check_journal(store)
    history = plan_entries(store, from_) if journal and from_ is not None else EntriesPlan()
    quarantined = () if dry_run else tuple(restore_entries(store, history))
    if journal and (dry_run or not history.entries):
        return _journal_alone(journal, history, dry_run)
    findings = (*journal, *store.verify(deep=deep, threads=threads, progress=progress).findings)
    state = store.state()
    plan = plan_repair(state, findings[len(journal) :], None if from_ is None else from_.state())
    plan = replace(plan, entries=tuple(history.entries), left=(*plan.left, *filter(None, [history.left])))
    if dry_run:
        return RepairReport(findings=findings, plan=plan, dry_run=True)
    quarantined += _quarantine(store, plan)
    if from_ is not None:
        placed = {bound_directory(state, version): version for version in plan.renew.values()}
        Transfer(from_.blobs, store.blobs, jobs=threads, progress=progress).run({**plan.mend, **placed})
        for snapshot, path in plan.files:
            store.blobs.write(f"{snapshot.directory}/{path}", from_.read_snapshot_file(snapshot, path))
    done = store.journal.commit(lambda newest: _changes(newest, plan))
    if not any(finding.kind == "journal" for finding in findings[len(journal) :]):
        store.journal.rebuild_hints()
    return RepairReport(
        findings=findings, plan=plan, quarantined=quarantined, seq=None if done.entry is None else done.entry.seq
    )


def _journal_alone(journal: Sequence[Finding], history: EntriesPlan, dry_run: bool) -> RepairReport:
    """Nothing can be said of versions, and nothing be committed, while the history itself is damaged."""
    left = [f"{finding.subject}: {finding.message}" for finding in journal] if not history.entries else []
    plan = RepairPlan(
        mend={}, renew={}, aside=(), files=(), entries=tuple(history.entries),
        left=(*left, *filter(None, [history.left])),
    )  # fmt: skip
    return RepairReport(findings=tuple(journal), plan=plan, dry_run=dry_run)


def plan_repair(state: State, findings: Sequence[Finding], other: State | None) -> RepairPlan:
    """What to do about `findings`, with the copies that `other` names."""
    damaged: dict[str, list[str]] = defaultdict(list)
    left: list[str] = []
    for finding in findings:
        directory = _directory_of(finding.path)
        if finding.kind not in _DAMAGE or directory is None:
            left.append(f"{finding.subject}: {finding.message}")
        else:
            damaged[directory].append(finding.path)
    versions: dict[str, list[Version]] = defaultdict(list)
    for version in state.live():
        versions[version.directory].append(version)
    snapshots = {snapshot.directory: snapshot for snapshot in state.snapshots.values()}
    mend: dict[str, Version] = {}
    renew: dict[str, Version] = {}
    aside: list[Version] = []
    files: list[tuple[Snapshot, str]] = []
    for directory, paths in damaged.items():
        if directory in snapshots:
            found, words = _plan_files(snapshots[directory], paths, other)
            files += found
            left += words
            continue
        donor = other.holding(versions[directory][0].digest) if other is not None else None
        if donor is None:
            free, words = _plan_aside(state, versions[directory])
            aside += free
            left += words
        else:
            (mend if donor.record == versions[directory][0].record else renew)[directory] = donor
    return RepairPlan(mend=mend, renew=renew, aside=tuple(aside), files=tuple(files), left=tuple(left))


def _directory_of(key: str) -> str | None:
    parts = key.split("/")
    path = "/".join(parts[: 3 if parts[0] == "adapters" else 2])
    try:
        return check_directory(path)
    except StoreError:
        return None


def _plan_files(
    snapshot: Snapshot, paths: Sequence[str], other: State | None
) -> tuple[list[tuple[Snapshot, str]], list[str]]:
    files, left = [], []
    donor = other.snapshots.get(snapshot.id) if other is not None else None
    for key in dict.fromkeys(paths):
        path = key.removeprefix(f"{snapshot.directory}/")
        if donor is not None and donor.files.get(path) == snapshot.files[path]:
            files.append((snapshot, path))
        else:
            left.append(f"{key}: no other store holds it; drop snapshot {snapshot.id} if it is of no use without")
    return files, left


def _plan_aside(state: State, versions: Sequence[Version]) -> tuple[list[Version], list[str]]:
    free, left = [], []
    for version in versions:
        holders = [f"tag {t}" for t, i in state.adapters[version.name].tags.items() if i == version.id]
        holders += [f"snapshot {s.id}" for s in state.snapshots.values() if s.names(version)]
        if holders:
            left.append(f"{version} is damaged, and {', '.join(holders[:3])} names it: nobody else holds its content")
        else:
            free.append(version)
    return free, left


def _quarantine(store: Store, plan: RepairPlan) -> tuple[str, ...]:
    """Keeps the damaged bytes of what will be written over."""
    keys = [f"{d}/{file}" for d in plan.mend for file in (MODEL_FILE, CONFIG_FILE, RECORD_FILE)]
    keys += [f"{snapshot.directory}/{path}" for snapshot, path in plan.files]
    kept = []
    for key in keys:
        data = store.blobs.read(key)
        if data is not None:
            store.blobs.write(f"quarantine/{key}", data)
            kept.append(f"quarantine/{key}")
    return tuple(kept)


def _changes(state: State, plan: RepairPlan) -> list[Change]:
    """Puts of what lies in a new folder, in the adapter's order, and deletions of what nobody holds."""
    changes: list[Change] = []
    fresh = {version.digest: version for version in plan.renew.values()}
    for adapter in state.adapters.values():
        order = list(adapter.versions.values())
        first = next((n for n, v in enumerate(order) if v.directory in plan.renew), len(order))
        for version in order[first:]:  # those after it are put again as well, so that the order stays
            donor = fresh.get(version.digest) if version.directory in plan.renew else None
            if donor is None:
                changes.append(version.as_put())
            else:
                directory = bound_directory(state, donor)
                put = replace(version.as_put(), directory=directory, record=donor.record, nbytes=donor.nbytes)
                changes.append(put)
    live = {(version.name, version.id, version.directory) for version in state.live()}
    gone = [v for v in plan.aside if (v.name, v.id, v.directory) in live and not _plan_aside(state, [v])[1]]
    return [*changes, *(Delete(name=version.name, id=version.id) for version in gone)]
