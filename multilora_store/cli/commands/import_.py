"""`import`: PEFT folders, what a source plugin reads, and the adapters of whole models' checkpoints, into the store."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from multilora_store.adapter import check_name, source_kind
from multilora_store.cli.choices import chosen_plugin
from multilora_store.cli.documents import version_document
from multilora_store.cli.outcome import Outcome, Table, bytes_in_words
from multilora_store.cli.schema import ImportOptions
from multilora_store.cli.stores import local_path, opened_store
from multilora_store.cli.terminal import Terminal
from multilora_store.cli.typed import plain
from multilora_store.errors import MultiLoRAError, NameNotAllowedError, StoreNotFoundError, UsageError
from multilora_store.plugins import default_registry

if TYPE_CHECKING:
    from multilora_store.storage import Store, Version
    from multilora_store.storage.progress import Listener

    Read = Callable[[ImportOptions, Store, Listener | None], list[Version]]

__all__ = ["run"]


def run(options: ImportOptions, terminal: Terminal) -> Outcome:
    """Put every adapter that the source holds into the store; PEFT's own files are kept byte for byte."""
    store = opened_store(options, terminal)
    read, known = _reader(options), _known(store)
    with terminal.progress("importing") as progress:
        versions = read(options, store, progress)
    new = [item.name for item in versions if (item.name, item.id) not in known]
    document = {
        "store": store.url,
        "source": options.source,
        "adapters": [version_document(item) for item in versions],
        "new": new,
    }
    rows = [
        (item.name, item.id, bytes_in_words(item.nbytes), "yes" if item.name in new else "-", " ".join(options.tags))
        for item in versions
    ]
    view: list[Table | str] = [Table(columns=("adapter", "version", "size#", "new", "tags"), rows=rows)]
    view += [] if new else ["nothing was new: the store holds this very content already"]
    return Outcome(document=document, view=view)


def _known(store: Store) -> set[tuple[str, str]]:
    """Name and id of every version that the store has."""
    try:
        return {(version.name, version.id) for version in store.state().live()}
    except StoreNotFoundError:
        return set()


def _reader(options: ImportOptions) -> Read:
    scheme = options.source.partition("://")[0] if "://" in options.source else ""
    if options.configs:
        if options.name or options.prefix or source_kind(options.source) == "url":
            raise UsageError(
                "configs= takes the adapters of a checkpoint on this machine, under the names that it gives",
                remedy="leave name= and prefix= out, and give a path",
            )
        return _from_model
    addressed = scheme in default_registry().names("source")
    if addressed and options.reader is not None:
        raise UsageError(f"{scheme}:// and reader= both say what reads the source", remedy="leave one of them out")
    return _from_source if addressed or options.reader is not None else _from_peft


def _from_peft(options: ImportOptions, store: Store, progress: Listener | None) -> list[Version]:
    from multilora_store.storage import import_peft

    try:
        return import_peft(
            store,
            local_path(options.source),
            name=options.name,
            allow_pickle=options.allow_pickle,
            allow_rank_mismatch=options.allow_rank_mismatch,
            prefix=options.prefix,
            tags=options.tags,
            progress=progress,
        )
    except UsageError as error:
        title = _whole_model(options.source)
        if title is None:
            raise
        raise UsageError(
            f"{options.source} is {title}",
            why="such a checkpoint says nothing of its adapters' rank, alpha and targets",
            remedy=f"give each one's: configs.NAME=adapter_config.json; doctor {options.source} tells their names",
        ) from error


def _whole_model(source: str) -> str | None:
    """What a path that holds no PEFT folder is, where it is a checkpoint that is known."""
    from multilora_store.integrations.recognising import recognise

    try:
        found = recognise(local_path(source))
    except MultiLoRAError:
        return None  # the first error says what is wrong with it
    return None if found.kind == "peft" else found.title


def _from_model(options: ImportOptions, store: Store, progress: Listener | None) -> list[Version]:
    """Adapters out of a whole model's checkpoint, each with the configuration that was given."""
    from multilora_store.integrations.checkpoints import rescue
    from multilora_store.integrations.recognising import recognise

    path = local_path(options.source)
    configs = {name: local_path(given) if isinstance(given, str) else given for name, given in options.configs.items()}
    return rescue(
        store,
        path,
        configs=configs,
        allow_pickle=options.allow_pickle,
        tags=options.tags,
        step=recognise(path).step,
        progress=progress,
    )


def _from_source(options: ImportOptions, store: Store, progress: Listener | None) -> list[Version]:
    """The adapter of another tool's file, converted."""
    from multilora_store.assembly.resolve import read_source

    reader = chosen_plugin("reader", options.reader)
    chosen = plain(options.reader)
    scheme = options.source.partition("://")[0] if chosen is None else str(chosen["name"])
    if options.allow_pickle:
        raise UsageError(f"allow_pickle is for PEFT folders, not for {scheme}", remedy="leave it out")
    name = _name(options)
    folder = read_source(options.source) if reader is None else reader(local_path(options.source))
    request = {
        "name": name,
        "tensors": folder.tensors,
        "config": folder.config,
        "files": folder.files or None,
        "step": folder.step,
        "tags": options.tags,
        "metadata": {"imported_from": f"{scheme}://{folder.where}"},
    }
    return [store.commit(store.stage_many([request], progress=progress)).versions[name]]


def _name(options: ImportOptions) -> str:
    """The name that was given, or that of the file or folder, without ending, revision and parameters."""
    given = options.name
    if given is None:
        place = re.split(r"[?#]", options.source.partition("://")[2] or options.source)[0].rstrip("/")
        given = place.rpartition("/")[2].partition("@")[0].removesuffix(".safetensors")
    try:
        return check_name(options.prefix + given)
    except NameNotAllowedError as error:
        raise NameNotAllowedError(
            f"{options.source} would be called {options.prefix + given!r}, which is not allowed",
            why=error.why,
            remedy="give it another name with name=...",
        ) from error
