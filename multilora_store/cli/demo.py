"""The embedded demo: what runs where nothing at all is configured, kept apart from real use.

Its adapters' configs lie in a folder of their own that only the demo searches, and its store under the user's cache: a
typo, or a store that is empty, never yields a random adapter.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from multilora_store.cli.argv import CommandLine
from multilora_store.cli.catalogue import Command

if TYPE_CHECKING:
    from multilora_store.storage import Store

__all__ = ["NOTE", "demo_overrides", "demo_store_folder", "seed_store"]

NOTE: Final = "This is the embedded demo: a tiny base, random adapters a, b, c, a store in {folder}"
_OWN_WORLD: Final = ("store", "base", "lock_from", "checkpoint")


def demo_store_folder() -> Path:
    """Where the demo keeps its store: the user's cache, or the temporary folder where that cannot be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "multilora_store" / "demo-store"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"multilora_store-demo-{os.getuid()}" / "demo-store"
    if os.access(folder.parent, os.W_OK):
        return folder
    return Path(tempfile.gettempdir()) / f"multilora_store-demo-{os.getuid()}" / "demo-store"


def demo_overrides(line: CommandLine, command: Command, overrides: Sequence[str]) -> list[str]:
    """The overrides that select the demo, none where the user has named a store, a base, or configs of their own."""
    keys = [word.lstrip("+~").partition("=")[0] for word in overrides]
    own_world = any(key.partition(".")[0] in _OWN_WORLD for key in keys)
    own_entries = any(word.lstrip("+").startswith("adapters={") and "source:" in word for word in overrides)
    configured = line.config_dirs or line.config_name or os.environ.get("MULTILORA_STORE")
    if not command.demo or own_world or own_entries or configured:
        return []
    return ["store=demo", *(["base=demo"] if hasattr(command.schema, "base") else [])]


def seed_store(store: Store) -> None:
    """Put the demo's adapters `a`, `b`, `c` into its store, those that are not there yet, in one commit."""
    from multilora_store.assembly.bases import DEMO_TITLES, demo_adapters
    from multilora_store.errors import StoreNotFoundError

    try:
        present = set(store.names())
    except StoreNotFoundError:
        present = set()
    staged = [
        store.stage(name, tensors, config, metadata={"title": DEMO_TITLES[name]})
        for name, (config, tensors) in demo_adapters().items()
        if name not in present
    ]
    if staged:
        store.commit(staged)
