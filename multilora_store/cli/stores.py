"""The store that a command works on: opened from its options, refused in words where none is configured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilora_store.adapter import source_kind
from multilora_store.cli.demo import NOTE, demo_store_folder, seed_store
from multilora_store.cli.schema import Common
from multilora_store.cli.terminal import Terminal
from multilora_store.errors import UsageError

if TYPE_CHECKING:
    from multilora_store.storage import Store

__all__ = ["local_path", "opened_store", "other_store", "store_for_set", "store_if_any"]


def opened_store(options: Common, terminal: Terminal) -> Store:
    """The configured store; the demo's is filled first.

    Raises:
        UsageError: none is configured.
    """
    store = store_for_set(options, terminal)
    if store is None:
        raise UsageError(
            "no store is configured",
            remedy="give store.url=FOLDER or any fsspec URL, or set MULTILORA_STORE",
        )
    return store


def store_if_any(options: Common, terminal: Terminal, *, create_demo: bool = False) -> Store | None:
    """The configured store, or None; the demo's only if it is there already or may be created."""
    from multilora_store.storage import open_store

    if options.store.demo and not options.store.url:
        folder = demo_store_folder()
        if not create_demo and not folder.exists():
            return None
        terminal.note(NOTE.format(folder=folder))
        url = str(folder)
    elif options.store.url:
        url = local_path(options.store.url)
    elif options.store.trusted_keys is not None:
        raise UsageError(
            "store.trusted_keys is given, and no store",
            why="what is read without one is signed by nobody",
            remedy="name the store, whose keys hold for the others that the set names: store.url=...",
        )
    else:
        return None
    return open_store(
        url,
        signing_key=options.store.signing_key,
        trusted_keys=options.store.trusted_keys,
        **options.store.options,
    )


def store_for_set(options: Common, terminal: Terminal, *, first: bool = True) -> Store | None:
    """The configured store, or None; the demo's is made and filled by the `first` of the ranks."""
    store = store_if_any(options, terminal, create_demo=True)
    if store is not None and options.store.demo and not options.store.url and first:
        seed_store(store)
    return store


def other_store(url: str, options: Common, own: Mapping[str, Any], *, signing: bool = False) -> Store:
    """A store that a command names by itself, not as `store.url`: one end of a sync, the source of a repair.

    Args:
        url: Where it is.
        options: Those of the command: what `store.options` tells remote storage and the keys of `store` hold for it.
        own: What its storage alone is told, before `store.options`.
        signing: Whether it signs what is put into it.
    """
    from multilora_store.storage import open_store

    shared = options.store.options if source_kind(url) == "url" else {}
    return open_store(
        local_path(url),
        signing_key=options.store.signing_key if signing else None,
        trusted_keys=options.store.trusted_keys,
        **{**shared, **own},
    )


def local_path(text: str) -> str:
    """A path with `~` spelled out; a URL as it is."""
    return text if source_kind(text) == "url" else str(Path(text).expanduser())
