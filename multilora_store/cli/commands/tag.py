"""`tag`: a name for a version."""

from __future__ import annotations

from multilora_store.adapter import Ref
from multilora_store.cli.documents import version_document
from multilora_store.cli.outcome import Outcome
from multilora_store.cli.schema import TagOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal

__all__ = ["run"]


def run(options: TagOptions, terminal: Terminal) -> Outcome:
    """Set a tag, or remove it."""
    store = opened_store(options, terminal)
    if options.remove:
        name = Ref.parse(options.ref).name
        store.untag(name, options.tag)
        document = {"store": store.url, "name": name, "tag": options.tag, "removed": True}
        return Outcome(document=document, view=[f"{name}@{options.tag} is gone"])
    version = store.resolve(options.ref)
    store.tag(f"{version.name}@{version.id}", options.tag)
    document = {"store": store.url, "tag": options.tag, "removed": False, "adapter": version_document(version)}
    return Outcome(document=document, view=[f"{version.name}@{options.tag} = {version.id}"])
