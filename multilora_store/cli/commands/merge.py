"""`merge`: stored adapters into a new stored adapter."""

from __future__ import annotations

from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from multilora_store.cli.compared import merge_row
from multilora_store.cli.documents import jsonable, version_document
from multilora_store.cli.merged import settings_of
from multilora_store.cli.outcome import Outcome, Table, bytes_in_words
from multilora_store.cli.schema import MergeOptions
from multilora_store.cli.sets import declared
from multilora_store.cli.sources import configured_adapters
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal
from multilora_store.cli.typed import plain
from multilora_store.errors import UsageError

__all__ = ["run"]


def run(options: MergeOptions, terminal: Terminal) -> Outcome:
    """Resolve the adapters and weights, merge, and say what was lost."""
    from multilora_store.assembly.resolve import resolve_manifest
    from multilora_store.merging import merge

    choice = plain(options.merge)
    if choice is None:
        raise UsageError("no merge strategy is chosen", remedy="e.g. merge=ties merge.into=ab merge.params.density=0.3")
    store = opened_store(options, terminal)
    lock = resolve_manifest(declared(options.adapters), store, known=configured_adapters())
    weights: dict[str, float] = {}
    for entry in lock:
        if entry.version is None or entry.store != store.url:
            raise UsageError(
                f"adapter {entry.name!r} does not lie in {store.url}",
                why="a merge records its parents, so they are versions of the store",
                remedy=f"import it first: import {entry.spec.source} {entry.name}",
            )
        weights[f"{entry.spec.source.partition('@')[0]}@{entry.version}"] = entry.spec.weight
    with terminal.progress("merging") as progress:
        result = merge(
            store,
            weights,
            strategy=str(choice["strategy"]),
            into=str(choice["into"]),
            dry_run=options.dry_run,
            progress=progress,
            **{**settings_of(choice), **_of_a_sweep()},
        )
    return _outcome(str(choice["into"]), store.url, weights, result)


def _of_a_sweep() -> dict[str, str]:
    """The jobs of a sweep give one name several versions, unless they were told otherwise."""
    if not HydraConfig.initialized() or HydraConfig.get().mode is not RunMode.MULTIRUN:
        return {}
    said = any(word.lstrip("+").startswith("merge.if_exists=") for word in HydraConfig.get().overrides.task)
    return {} if said else {"if_exists": "version"}


def _outcome(into: str, url: str, weights: dict[str, float], result: Any) -> Outcome:
    report = result.report
    document = {
        "store": url,
        "into": into,
        "weights": weights,
        "dry_run": result.version is None,
        "adapter": version_document(result.version) if result.version is not None else None,
        "report": report.to_dict(),
        "recipe": jsonable(result.recipe),
    }
    rows = [(ref, f"{weight:g}") for ref, weight in weights.items()]
    view: list[Table | str] = [Table(columns=("adapter", "weight#"), rows=rows)]
    count = f"{len(report.modules)} modules" + (f" of {report.sampled}" if report.sampled else "")
    view.append(
        f"{report.strategy}: {count}, {bytes_in_words(report.bytes)}, reconstruction error {report.error:.2e}, "
        f"distance to the weighted sum {report.sum_distance:.2e}"
    )
    view += [f"note: {note}" for note in report.notes]
    view.append(f"{into} = {result.version.id}" if result.version is not None else "dry run: nothing was written")
    version = result.version.id if result.version is not None else None
    row = merge_row(into, version, document["recipe"], document["report"], report.seconds)
    return Outcome(document=document, view=view, row=row)
