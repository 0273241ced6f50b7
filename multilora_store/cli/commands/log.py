"""`log`: the journal, newest first."""

from __future__ import annotations

from typing import Any

from multilora_store.cli.documents import instant
from multilora_store.cli.outcome import Outcome, Table, short
from multilora_store.cli.schema import LogOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal

__all__ = ["run"]


def run(options: LogOptions, terminal: Terminal) -> Outcome:
    """One line per entry: when, by whom, what changed."""
    store = opened_store(options, terminal)
    entries = [entry for entry in reversed(store.log()) if options.name is None or _touches(entry, options.name)]
    shown = entries[: options.limit] if options.limit > 0 else entries
    documents = [
        {
            "seq": entry.seq,
            "time": instant(entry.time),
            "writer": entry.writer,
            "changes": [{"verb": change.verb, **change.to_json()} for change in entry.changes],
        }
        for entry in shown
    ]
    rows = [(str(entry.seq), instant(entry.time), _summary(entry)) for entry in shown]
    view: list[Table | str] = [Table(columns=("entry#", "time", "changes"), rows=rows)] if rows else ["no entries"]
    if len(shown) < len(entries):
        view.append(f"{len(entries) - len(shown)} older entries; limit=0 shows all")
    return Outcome(document={"store": store.url, "entries": documents, "total": len(entries)}, view=view)


def _touches(entry: Any, name: str) -> bool:
    return any(name in _names(change) for change in entry.changes)


def _names(change: Any) -> set[str]:
    inner = {name for item in getattr(change, "changes", ()) for name in _names(item)}
    return inner | {getattr(change, "name", "")} | set(getattr(change, "adapters", ()))


def _summary(entry: Any) -> str:
    words = [_change(change) for change in entry.changes]
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")


def _change(change: Any) -> str:
    name, identity = getattr(change, "name", ""), getattr(change, "id", "")
    tag = getattr(change, "tag", "")
    if tag:
        return f"{change.verb} {name}@{tag}" + (f" = {short(identity)}" if identity else "")
    if name:
        return f"{change.verb} {name}@{short(identity)}"
    if identity:
        return f"{change.verb} {identity}"
    inner: Any = getattr(change, "changes", None) or getattr(change, "directories", ())
    return f"{change.verb} ({len(inner)})"
