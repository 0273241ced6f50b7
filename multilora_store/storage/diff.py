"""diff: what lies between two states of a store, or of two stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from multilora_store.storage.state import AdapterState, State

__all__ = ["AdapterDiff", "StateDiff", "diff_states"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDiff:
    """What changed of one adapter.

    Attributes:
        put: Ids of versions that only the later state has, oldest first.
        gone: Ids of versions that only the earlier state has.
        latest: The latest version before and after, where they differ.
        tags: By tag, the version before and after (None: there was, or is, no such tag).
    """

    name: str
    put: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    latest: tuple[str | None, str | None] | None = None
    tags: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.put or self.gone or self.latest or self.tags)

    def to_json(self) -> dict[str, Any]:
        return {
            "put": list(self.put), "gone": list(self.gone), "latest": list(self.latest) if self.latest else None,
            "tags": {tag: list(change) for tag, change in self.tags.items()},
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDiff:
    """What changed between two states.

    Attributes:
        adapters: Every adapter that differs, by name; sorted.
        added, removed: Adapters that only one of the states has.
        taken, dropped: Snapshots that only one of the states has.
    """

    adapters: Mapping[str, AdapterDiff]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    taken: tuple[str, ...]
    dropped: tuple[str, ...]

    @property
    def empty(self) -> bool:
        return not (self.adapters or self.taken or self.dropped)

    def to_json(self) -> dict[str, Any]:
        return {
            "adapters": {name: change.to_json() for name, change in self.adapters.items()},
            "added": list(self.added), "removed": list(self.removed),
            "taken": list(self.taken), "dropped": list(self.dropped),
        }  # fmt: skip


def diff_states(before: State, after: State) -> StateDiff:
    """What lies between `before` and `after`, two states of one store or of two; equal content is equal."""
    old, new = set(before.names()), set(after.names())
    changes = (_diff_adapter(name, before.adapters.get(name), after.adapters.get(name)) for name in sorted(old | new))
    return StateDiff(
        adapters={change.name: change for change in changes if not change.empty},
        added=tuple(sorted(new - old)),
        removed=tuple(sorted(old - new)),
        taken=tuple(i for i in after.snapshots if i not in before.snapshots),
        dropped=tuple(i for i in before.snapshots if i not in after.snapshots),
    )


def _diff_adapter(name: str, before: AdapterState | None, after: AdapterState | None) -> AdapterDiff:
    old, new = before or AdapterState(), after or AdapterState()
    latest = (old.latest.id if old.latest else None, new.latest.id if new.latest else None)
    tags = {tag: (old.tags.get(tag), new.tags.get(tag)) for tag in sorted({*old.tags, *new.tags})}
    return AdapterDiff(
        name=name,
        put=tuple(i for i in new.versions if i not in old.versions),
        gone=tuple(i for i in old.versions if i not in new.versions),
        latest=latest if latest[0] != latest[1] else None,
        tags={tag: change for tag, change in tags.items() if change[0] != change[1]},
    )
