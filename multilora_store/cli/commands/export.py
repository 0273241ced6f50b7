"""`export`: stored adapters as plain PEFT folders, or in the layout of an exporter plugin."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilora_store.adapter import is_pattern
from multilora_store.cli.outcome import Outcome, Table
from multilora_store.cli.schema import ExportOptions
from multilora_store.cli.stores import local_path, opened_store
from multilora_store.cli.terminal import Terminal
from multilora_store.errors import NotInStoreError, choices
from multilora_store.plugins import default_registry

if TYPE_CHECKING:
    from multilora_store.storage import Store

__all__ = ["export_one", "run"]


def run(options: ExportOptions, terminal: Terminal) -> Outcome:
    """Write one adapter to `target`, or each that a pattern names to `target/<name>`."""
    store = opened_store(options, terminal)
    target = local_path(options.target)
    if not is_pattern(options.ref):
        wanted = {options.ref: target}
    else:
        names = [name for name in store.names() if fnmatchcase(name, options.ref)]
        if not names:
            raise NotInStoreError(
                f"{store.url}: no adapter matches {options.ref!r}",
                remedy=choices(options.ref, store.names(), noun="adapter"),
            )
        wanted = {name: f"{target.rstrip('/')}/{name}" for name in names}
    written = [
        {
            "ref": ref,
            "version": store.resolve(ref).id,
            "path": export_one(store, ref, place, options.exporter, options.params),
        }
        for ref, place in terminal.progress(wanted.items(), "exporting", total=len(wanted))
    ]
    rows = [(item["ref"], item["version"], item["path"]) for item in written]
    return Outcome(
        document={"store": store.url, "exporter": options.exporter, "exported": written},
        view=[Table(columns=("adapter", "version", "folder"), rows=rows)],
    )


def export_one(
    store: Store, ref: str, target: str, exporter: str | None = None, params: Mapping[str, Any] | None = None
) -> str:
    """Write one adapter; returns the place as text."""
    if exporter is not None:
        return str(default_registry().get("exporter", exporter).load()(store, ref, _place(target), **(params or {})))
    from multilora_store.storage import export_adapter

    return str(export_adapter(store, ref, target))


def _place(target: str) -> str | Path:
    return target if "://" in target else Path(target)
