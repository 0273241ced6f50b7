"""The plan of a sync: from two folded states and their last common point to the changes of one import.

Pure: nothing here reads or writes. Versions and snapshots are compared by content ids and by who put or
removed them after the common point, never by time or size.

The rules. What the source has and the target lacks moves, unless the target removed it after it had taken it
over. What the source removed goes from the target only when asked for, and only if nothing of the target
holds on to it. Both sides keep their versions; where both moved `latest` or a tag, `diverged` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

from multilora_store.adapter import check_new_name
from multilora_store.errors import ConflictError, UsageError
from multilora_store.storage.changes import Change, Delete, DropSnapshot, Origin, Tag, Untag
from multilora_store.storage.divergence import Common, Diverged, decide_latest
from multilora_store.storage.selection import Selection
from multilora_store.storage.state import Snapshot, State, Version

__all__ = ["Place", "SyncPlan", "common_origin", "plan_sync"]

Place: TypeAlias = Callable[[Version], tuple[str, str, int]]
"""From a version of the source to where its content lies in the target: (directory, record's SHA-256, bytes)."""

_DIVERGED: Final = ("source", "target", "refuse")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """What one import entry does.

    Attributes:
        puts: Versions that the target puts, oldest first; some of them only to be its latest again.
        snapshots: Snapshots that it takes.
        tags, untags, deletes, drops: The other changes.
        diverged: What both sides moved, and who decided.
        kept: What the target keeps although the source has removed it, and what it leaves out; and why.
    """

    puts: tuple[Version, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    tags: tuple[Tag, ...] = ()
    untags: tuple[Untag, ...] = ()
    deletes: tuple[Delete, ...] = ()
    drops: tuple[DropSnapshot, ...] = ()
    diverged: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def removals(self) -> int:
        """How many versions and snapshots go."""
        return len(self.deletes) + len(self.drops)

    @property
    def empty(self) -> bool:
        return not (self.puts or self.snapshots or self.tags or self.untags or self.removals)

    def contents(self, target: State) -> tuple[Version, ...]:
        """Versions whose content the target does not hold, each content once."""
        wanted = {v.digest: v for v in self.puts if target.holding(v.digest) is None}
        return tuple(wanted.values())

    def changes(self, place: Place) -> list[Change]:
        """The changes, in the order in which they are folded: removals last."""
        puts: list[Change] = []
        for version in self.puts:
            directory, record, nbytes = place(version)
            puts.append(replace(version.as_put(), directory=directory, record=record, nbytes=nbytes))
        takes = [snapshot.as_change() for snapshot in self.snapshots]
        return [*puts, *self.tags, *takes, *self.untags, *self.drops, *self.deletes]


def common_origin(state: State, other: str, scope: str) -> Origin | None:
    """The newest point of store `other` up to which `state` has taken over at least `scope`."""
    found = [state.origins[key] for key in {other, f"{other}/{scope}"} if key in state.origins]
    return max(found, key=lambda origin: origin.seq, default=None)


def plan_sync(
    source: State,
    target: State,
    *,
    selection: Selection,
    base: State | None = None,
    known: Sequence[State] = (),
    since: Origin | None = None,
    delete: bool = False,
    diverged: Diverged = "source",
    where: str = "the source",
) -> SyncPlan:
    """What brings `target` up to `source`.

    Args:
        source, target: Both as they are now.
        selection: The part to take.
        base: Either store as it was at their last common point; None: there is none.
        known: What the target knows: the source as it last took it over, and itself as the source last took it over.
            The two need not be equal: where both had moved, each may have kept its own.
        since: The point up to which the target has taken over the source, if it ever has.
        delete: Also removes what the source has removed.
        diverged: Who decides what both sides moved.

    Raises:
        UsageError: `diverged` is none of its choices, or `delete` with a selection of single versions.
        NotInStoreError: the selected snapshot is not there.
        NameNotAllowedError: an adapter's name differs by case only from one of the target's.
        ConflictError: both sides moved something, and `diverged` is "refuse".
    """
    if diverged not in _DIVERGED:
        raise UsageError(f"unknown rule for diverged stores {diverged!r}", remedy=f"valid: {', '.join(_DIVERGED)}")
    if delete and selection.partial:
        raise UsageError(
            "delete goes with whole adapters, not with a snapshot or tags",
            remedy="leave delete out, or select by include and exclude",
        )
    planner = _Planner(source, target, selection, base, known, since, delete, diverged, where)
    plan = planner.plan()
    if plan.diverged and diverged == "refuse":
        raise ConflictError(
            f"both stores moved {', '.join(plan.diverged[:5])}",
            why=f"and {len(plan.diverged) - 5} more" if len(plan.diverged) > 5 else "",
            remedy="diverged=source or diverged=target says whose latest and tags stay; all versions are kept",
            diverged=list(plan.diverged),
        )
    return plan


class _Planner:
    """One planning: what the parts of a plan share."""

    def __init__(
        self,
        source: State,
        target: State,
        selection: Selection,
        base: State | None,
        known: Sequence[State],
        since: Origin | None,
        delete: bool,
        diverged: Diverged,
        where: str,
    ) -> None:
        self.whole, self.target, self.selection = source, target, selection
        self.source = selection.of(source, where)
        self.base, self.since = base, since
        self.back = common_origin(source, target.store_id, "")
        # Up to this entry of the source, the target has seen everything or has given it.
        self.seen = max(since.seq if since else 0, self.back.at if self.back else 0)
        self.there = max(since.at if since else 0, self.back.seq if self.back else 0)
        self.delete, self.rule = delete, diverged
        common = Common(
            taken=since.seq if since else 0, seen=self.seen, there=self.there, known=known,
            given=known[-1] if self.back and known else None,
        )  # fmt: skip
        self.winners, moved = decide_latest(self.source, target, common, diverged)
        self.diverged = [] if selection.partial else [f"latest of {name}" for name in moved]
        self.kept: list[str] = []

    def plan(self) -> SyncPlan:
        known = dict.fromkeys(self.target.adapters)
        snapshots = self._snapshots()
        tags, untags = self._tags()
        needed = {(tag.name, tag.id) for tag in tags}
        needed |= {(n, m.version or "") for s in snapshots for n, m in s.adapters.items()}
        drops = self._drops() if self.delete else []
        deletes = self._deletes(tags, untags, snapshots, drops) if self.delete else []
        gone = {(change.name, change.id) for change in deletes}
        puts: list[Version] = []
        for name in sorted(self.source.adapters):
            wanted = list(self._puts(name, needed))
            if wanted:
                known[check_new_name(name, known)] = None
            puts += self._ordered(name, wanted, gone)
        return SyncPlan(
            puts=tuple(puts), snapshots=tuple(snapshots), tags=tuple(tags), untags=tuple(untags),
            deletes=tuple(deletes), drops=tuple(drops), diverged=tuple(self.diverged), kept=tuple(self.kept),
        )  # fmt: skip

    # Versions.

    def _puts(self, name: str, needed: set[tuple[str, str]]) -> Iterator[Version]:
        """Versions of `name` that the target lacks, or whose description the source has renewed."""
        there = self._target_versions(name)
        for version in self.source.versions(name):
            known = there.get(version.id)
            if known is not None:
                if version.described != known.described and self._renewed(version, known):
                    yield version
            elif (name, version.id) in needed or not self._removed_by_target(version):
                yield version
            else:
                self.kept.append(f"{version} was deleted in the target")

    def _renewed(self, ours: Version, theirs: Version) -> bool:
        """Whether the source's description of a version that both have is the one to keep."""
        by_source, by_target = ours.seq > self.seen, theirs.seq > self.there
        return by_source and (not by_target or self.winners.get(ours.name, self.rule) == "source")

    def _removed_by_target(self, version: Version) -> bool:
        """Whether the target deleted the version after it had taken it over, or before it gave it to the source."""
        stone = self.target.deleted.get((version.name, version.id))
        if stone is None:
            return False
        if self.since is not None and version.seq <= self.since.seq:
            return True
        return self.back is not None and version.seq <= self.back.at and stone.seq > self.back.seq

    def _ordered(self, name: str, wanted: list[Version], gone: set[tuple[str, str]]) -> list[Version]:
        """`wanted`, and whatever must be put (again) so that the right version is the latest."""
        if self.selection.partial:
            return wanted
        there = self._target_versions(name)
        left = [version for version in there.values() if (name, version.id) not in gone]
        latest = self._latest(name)
        newest = wanted[-1] if wanted else (left[-1] if left else None)
        if latest is None or newest is None or newest.id == latest.id or (name, latest.id) in gone:
            return wanted
        mine = [version for version in wanted if version.id == latest.id]
        if not mine and latest.id not in there:
            return wanted  # the target deleted it, and that stands
        return [*(v for v in wanted if v.id != latest.id), *(mine or [there[latest.id]])]

    def _latest(self, name: str) -> Version | None:
        """The version that should be the target's latest of `name`."""
        if name in self.winners:
            state = self.source if self.winners[name] == "source" else self.target
        else:
            state = self.source if self.source.versions(name) else self.target
        return state.adapters[name].latest if name in state.adapters else None

    # Tags.

    def _tags(self) -> tuple[list[Tag], list[Untag]]:
        tags: list[Tag] = []
        untags: list[Untag] = []
        for name, adapter in sorted(self.source.adapters.items()):
            there = self.target.adapters[name].tags if name in self.target.adapters else {}
            before = self._base_tags(name)
            # A union in a fixed order: equal states give equal entries.
            for tag in sorted({*adapter.tags, *before}):
                ours, theirs, old = adapter.tags.get(tag), there.get(tag), before.get(tag)
                if ours in (theirs, old):
                    continue
                if ours is None:
                    if theirs == old and self.delete:
                        untags.append(Untag(name=name, tag=tag))
                    continue
                if theirs not in (None, old):
                    self.diverged.append(f"tag {tag} of {name}")
                    if self.rule != "source":
                        continue
                if not self._tag_undone(name, tag, ours):
                    tags.append(Tag(name=name, tag=tag, id=ours))
        return tags, untags

    def _tag_undone(self, name: str, tag: str, identity: str) -> bool:
        """Whether the target removed a version that only this tag, with no common point, would bring back."""
        version = self.source.adapters[name].versions[identity]
        undone = identity not in self._target_versions(name) and self._removed_by_target(version)
        if undone and self.base is None:
            self.kept.append(f"tag {tag} of {name}: its version was deleted in the target")
            return True
        return False

    def _base_tags(self, name: str) -> Mapping[str, str]:
        if self.base is None or name not in self.base.adapters:
            return {}
        tags = self.base.adapters[name].tags
        if not self.selection.tags:
            return {} if self.selection.partial else tags
        return {t: v for t, v in tags.items() if any(fnmatchcase(t, p) for p in self.selection.tags)}

    # Snapshots.

    def _snapshots(self) -> list[Snapshot]:
        taken = []
        for snapshot in self.source.snapshots.values():
            if snapshot.id in self.target.snapshots:
                continue
            if snapshot.directory in self.target.purged:
                self.kept.append(f"snapshot {snapshot.id} was purged in the target")
            elif self._dropped_by_target(snapshot):
                self.kept.append(f"snapshot {snapshot.id} was dropped in the target")
            else:
                taken.append(snapshot)
        return taken

    def _dropped_by_target(self, snapshot: Snapshot) -> bool:
        dropped = self.target.dropped.get(snapshot.id)
        if dropped is None:
            return False
        if self.since is not None and snapshot.seq <= self.since.seq:
            return True
        return self.back is not None and snapshot.seq <= self.back.at and dropped > self.back.seq

    # Removals.

    def _drops(self) -> list[DropSnapshot]:
        return [
            DropSnapshot(id=snapshot.id)
            for snapshot in self.target.snapshots.values()
            if all(self.selection.takes(name) for name in snapshot.adapters)
            and self._given_up(snapshot.seq, self.whole.dropped.get(snapshot.id))
        ]

    def _deletes(
        self, tags: list[Tag], untags: list[Untag], snapshots: list[Snapshot], drops: list[DropSnapshot]
    ) -> list[Delete]:
        dropped = {change.id for change in drops}
        left = [*(s for s in self.target.snapshots.values() if s.id not in dropped), *snapshots]
        held = {(n, m.version): f"snapshot {s.id}" for s in left for n, m in s.adapters.items()}
        deletes = []
        for name in filter(self.selection.takes, self.target.adapters):
            after = {**self.target.adapters[name].tags, **{t.tag: t.id for t in tags if t.name == name}}
            for untag in (u for u in untags if u.name == name):
                after.pop(untag.tag, None)
            tagged = {identity: f"tag {tag}" for tag, identity in after.items()}
            for version in self.target.versions(name):
                stone = self.whole.deleted.get((name, version.id))
                if not self._given_up(version.seq, stone.seq if stone else None):
                    continue
                holder = tagged.get(version.id) or held.get((name, version.id))
                if holder:
                    self.kept.append(f"{version} is gone from the source, but {holder} of the target names it")
                else:
                    deletes.append(Delete(name=name, id=version.id))
        return deletes

    def _given_up(self, seq: int, removed: int | None) -> bool:
        """Whether the source removed what the target has had since the common point and has not put anew."""
        if removed is None:
            return False
        if self.since is not None and seq <= self.since.at:
            return True
        return self.back is not None and seq <= self.back.seq and removed > self.back.at

    # What the parts ask.

    def _target_versions(self, name: str) -> Mapping[str, Version]:
        adapter = self.target.adapters.get(name)
        return adapter.versions if adapter else {}
