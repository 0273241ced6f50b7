"""`list`: the adapters of the store."""

from __future__ import annotations

from fnmatch import fnmatchcase

from multilora_store.cli.documents import version_document
from multilora_store.cli.outcome import Outcome, Table, bytes_in_words, short
from multilora_store.cli.schema import ListOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal

__all__ = ["run"]


def run(options: ListOptions, terminal: Terminal) -> Outcome:
    """One row per adapter: its latest version, how many there are, its tags."""
    store = opened_store(options, terminal)
    state = store.state()
    rows, adapters = [], []
    for name in state.names():
        if not fnmatchcase(name, options.pattern):
            continue
        versions, tags = state.versions(name), dict(state.adapters[name].tags)
        latest = versions[-1]
        adapters.append({"name": name, "latest": version_document(latest), "versions": len(versions), "tags": tags})
        words = " ".join(f"{tag}={short(version)}" for tag, version in sorted(tags.items()))
        step = "-" if latest.step is None else str(latest.step)
        rows.append((name, short(latest.id), str(len(versions)), step, bytes_in_words(latest.nbytes), words))
    table = Table(columns=("adapter", "latest", "versions#", "step#", "size#", "tags"), rows=rows)
    empty = f"{store.url}: no adapter" + (f" matches {options.pattern!r}" if options.pattern != "*" else "")
    return Outcome(document={"store": store.url, "adapters": adapters}, view=[table] if rows else [empty])
