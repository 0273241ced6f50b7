"""`snapshots`: the saved sets."""

from __future__ import annotations

from multilora_store.cli.documents import instant, snapshot_document
from multilora_store.cli.outcome import Outcome, Table
from multilora_store.cli.schema import SnapshotsOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal

__all__ = ["run"]


def run(options: SnapshotsOptions, terminal: Terminal) -> Outcome:
    """One row per snapshot, or the members of one."""
    store = opened_store(options, terminal)
    if options.snapshot is not None:
        snapshot = store.snapshot(options.snapshot)
        rows = [
            (
                name,
                member.version or "-",
                f"{member.weight:g}" if member.active else "-",
                "yes" if member.trainable else "-",
            )
            for name, member in snapshot.adapters.items()
        ]
        title = f"snapshot {snapshot.id}, step {'-' if snapshot.step is None else snapshot.step}"
        table = Table(columns=("adapter", "version", "active", "train"), rows=rows, title=title)
        return Outcome(document={"store": store.url, "snapshot": snapshot_document(snapshot)}, view=[table])
    snapshots = list(store.snapshots())
    rows = [
        (item.id, instant(item.time), "-" if item.step is None else str(item.step), str(len(item.adapters)))
        for item in reversed(snapshots)
    ]
    table = Table(columns=("snapshot", "time", "step#", "adapters#"), rows=rows)
    document = {"store": store.url, "snapshots": [snapshot_document(item) for item in reversed(snapshots)]}
    return Outcome(document=document, view=[table] if rows else [f"{store.url}: no snapshots"])
