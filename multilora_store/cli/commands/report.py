"""`report`: the store as a whole, and what a server of its adapters would need."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from multilora_store.cli.compared import merge_table, stored_merge
from multilora_store.cli.documents import instant
from multilora_store.cli.outcome import Outcome, Table, bytes_in_words, counted, short
from multilora_store.cli.schema import ReportOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal

if TYPE_CHECKING:
    from multilora_store.storage import Snapshot, State, Store, Version
    from multilora_store.storage.profiles import SetNeeds

__all__ = ["run"]


def run(options: ReportOptions, terminal: Terminal) -> Outcome:
    """Count what the store's state says; read headers, never tensors, for what a server needs."""
    store = opened_store(options, terminal)
    state = store.state()
    names = [name for name in state.names() if fnmatchcase(name, options.pattern)]
    needs = _needs(store, state, names, terminal) if options.needs and names else None
    adapters = [_adapter(state, name, needs) for name in names]
    sizes = _sizes([version for name in names for version in state.versions(name)])
    snapshots = [taken for taken in store.snapshots() if set(names) & set(taken.adapters)]
    document = {
        "store": store.url,
        "pattern": options.pattern,
        "entries": state.seq,
        "adapters": adapters,
        "versions": sum(row["versions"] for row in adapters),
        **sizes,
        "merges": [row for name in names for row in map(stored_merge, state.versions(name)) if row is not None],
        "snapshots": {"count": len(snapshots), "latest": snapshots[-1].id if snapshots else None},
        "needs": needs.to_json() if needs is not None else None,
    }
    return Outcome(document=document, view=_view(document, snapshots))


def _adapter(state: State, name: str, needs: SetNeeds | None) -> dict[str, Any]:
    versions = state.versions(name)
    latest = versions[-1]
    return {
        "name": name,
        "latest": latest.id,
        "time": instant(latest.time),
        "versions": len(versions),
        "bytes": sum(version.nbytes for version in versions),
        "tags": dict(state.adapters[name].tags),
        "rank": needs.ranks[name] if needs is not None else None,
        "snapshots": sum(name in taken.adapters for taken in state.snapshots.values()),
    }


def _sizes(versions: Iterable[Version]) -> dict[str, int]:
    """Bytes of all versions one by one, bytes of the folders that hold them, and the difference: what sharing saves."""
    held: dict[str, int] = {}
    total = 0
    for version in versions:
        total += version.nbytes
        held[version.directory] = version.nbytes
    stored = sum(held.values())
    return {"bytes": total, "stored_bytes": stored, "saved_bytes": total - stored, "contents": len(held)}


def _needs(store: Store, state: State, names: list[str], terminal: Terminal) -> SetNeeds:
    """What the newest versions need, from their configurations and headers."""
    from multilora_store.storage.profiles import set_needs
    from multilora_store.storage.progress import Meter

    found = {}
    with terminal.progress("reading headers", of_bytes=False) as progress:
        meter = Meter(progress, files=len(names))
        for name in names:
            adapter = store.get(state.versions(name)[-1])
            found[name] = adapter.config, {key: info.shape for key, info in adapter.infos.items()}
            meter.add(0)
    return set_needs(found)


def _view(document: dict[str, Any], snapshots: list[Snapshot]) -> list[Table | str]:
    if not document["adapters"]:
        matching = f" matches {document['pattern']!r}" if document["pattern"] != "*" else ""
        return [f"{document['store']}: no adapter{matching}"]
    rows = [
        (
            row["name"],
            short(row["latest"]),
            str(row["versions"]),
            bytes_in_words(row["bytes"]),
            "-" if row["rank"] is None else str(row["rank"]),
            str(row["snapshots"]),
            " ".join(sorted(row["tags"])),
        )
        for row in document["adapters"]
    ]
    view: list[Table | str] = [
        Table(columns=("adapter", "latest", "versions#", "size#", "rank#", "snapshots#", "tags"), rows=rows),
        f"{document['store']}: {counted(len(rows), 'adapter')}, {counted(document['versions'], 'version')}, "
        f"{counted(document['entries'], 'entry')}",
        f"{bytes_in_words(document['stored_bytes'])} in {counted(document['contents'], 'content')}; "
        f"sharing equal ones saves {bytes_in_words(document['saved_bytes'])}",
    ]
    if snapshots:
        newest = snapshots[-1]
        view.append(f"{counted(len(snapshots), 'snapshot')}, the newest {newest.id} of {instant(newest.time)}")
    if document["merges"]:
        view.append(merge_table(document["merges"]))
    needs = document["needs"]
    if needs is not None:
        setting = needs["setting"] if needs["setting"] is not None else "more than any setting allows"
        view.append(f"a server of all needs --max-lora-rank {setting} (the highest rank is {needs['max_rank']})")
        view.append(f"and the targets {', '.join(needs['targets'])}")
    return view
