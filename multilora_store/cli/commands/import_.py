"""`import`: PEFT folders, and what a source plugin reads, into the store."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from multilora_store.adapter import check_name
from multilora_store.cli.documents import version_document
from multilora_store.cli.outcome import Outcome, Table, bytes_in_words
from multilora_store.cli.schema import ImportOptions
from multilora_store.cli.stores import local_path, opened_store
from multilora_store.cli.terminal import Terminal
from multilora_store.errors import NameNotAllowedError, UsageError
from multilora_store.plugins import default_registry

if TYPE_CHECKING:
    from multilora_store.storage import Store, Version
    from multilora_store.storage.progress import Listener

__all__ = ["run"]


def run(options: ImportOptions, terminal: Terminal) -> Outcome:
    """Put every adapter of a folder, or the one that a source reads; PEFT's own files are kept byte for byte."""
    store = opened_store(options, terminal)
    scheme = options.source.partition("://")[0] if "://" in options.source else ""
    with terminal.progress("importing") as progress:
        if scheme in default_registry().names("source"):
            versions = [_from_source(options, store, scheme, progress)]
        else:
            versions = _from_peft(options, store, progress)
    rows = [(item.name, item.id, bytes_in_words(item.nbytes), " ".join(options.tags)) for item in versions]
    document = {"store": store.url, "source": options.source, "adapters": [version_document(item) for item in versions]}
    return Outcome(document=document, view=[Table(columns=("adapter", "version", "size#", "tags"), rows=rows)])


def _from_peft(options: ImportOptions, store: Store, progress: Listener | None) -> list[Version]:
    from multilora_store.storage import import_peft

    return import_peft(
        store,
        local_path(options.source),
        name=options.name,
        allow_pickle=options.allow_pickle,
        prefix=options.prefix,
        tags=options.tags,
        progress=progress,
    )


def _from_source(options: ImportOptions, store: Store, scheme: str, progress: Listener | None) -> Version:
    """The adapter of another tool's file, converted."""
    from multilora_store.assembly.resolve import read_source

    if options.allow_pickle:
        raise UsageError(f"allow_pickle is for PEFT folders, not for {scheme}://", remedy="leave it out")
    name = _name(options)
    folder = read_source(options.source)
    request = {
        "name": name,
        "tensors": folder.tensors,
        "config": folder.config,
        "files": folder.files or None,
        "step": folder.step,
        "tags": options.tags,
        "metadata": {"imported_from": f"{scheme}://{folder.where}"},
    }
    return store.commit(store.stage_many([request], progress=progress)).versions[name]


def _name(options: ImportOptions) -> str:
    """The name that was given, or that of the file or folder, without ending, revision and parameters."""
    given = options.name
    if given is None:
        place = re.split(r"[?#]", options.source.partition("://")[2])[0].rstrip("/")
        given = place.rpartition("/")[2].partition("@")[0].removesuffix(".safetensors")
    try:
        return check_name(options.prefix + given)
    except NameNotAllowedError as error:
        raise NameNotAllowedError(
            f"{options.source} would be called {options.prefix + given!r}, which is not allowed",
            why=error.why,
            remedy="give it another name with name=...",
        ) from error
