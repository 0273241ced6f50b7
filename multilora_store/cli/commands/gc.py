"""`gc`: free what nothing names any more."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from multilora_store.cli.outcome import Outcome, bytes_in_words
from multilora_store.cli.schema import GcOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal
from multilora_store.cli.typed import plain

if TYPE_CHECKING:
    from multilora_store.storage import Store

__all__ = ["run"]


def run(options: GcOptions, terminal: Terminal) -> Outcome:
    """Purge through the journal first; files go when the purge is older than the grace period."""
    store = opened_store(options, terminal)
    kept = _retain(store, options) if options.policies else None
    with terminal.progress("collecting") as progress:
        report = store.gc(grace=timedelta(hours=options.grace_hours), dry_run=options.dry_run, progress=progress)
    would = "would be " if report.dry_run else ""
    plans = (("purge", report.purged), ("free", report.freed), ("keep", report.kept)) if report.dry_run else ()
    removed = [] if kept is None else [*kept["dropped"], *kept["deleted"]]
    view = [
        *(f"{'delete' if report.dry_run else 'deleted'} {name}: no policy keeps it" for name in removed),
        *(f"{verb} {folder.path}: {folder.why}" for verb, folders in plans for folder in folders),
        f"{len(report.purged)} folders {would}purged; their files stay for {options.grace_hours:g} h",
        f"{len(report.freed)} folders {would}freed, {bytes_in_words(report.nbytes)}",
    ]
    return Outcome(document={"store": store.url, **report.to_json(), "retention": kept}, view=view)


def _retain(store: Store, options: GcOptions) -> dict[str, Any]:
    """Deletes what no policy keeps, over snapshots first; in a dry run, tells what that would be."""
    from multilora_store.storage import apply_retention

    policies = {name: plain(parameters) or {} for name, parameters in options.policies.items()}
    return apply_retention(store, policies, dry_run=options.dry_run).to_json()
