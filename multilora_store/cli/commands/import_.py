"""`import`: PEFT folders into the store."""

from __future__ import annotations

from multilora_store.cli.documents import version_document
from multilora_store.cli.outcome import Outcome, Table, bytes_in_words
from multilora_store.cli.schema import ImportOptions
from multilora_store.cli.stores import local_path, opened_store
from multilora_store.cli.terminal import Terminal

__all__ = ["run"]


def run(options: ImportOptions, terminal: Terminal) -> Outcome:
    """Put every adapter of a folder; the original files' bytes are kept."""
    from multilora_store.storage import import_peft

    store = opened_store(options, terminal)
    with terminal.waiting(f"importing {options.source}"):
        versions = import_peft(
            store,
            local_path(options.source),
            name=options.name,
            allow_pickle=options.allow_pickle,
            prefix=options.prefix,
        )
    for version in versions:
        for tag in options.tags:
            store.tag(f"{version.name}@{version.id}", tag)
    rows = [(item.name, item.id, bytes_in_words(item.nbytes), " ".join(options.tags)) for item in versions]
    document = {"store": store.url, "source": options.source, "adapters": [version_document(item) for item in versions]}
    return Outcome(document=document, view=[Table(columns=("adapter", "version", "size#", "tags"), rows=rows)])
