"""`sync`: one store brought up to another, once or again and again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from multilora_store.cli.failures import document_of
from multilora_store.cli.outcome import Outcome, bytes_in_words
from multilora_store.cli.schema import SyncOptions
from multilora_store.cli.stores import other_store
from multilora_store.cli.terminal import Terminal
from multilora_store.errors import UsageError
from multilora_store.storage.progress import Listener
from multilora_store.storage.store import Store
from multilora_store.storage.sync import SyncReport, sync

__all__ = ["run"]


def run(options: SyncOptions, terminal: Terminal) -> Outcome:
    """Plan, copy what is new, record it in one entry; with `watch`, from then on."""
    if options.trusted_keys is not None:
        options.store.trusted_keys = options.trusted_keys
    source = other_store(options.source, options, options.source_options)
    target = other_store(options.target, options, options.target_options, signing=True)
    if options.watch is not None:
        return _watch(source, target, options, terminal)
    with terminal.progress("syncing") as progress:
        report = sync(source, target, **_choices(options, progress), dry_run=options.dry_run)
    if report.unchanged:
        kept = [f"kept: {words}" for words in report.plan.kept]
        return Outcome(document=report.to_json(), view=[f"{report.target}: up to date with {report.source}", *kept])
    return Outcome(document=report.to_json(), view=_view(report))


def _watch(source: Store, target: Store, options: SyncOptions, terminal: Terminal) -> Outcome:
    """A line for every change; an interruption is how it ends, so it is none."""
    from multilora_store.storage.following import follow

    if options.dry_run:
        raise UsageError("watch= repeats what dry_run= does not do", remedy="leave one of them out")
    assert options.watch is not None
    terminal.note(f"following {source.url} every {options.watch:g} s; Ctrl-C ends it")
    with _ends_in_silence(), terminal.progress("syncing") as progress:
        for done in follow(source, target, every=options.watch, **_choices(options, progress)):
            if done.report is not None:
                view = [] if done.report.unchanged else _view(done.report)
                terminal.show(Outcome(document=done.report.to_json(), view=view))
            elif done.error is not None:
                terminal.note(f"warning: {done.error.what}; again in {done.wait:.0f} s")
                document = {"error": document_of(done.error), "again_in": round(done.wait, 1)}
                terminal.show(Outcome(document=document, code=done.error.exit_code))
    return Outcome(document={}, shown=True)


@contextmanager
def _ends_in_silence() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        return


def _choices(options: SyncOptions, progress: Listener | None) -> dict[str, Any]:
    return {
        "include": options.include,
        "exclude": options.exclude,
        "snapshot": options.snapshot,
        "tags": options.tags,
        "delete": options.delete,
        "max_delete": options.max_delete,
        "diverged": options.diverged,
        "jobs": options.jobs,
        "bandwidth": options.bandwidth,
        "progress": progress,
    }


def _view(report: SyncReport) -> list[str]:
    """One line for every change, and what it came to."""
    found = report.to_json()
    view = [f"+ {name}" for name in found["versions"]] + [f"+ snapshot {name}" for name in found["snapshots"]]
    view += [f"+ {name}" for name in found["tags"]] + [f"- {name}" for name in (*found["untagged"], *found["deleted"])]
    view += [f"- snapshot {name}" for name in found["dropped"]]
    view += [f"diverged: {name}" for name in found["diverged"]] + [f"kept: {words}" for words in found["kept"]]
    amount = f"{report.files} files, {bytes_in_words(report.nbytes)}"
    view.append(f"would copy {amount}" if report.dry_run else f"copied {amount}, in {report.seconds:.1f} s")
    return view
