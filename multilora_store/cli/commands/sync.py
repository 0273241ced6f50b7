"""`sync`: one store brought up to another."""

from __future__ import annotations

from multilora_store.cli.outcome import Outcome, bytes_in_words
from multilora_store.cli.schema import SyncOptions
from multilora_store.cli.stores import local_path
from multilora_store.cli.terminal import Terminal

__all__ = ["run"]


def run(options: SyncOptions, terminal: Terminal) -> Outcome:
    """Plan, copy what is new, record it in one entry."""
    from multilora_store.storage import sync

    with terminal.progress("syncing") as progress:
        report = sync(
            local_path(options.source),
            local_path(options.target),
            include=options.include,
            exclude=options.exclude,
            snapshot=options.snapshot,
            delete=options.delete,
            max_delete=options.max_delete,
            diverged=options.diverged,  # type: ignore[arg-type]  # checked there, with the valid words in the error
            dry_run=options.dry_run,
            progress=progress,
        )
    found = report.to_json()
    if report.unchanged:
        return Outcome(document=found, view=[f"{report.target}: up to date with {report.source}"])
    view = [f"+ {name}" for name in found["versions"]] + [f"+ snapshot {name}" for name in found["snapshots"]]
    view += [f"+ {name}" for name in found["tags"]] + [f"- {name}" for name in (*found["untagged"], *found["deleted"])]
    view += [f"- snapshot {name}" for name in found["dropped"]]
    view += [f"diverged: {name}" for name in found["diverged"]]
    amount = f"{report.files} files, {bytes_in_words(report.nbytes)}"
    view.append(f"would copy {amount}" if report.dry_run else f"copied {amount}, in {report.seconds:.1f} s")
    return Outcome(document=found, view=view)
