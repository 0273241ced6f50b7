"""`export`: stored adapters as PEFT folders, in another tool's layout, or merged into a base's own folder."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilora_store.adapter import Ref, is_pattern, source_kind
from multilora_store.cli.choices import chosen_plugin
from multilora_store.cli.merged import sources_of
from multilora_store.cli.outcome import Outcome, Table, bytes_in_words, counted
from multilora_store.cli.schema import ExportOptions
from multilora_store.cli.sets import declared
from multilora_store.cli.sources import configured_adapters
from multilora_store.cli.stores import local_path, opened_store, store_if_any
from multilora_store.cli.terminal import Terminal
from multilora_store.cli.typed import plain
from multilora_store.errors import NotInStoreError, UsageError, choices

if TYPE_CHECKING:
    from multilora_store.storage import Store
    from multilora_store.storage.progress import Listener

__all__ = ["export_one", "run"]

_KINDS = ("adapter", "merged")
_MERGE_PARAMS = ("modules_to_save", "tied")


def run(options: ExportOptions, terminal: Terminal) -> Outcome:
    """Write one adapter to `target`, or each that a pattern names to `target/<name>`; or base and adapters as one."""
    if options.kind not in _KINDS:
        raise UsageError(f"kind={options.kind} is not known", remedy=choices(options.kind, _KINDS, noun="kind"))
    if options.kind == "merged":
        return _merged(options, terminal)
    if options.adapters or options.base is not None:
        raise UsageError("adapters= and base= go with kind=merged", remedy="export NAME TARGET, or add kind=merged")
    if options.params:
        key = next(iter(options.params))
        raise UsageError("params= goes with kind=merged", remedy=f"an exporter's own: exporter.params.{key}=...")
    if options.ref is None:
        raise UsageError("export needs an adapter", remedy="export NAME TARGET, e.g. export a@best ./out")
    return _adapters(options, options.ref, terminal)


def _adapters(options: ExportOptions, wanted: str, terminal: Terminal) -> Outcome:
    from multilora_store.storage.progress import Meter

    store = opened_store(options, terminal)
    target = local_path(options.target)
    if not is_pattern(wanted):
        places = {wanted: target}
    else:
        names = [name for name in store.names() if fnmatchcase(name, wanted)]
        if not names:
            raise NotInStoreError(
                f"{store.url}: no adapter matches {wanted!r}", remedy=choices(wanted, store.names(), noun="adapter")
            )
        places = {name: f"{target.rstrip('/')}/{name}" for name in names}
    exporter = chosen_plugin("exporter", options.exporter)
    versions = {ref: store.resolve(ref) for ref in places}
    with terminal.progress("exporting") as progress:
        meter = Meter(progress, files=len(places), nbytes=sum(version.nbytes for version in versions.values()))
        written = []
        for ref, version in versions.items():
            piece = meter.piece(version.nbytes)
            path = export_one(store, ref, places[ref], exporter, piece.follow)
            written.append({"ref": ref, "version": version.id, "path": path})
            piece.done()
    rows = [(item["ref"], item["version"], item["path"]) for item in written]
    return Outcome(
        document={"store": store.url, "exporter": (plain(options.exporter) or {}).get("name"), "exported": written},
        view=[Table(columns=("adapter", "version", "folder"), rows=rows)],
    )


def export_one(
    store: Store,
    ref: str,
    target: str,
    exporter: Callable[..., Any] | None = None,
    progress: Listener | None = None,
) -> str:
    """Write one adapter; returns the place as text. PEFT's layout alone tells how far it is on its way."""
    if exporter is not None:
        return str(exporter(store, ref, _place(target)))
    from multilora_store.storage import export_adapter

    return str(export_adapter(store, ref, target, progress=progress))


def _place(target: str) -> str | Path:
    return target if "://" in target else Path(target)


def _merged(options: ExportOptions, terminal: Terminal) -> Outcome:
    """The base's folder with the deltas added, streamed from file to file."""
    from multilora_store.assembly.resolve import resolve_manifest
    from multilora_store.merging import export_merged

    base, target, entries = _merge_wanted(options)
    store = store_if_any(options, terminal)
    lock = resolve_manifest(entries, store, known=configured_adapters())
    sources, weights = sources_of(lock, store)
    with terminal.progress("merging") as progress:
        report = export_merged(base, sources, weights, target, progress=progress, **options.params)
    merged = {source.name: weight for source, weight in zip(sources, weights, strict=True)}
    document = {
        "store": store.url if store is not None else None,
        "base": str(base),
        "path": str(report.target),
        "weights": merged,
        "changed": list(report.changed),
        "untied": report.untied,
        "bytes": report.nbytes,
        "record": dict(report.record),
    }
    rows = [(source.name, source.version or "-", f"{merged[source.name]:g}") for source in sources]
    view: list[Table | str] = [Table(columns=("adapter", "version", "weight#"), rows=rows)]
    view += ["note: embedding and head, one tensor in the base, are written apart"] if report.untied else []
    changed = f"{counted(len(report.changed), 'tensor')} of the base changed"
    view.append(f"{report.target}: {bytes_in_words(report.nbytes)}, {changed}")
    return Outcome(document=document, view=view)


def _merge_wanted(options: ExportOptions) -> tuple[Path, Path, dict[str, Any]]:
    """The base's folder, the new folder, and the set; whatever cannot be is refused before anything is read."""
    choice = plain(options.base)
    if choice is None or not isinstance(choice.get("path"), str):
        raise UsageError("kind=merged needs the base's own folder", remedy="base=hf base.path=/models/llama")
    if options.exporter is not None:
        raise UsageError("exporter= writes adapters, kind=merged a whole model", remedy="leave one of them out")
    if (options.ref is None) == (not options.adapters):
        raise UsageError(
            "kind=merged takes one adapter or a set",
            remedy="export NAME TARGET kind=merged, or export '+adapters=[a,b]' target=TARGET kind=merged",
        )
    if source_kind(options.target) == "url":
        raise UsageError(f"{options.target}: a merged model is written to a local folder", remedy="copy it from there")
    for key in options.params:
        if key not in _MERGE_PARAMS:
            raise UsageError(f"kind=merged has no params.{key}", remedy=choices(key, _MERGE_PARAMS, noun="parameter"))
    name = options.ref if options.ref is None or is_pattern(options.ref) else Ref.parse(options.ref).name
    entries = declared(options.adapters) if name is None else {name: {"source": options.ref}}
    return Path(choice["path"]).expanduser(), Path(local_path(options.target)), entries
