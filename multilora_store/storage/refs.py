"""Refs: from a name, id, tag or date to one version, or to an error that says what there is instead."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import NoReturn

from multilora_store.adapter import Ref
from multilora_store.errors import NotInStoreError, PurgedError, choices
from multilora_store.storage.state import Snapshot, State, Version

__all__ = ["find_snapshot", "resolve"]


def resolve(state: State, ref: Ref, url: str, *, at: Callable[[datetime], State]) -> Version:
    """The version that `ref` names.

    Args:
        state: The store now.
        url: The store, for messages.
        at: Gives the state as of a moment; asked only for dates.

    Raises:
        NotInStoreError: no such adapter, version or tag, or several versions begin with that id.
        PurgedError: it was there, and its files were purged.
    """
    version = _find(state, ref, url, at)
    entry = state.purged.get(version.directory)
    if entry is not None:
        _purged(version.name, version.id, entry, url)
    return version


def _find(state: State, ref: Ref, url: str, at: Callable[[datetime], State]) -> Version:
    moment = ref.moment
    if moment is not None:
        version = _latest(at(moment), ref.name)
        if version is None:
            raise NotInStoreError(
                f"{ref.name} had no version on {ref.selector} in {url}",
                remedy=_first_time(state, ref.name),
                ref=str(ref),
            )
        return version
    adapter = state.adapters.get(ref.name)
    if adapter is None or (not adapter.versions and ref.kind != "id"):
        why = "all its versions were deleted" if adapter is not None else ""
        raise NotInStoreError(
            f"no adapter {ref.name!r} in {url}", why=why,
            remedy=choices(ref.name, state.names(), noun="adapter"), name=ref.name,
        )  # fmt: skip
    if ref.kind == "latest":
        found = adapter.latest
        assert found is not None
        return found
    if ref.kind == "id":
        return _by_id(state, ref, url)
    if ref.selector in adapter.tags:
        return adapter.versions[adapter.tags[ref.selector]]
    raise NotInStoreError(
        f"{ref.name} has no tag {ref.selector!r} in {url}",
        remedy=choices(ref.selector, ["latest", *adapter.tags], noun="tag"),
        ref=str(ref),
    )


def _latest(state: State, name: str) -> Version | None:
    adapter = state.adapters.get(name)
    return adapter.latest if adapter else None


def _first_time(state: State, name: str) -> str:
    versions = state.versions(name)
    if not versions:
        return choices(name, state.names(), noun="adapter")
    return f"its oldest live version is of {versions[0].time:%Y-%m-%dT%H:%M:%SZ}"


def _by_id(state: State, ref: Ref, url: str) -> Version:
    adapter = state.adapters[ref.name]
    matches = [version for identity, version in adapter.versions.items() if identity.startswith(ref.selector)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise NotInStoreError(
            f"{ref} is not unique in {url}",
            why=f"it begins {', '.join(version.id for version in matches)}",
            remedy="give more digits",
            ref=str(ref),
        )
    _explain_gone(state, ref, url)
    raise NotInStoreError(
        f"{ref.name} has no version {ref.selector} in {url}",
        remedy=choices(ref.selector, adapter.versions, noun="version"),
        ref=str(ref),
    )


def _explain_gone(state: State, ref: Ref, url: str) -> None:
    """Raises what is known of a version that was deleted."""
    for (name, identity), stone in state.deleted.items():
        if name == ref.name and identity.startswith(ref.selector):
            if stone.directory in state.purged:
                _purged(name, identity, state.purged[stone.directory], url)
            raise NotInStoreError(
                f"{name}@{identity} was deleted from {url} by entry {stone.seq}",
                remedy="its files stay until a gc; restore brings it back until then",
                ref=str(ref),
                entry=stone.seq,
            )


def _purged(name: str, identity: str, entry: int, url: str) -> NoReturn:
    raise PurgedError(
        f"{name}@{identity} was purged from {url} by entry {entry}",
        why="it was deleted, and a gc freed its files",
        remedy="restore it from another store that still holds it",
        entry=entry,
        version=identity,
    )


def find_snapshot(state: State, wanted: str, url: str) -> Snapshot:
    """The snapshot with that id, a unique beginning of it, or `latest`.

    Raises:
        NotInStoreError: no such snapshot, or several.
    """
    snapshots = list(state.snapshots.values())
    if wanted == "latest" and snapshots:
        return max(snapshots, key=lambda snapshot: snapshot.seq)
    exact = state.snapshots.get(wanted)
    if exact is not None:
        return exact
    matches = [snapshot for snapshot in snapshots if wanted and snapshot.id.startswith(wanted)]
    if len(matches) == 1:
        return matches[0]
    raise NotInStoreError(
        f"no snapshot {wanted!r} in {url}"
        if not matches
        else f"{len(matches)} snapshots begin with {wanted!r} in {url}",
        remedy=choices(wanted, ["latest", *state.snapshots] if snapshots else [], noun="snapshot"),
        snapshot=wanted,
    )
