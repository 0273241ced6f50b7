"""The set that a command works on: from the manifest, a snapshot or a lock file, every reference resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from multilora_store.cli.settings import AdapterEntry, SetOptions
from multilora_store.cli.sources import configured_adapters
from multilora_store.cli.stores import local_path
from multilora_store.errors import ManifestError, StoreNotFoundError, UsageError
from multilora_store.manifest import Lock

if TYPE_CHECKING:
    from multilora_store.storage import Store

__all__ = ["declared", "locked"]

_SHOWN: Final = 12


def declared(adapters: Mapping[str, AdapterEntry]) -> dict[str, dict[str, Any]]:
    """The manifest as plain entries; a relative path in a source is from the working directory."""
    return {
        name: {key: value for key, value in asdict(entry).items() if not (key == "source" and value is None)}
        for name, entry in adapters.items()
    }


def _stored(store: Store | None) -> list[str]:
    try:
        return store.names() if store is not None else []
    except StoreNotFoundError:
        return []


def _some(names: Sequence[str]) -> str:
    known = list(dict.fromkeys(names))
    return ", ".join(known[:_SHOWN]) + (f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else "")


def locked(options: SetOptions, store: Store | None) -> Lock:
    """The lock of the one set that was asked for.

    Raises:
        UsageError: none, or more than one of manifest, snapshot and lock file; a snapshot without a store.
        ManifestError: the lock file cannot be read, or is none.
        NotInStoreError: an adapter or snapshot that is found nowhere.
    """
    from multilora_store.assembly.resolve import lock_snapshot, resolve_manifest

    ways = {"+adapters=[...]": options.adapters, "snapshot=": options.snapshot, "lock_from=": options.lock_from}
    given = [way for way, value in ways.items() if value]
    if len(given) > 1:
        raise ManifestError(f"the set is given twice: {' and '.join(given)}", remedy="leave all but one out")
    if not given:
        names = [*configured_adapters(), *_stored(store)]
        raise ManifestError(
            "no adapters are chosen",
            why=f"there are {_some(names)}" if names else "neither the configuration nor the store has any",
            remedy=f"choose some: '+adapters=[{','.join(names[:2]) or 'a,b'}]'; or snapshot=latest; or lock_from=FILE",
        )
    if options.lock_from:
        file = Path(local_path(options.lock_from))
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ManifestError(f"the lock {file} cannot be read: {error.strerror or error}") from error
        return Lock.from_json(text, where=str(file))
    if options.snapshot:
        if store is None:
            raise UsageError("snapshot= needs a store", remedy="give store.url=FOLDER-or-URL, or set MULTILORA_STORE")
        return lock_snapshot(store, options.snapshot)
    return resolve_manifest(declared(options.adapters), store, known=configured_adapters())
