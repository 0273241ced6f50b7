"""`assemble`: the base with every adapter of the set, then whatever was asked for with it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilora_store.cli.assembled import AdapterRow, ShardReport, adapter_rows, export_set, set_view, shard_report
from multilora_store.cli.documents import snapshot_document
from multilora_store.cli.merged import MergeStep
from multilora_store.cli.models import build_base, build_model
from multilora_store.cli.outcome import Outcome, Table
from multilora_store.cli.ranks import started_ranks, world_size
from multilora_store.cli.schema import AssembleOptions
from multilora_store.cli.sets import locked
from multilora_store.cli.stores import local_path, store_for_set
from multilora_store.cli.terminal import Terminal
from multilora_store.cli.typed import plain
from multilora_store.errors import UsageError
from multilora_store.manifest import Lock

if TYPE_CHECKING:
    from multilora_store.distributed.agreement import Ranks
    from multilora_store.storage import Store
    from multilora_store.storage.progress import Listener

__all__ = ["run"]

_MERGE_AT = "after:read"


def run(options: AssembleOptions, terminal: Terminal) -> Outcome:
    """Resolve, assemble, shard, export and save, in this order; each part only if it was asked for."""
    _check(options)
    sharded = options.shard.backend is not None and not options.dry_run
    with started_ranks(sharded=sharded, device=options.device) as (ranks, device):
        ranks.agree("the command line", _facts(options))
        store = ranks.together("open the store", lambda: store_for_set(options, terminal, first=ranks.first))
        ranks.barrier("the demo's store")
        text = ranks.from_first("resolve the set", lambda: locked(options, store).to_json())
        lock = Lock.from_json(text)
        if options.lock is not None and ranks.first:
            _write_lock(options.lock, text)
        if options.dry_run:
            return _intentions(lock, store)
        return _assembled(options, terminal, ranks, lock, store, device)


def _write_lock(file: str, text: str) -> None:
    try:
        Path(local_path(file)).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"lock={file} cannot be written: {error.strerror}", remedy="name a file in a folder that is there"
        ) from error


def _check(options: AssembleOptions) -> None:
    """Refuse, before anything is imported or read, what cannot come to an end."""
    saves = _wanted(options)
    structure_only = options.device == "meta"
    if structure_only and (saves or options.export or options.shard.backend):
        raise UsageError("device=meta builds no bytes: there is nothing to shard, export or save")
    if saves and not (options.store.url or options.store.demo):
        raise UsageError("save needs a store", remedy="give store.url=FOLDER-or-URL, or set MULTILORA_STORE")
    if options.shard.load not in ("all", "first"):
        raise UsageError(f"unknown shard.load {options.shard.load!r}", remedy="all or first")
    if options.shard.load == "first" and options.shard.backend != "fsdp2":
        raise UsageError("shard.load=first needs shard=fsdp2", why="nothing else can wrap a model without values")
    if options.base is None and not options.dry_run:
        build_base(None)


def _wanted(options: AssembleOptions) -> bool:
    """Whether the set is to be saved: said outright, or by what only a save has."""
    return options.save.enabled or options.save.step is not None or options.save.profile is not None


def _facts(options: AssembleOptions) -> dict[str, Any]:
    """What every rank must have been given alike."""
    whole = asdict(options)
    return {key: value for key, value in whole.items() if key not in {"output", "quiet", "verbose"}}


def _intentions(lock: Lock, store: Store | None) -> Outcome:
    """What would be assembled: nothing is read but the store's state."""
    rows, documents = [], []
    for entry in lock:
        action = "create" if entry.fresh else "load"
        described: dict[str, Any] = {
            "name": entry.name,
            "action": action,
            "source": entry.spec.source,
            "version": entry.version,
            "store": entry.store,
            "active": entry.spec.active,
            "trainable": entry.spec.trainable,
            "weight": entry.spec.weight,
            "dtype": entry.spec.dtype,
        }
        documents.append(described)
        active = f"{entry.spec.weight:g}" if entry.spec.active else "-"
        train = "yes" if entry.spec.trainable else "-"
        rows.append((entry.name, action, entry.version or "-", active, train, entry.spec.source))
    table = Table(columns=("adapter", "action", "version", "active", "train", "source"), rows=rows)
    document = {"dry_run": True, "store": store.url if store else None, "adapters": documents}
    return Outcome(document=document, view=[table, "dry run: nothing was assembled"])


def _assembled(
    options: AssembleOptions, terminal: Terminal, ranks: Ranks, lock: Lock, store: Store | None, device: str
) -> Outcome:
    choice = plain(options.merge)
    merging = MergeStep(choice=choice) if choice is not None else None
    device = device if options.shard.load == "all" or ranks.first else "meta"
    with terminal.progress("assembling") as progress:
        model = ranks.together("assemble", lambda: _model(options, lock, store, device, merging, progress))
    rows = [row if merging is None else replace(row, source="merge") for row in adapter_rows(model, lock)]
    exported: dict[str, str] = {}
    if options.export is not None:
        target = local_path(options.export)
        exported = ranks.from_first("export the set", lambda: export_set(model, target))
    report: ShardReport | None = None
    if options.shard.backend is not None:
        from multilora_store.distributed import shard

        with terminal.waiting(f"sharding over {ranks.size} ranks"):
            model = shard(model, backend=options.shard.backend, granularity=options.shard.granularity)
        report = shard_report(model, ranks)
    snapshot = _saved(options, terminal, model, store)
    return _outcome(options, rows, report, exported, snapshot, store, merging)


def _model(
    options: AssembleOptions,
    lock: Lock,
    store: Store | None,
    device: str,
    merging: MergeStep | None,
    progress: Listener | None,
) -> Any:
    return build_model(
        options,
        lock,
        store,
        device=device,
        added={_MERGE_AT: merging} if merging is not None else None,
        dtype=options.dtype,
        seed=options.seed,
        allow_base_mismatch=options.allow_base_mismatch,
        progress=progress,
    )


def _saved(options: AssembleOptions, terminal: Terminal, model: Any, store: Store | None) -> Any:
    if not _wanted(options):
        return None
    from multilora_store.distributed import save

    assert store is not None, "checked before the work began"
    with terminal.progress("saving") as progress:
        return save(model, store, step=options.save.step, progress=progress, profile=options.save.profile)


def _outcome(
    options: AssembleOptions,
    rows: list[AdapterRow],
    report: ShardReport | None,
    exported: dict[str, str],
    snapshot: Any,
    store: Store | None,
    merging: MergeStep | None,
) -> Outcome:
    document = {
        "demo": options.store.demo,
        "store": store.url if store else None,
        "world_size": world_size(),
        "adapters": [row.document() for row in rows],
        "shard": report.document() if report else None,
        "lock": options.lock,
        "merge": merging.document() if merging is not None else None,
        "exported": exported,
        "snapshot": snapshot_document(snapshot) if snapshot is not None else None,
    }
    view: list[Table | str] = set_view(rows)
    view += merging.lines() if merging is not None else []
    if report is not None:
        view += report.view()
    view += [f"exported {name}: {place}" for name, place in exported.items()]
    view += [f"lock: {options.lock}"] if options.lock else []
    view += [f"saved as snapshot {snapshot.id}"] if snapshot is not None else []
    for profile, found in (snapshot.metadata.get("profiles", {}) if snapshot is not None else {}).items():
        needs = found["setting"] or found["max_rank"]
        view.append(f"{profile} would{'' if found['ok'] else ' not'} serve all of it, with a rank setting of {needs}")
    return Outcome(document=document, view=view)
