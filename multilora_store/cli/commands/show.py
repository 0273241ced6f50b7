"""`show`: one adapter in full, or every plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multilora_store.adapter import Ref
from multilora_store.cli.documents import instant, tensor_document, version_document
from multilora_store.cli.outcome import Outcome, Table, bytes_in_words, count_in_words
from multilora_store.cli.schema import ShowOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal
from multilora_store.errors import PluginError
from multilora_store.plugins import Parameter, Plugin, default_registry

__all__ = ["run"]


def run(options: ShowOptions, terminal: Terminal) -> Outcome:
    """An adapter's versions, configuration and tensors; `plugins` shows the plugins."""
    return _plugins(options, terminal) if options.ref == "plugins" else _adapter(options, terminal)


def _adapter(options: ShowOptions, terminal: Terminal) -> Outcome:
    store = opened_store(options, terminal)
    ref = Ref.parse(options.ref)
    adapter = store.get(ref)
    version, infos = adapter.version, adapter.infos
    versions, tags = store.versions(ref.name), store.tags(ref.name)
    config = dict(adapter.config.raw)
    parameters = sum(_size(info.shape) for info in infos.values())
    named: dict[str, list[str]] = {}
    for tag, identity in tags.items():
        named.setdefault(identity, []).append(tag)
    document = {
        "store": store.url,
        "adapter": version_document(version),
        "config": config,
        "parameters": parameters,
        "tensors": [tensor_document(info) for info in infos.values()],
        "versions": [version_document(item) for item in versions],
        "tags": dict(tags),
    }
    facts = [
        ("version", version.id),
        ("digest", version.digest),
        ("tensors", f"{len(infos)}, {count_in_words(parameters)} parameters, {bytes_in_words(version.nbytes)}"),
        *((key, _words(value)) for key, value in config.items() if value not in (None, {}, [], False)),
        *((f"metadata {key}", _words(value)) for key, value in version.metadata.items()),
    ]
    history = [
        (item.id, instant(item.time), "-" if item.step is None else str(item.step), " ".join(named.get(item.id, [])))
        for item in reversed(versions)
    ]
    view: list[Table | str] = [
        Table(columns=(version.name, ""), rows=facts),
        Table(columns=("version", "time", "step#", "tags"), rows=history),
    ]
    if options.tensors:
        rows = [(info.name, info.dtype, "x".join(map(str, info.shape)), info.sha256[:12]) for info in infos.values()]
        view.append(Table(columns=("tensor", "dtype", "shape", "sha256"), rows=rows))
    return Outcome(document=document, view=view)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _plugins(options: ShowOptions, terminal: Terminal) -> Outcome:
    """Every plugin, imported; one that cannot be is named with its distribution, and the others are shown."""
    documents, rows = [], []
    for item in default_registry().all():
        described: dict[str, Any]
        try:
            described = {"description": item.description, "parameters": _parameters(item), "error": None}
        except PluginError as error:
            if options.plugins.strict:
                raise
            terminal.note(f"warning: {error.what}")
            described = {"description": "", "parameters": [], "error": error.what}
        documents.append({"kind": item.kind, "name": item.name, "origin": item.origin, **described})
        rows.append((item.kind, item.name, item.origin, _settable(described)))
    table = Table(columns=("kind", "name", "origin", "parameters"), rows=rows)
    return Outcome(document={"plugins": documents}, view=[table] if rows else ["no plugins"])


def _parameters(plugin: Plugin) -> list[dict[str, Any]]:
    return [
        {
            "name": parameter.name,
            "type": parameter.annotation,
            "required": parameter.default is Parameter.REQUIRED,
            "default": None if parameter.default is Parameter.REQUIRED else repr(parameter.default),
        }
        for parameter in plugin.parameters
    ]


def _settable(described: Mapping[str, Any]) -> str:
    """The parameters of a plugin with their defaults, on one line."""
    if described["error"]:
        return "cannot be loaded"
    return ", ".join(
        one["name"] if one["required"] else f"{one['name']}={one['default']}" for one in described["parameters"]
    )
