"""Selection: the part of a store that a sync takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from multilora_store.storage.records import sha256
from multilora_store.storage.refs import find_snapshot
from multilora_store.storage.state import Snapshot, State

__all__ = ["Selection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which part of a source a sync takes.

    Attributes:
        include: Patterns of adapters.
        exclude: Patterns of adapters that are left out all the same.
        tags: Patterns of tags: only the versions that they name, and no snapshot; empty: every version.
        snapshot: One snapshot, its versions and files; None: every snapshot whose adapters are all taken.
    """

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    snapshot: str | None = None

    @property
    def partial(self) -> bool:
        """Whether it takes some versions of an adapter without others."""
        return bool(self.tags) or self.snapshot is not None

    @property
    def scope(self) -> str:
        """A short name for the selection; empty for everything."""
        if self == Selection():
            return ""
        parts = [sorted(self.include), sorted(self.exclude), sorted(self.tags), self.snapshot]
        return sha256(json.dumps(parts).encode())[:16]

    def takes(self, name: str) -> bool:
        """Whether adapter `name` is part of it."""
        included = any(fnmatchcase(name, pattern) for pattern in self.include)
        return included and not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def of(self, state: State, where: str) -> State:
        """The part of `state` that is selected, as a state of its own.

        Raises:
            NotInStoreError: the snapshot is not there.
        """
        if self.snapshot is not None:
            return self._of_snapshot(state, find_snapshot(state, self.snapshot, where))
        adapters = {name: adapter for name, adapter in state.adapters.items() if self.takes(name)}
        if not self.tags:
            snapshots = {i: s for i, s in state.snapshots.items() if all(self.takes(name) for name in s.adapters)}
            return replace(state, adapters=adapters, snapshots=snapshots)
        for name, adapter in adapters.items():
            tags = {t: v for t, v in adapter.tags.items() if any(fnmatchcase(t, p) for p in self.tags)}
            chosen = {i: version for i, version in adapter.versions.items() if i in tags.values()}
            adapters[name] = replace(adapter, versions=chosen, tags=tags)
        return replace(state, adapters=adapters, snapshots={})

    def _of_snapshot(self, state: State, snapshot: Snapshot) -> State:
        adapters = {}
        for name, member in snapshot.adapters.items():
            adapter = state.adapters[name]
            chosen = {i: version for i, version in adapter.versions.items() if i == member.version}
            adapters[name] = replace(adapter, versions=chosen, tags={})
        return replace(state, adapters=adapters, snapshots={snapshot.id: snapshot})
