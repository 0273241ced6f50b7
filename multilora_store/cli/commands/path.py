"""`path`: a local folder of a version."""

from __future__ import annotations

from multilora_store.cli.documents import version_document
from multilora_store.cli.outcome import Outcome
from multilora_store.cli.schema import PathOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal

__all__ = ["run"]


def run(options: PathOptions, terminal: Terminal) -> Outcome:
    """The folder alone on one line, so that a shell can use it."""
    store = opened_store(options, terminal)
    version = store.resolve(options.ref)
    with terminal.progress("fetching") as progress:
        folder = store.path(f"{version.name}@{version.id}", progress=progress)
    document = {"store": store.url, "path": str(folder), "adapter": version_document(version)}
    return Outcome(document=document, view=[str(folder)])
