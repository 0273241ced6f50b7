"""Changing: tags, deletions and what protects from them, each one entry that puts no version."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from multilora_store.adapter import Ref, check_name, check_tag
from multilora_store.errors import ConflictError, NotInStoreError, ProtectedError, choices
from multilora_store.storage.arguments import as_ref, of_type
from multilora_store.storage.changes import Change, Delete, DropSnapshot, Tag, Untag
from multilora_store.storage.journal import Journal
from multilora_store.storage.refs import find_snapshot
from multilora_store.storage.state import Snapshot, State, Version
from multilora_store.storage.view import StoreView

if TYPE_CHECKING:
    from multilora_store.storage.gc import GcReport
    from multilora_store.storage.progress import Listener

__all__ = ["ChangingStore"]


class ChangingStore(StoreView):
    """A store whose tags, versions and snapshots can be set and taken away."""

    def tag(self, ref: str | Ref, tag: str) -> Version:
        """Points `tag` at the version that `ref` names now; a tag that exists moves."""
        check_tag(tag)
        version = self.resolve(ref)

        def decide(state: State) -> list[Change]:
            self._still_live(state, version)
            return [Tag(name=version.name, tag=tag, id=version.id)]

        self._existing().commit(decide)
        return version

    def untag(self, name: str, tag: str) -> None:
        """Removes `tag` from adapter `name`; the version that it named stays.

        Raises:
            NotInStoreError: there is no such tag.
        """
        check_name(name)
        check_tag(tag)

        def decide(state: State) -> list[Change]:
            tags = state.adapters[name].tags if name in state.adapters else {}
            if tag not in tags:
                raise NotInStoreError(f"{name} has no tag {tag!r} in {self.url}", remedy=choices(tag, tags, noun="tag"))
            return [Untag(name=name, tag=tag)]

        self._existing().commit(decide)

    def delete(self, ref: str | Ref) -> Version:
        """Deletes the version that `ref` names; its files stay until a gc.

        A tag in `ref` itself goes along; any other tag, and any snapshot, that names the version protects it.

        Raises:
            ProtectedError: a tag or a snapshot names it.
        """
        wanted = as_ref(ref)
        version = self.resolve(wanted)
        given = {wanted.selector} if wanted.kind == "tag" else set()

        def decide(state: State) -> list[Change]:
            self._still_live(state, version)
            _refuse_held(str(version), _holders(state, version, given), version=version.id)
            tags = state.adapters[version.name].tags
            untags: list[Change] = [
                Untag(name=version.name, tag=tag) for tag in sorted(tags) if tags[tag] == version.id
            ]
            return [*untags, Delete(name=version.name, id=version.id)]

        self._existing().commit(decide)
        return version

    def delete_all(self, name: str) -> list[Version]:
        """Deletes every version of `name` in one entry; their files stay until a gc.

        Returns:
            The versions that were live, oldest put first.

        Raises:
            NotInStoreError: there is no such adapter.
            ProtectedError: a tag or a snapshot names one of them; all of them stay.
        """
        gone = self.versions(name)

        def decide(state: State) -> list[Change]:
            gone[:] = state.versions(name)  # what came meanwhile goes too
            if not gone:
                raise ConflictError(f"{name} was deleted while this was decided", name=name)
            holders = [f"{holder} ({each.id})" for each in gone for holder in _holders(state, each)]
            _refuse_held(f"{name} with its {len(gone)} versions", holders, name=name)
            return [Delete(name=name, id=each.id) for each in gone]

        self._existing().commit(decide)
        return gone

    def drop_snapshot(self, snapshot_id: str) -> Snapshot:
        """Drops a snapshot; versions that only it protected may then be deleted."""
        snapshot = self.snapshot(snapshot_id)

        def decide(state: State) -> list[Change]:
            find_snapshot(state, snapshot.id, self.url)
            return [DropSnapshot(id=snapshot.id)]

        self._existing().commit(decide)
        return snapshot

    def gc(
        self, *, grace: timedelta = timedelta(days=1), dry_run: bool = False, progress: Listener | None = None
    ) -> GcReport:
        """Frees what nothing names any more; see `storage.gc`."""
        from multilora_store.storage.gc import gc

        of_type(grace, timedelta, "grace", "a timedelta, as in timedelta(days=1)")
        return gc(self, grace=grace, dry_run=dry_run, progress=progress)

    def _existing(self) -> Journal:
        """The journal of a store that exists; a change of what is there must not make a new store."""
        self.journal.marker  # noqa: B018
        return self.journal

    def _still_live(self, state: State, version: Version) -> None:
        if version.name not in state.adapters or version.id not in state.adapters[version.name].versions:
            raise ConflictError(
                f"{version} was deleted while this was decided", remedy="name another version", version=version.id
            )


def _holders(state: State, version: Version, given: Collection[str] = ()) -> list[str]:
    """The tags but for `given`, and the snapshots, that name a version."""
    tags = state.adapters[version.name].tags
    holders = sorted(f"tag {tag}" for tag, identity in tags.items() if identity == version.id and tag not in given)
    return holders + [f"snapshot {snapshot.id}" for snapshot in state.snapshots.values() if snapshot.names(version)]


def _refuse_held(what: str, holders: Sequence[str], **facts: str) -> None:
    if holders:
        raise ProtectedError(
            f"{what} is named by {', '.join(holders[:5])}",
            why=f"and by {len(holders) - 5} more" if len(holders) > 5 else "",
            remedy="untag it and drop those snapshots first",
            holders=list(holders),
            **facts,
        )
