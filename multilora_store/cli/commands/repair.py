"""`repair`: set damaged versions aside, and take whole copies from another store."""

from __future__ import annotations

from multilora_store.cli.documents import finding_line
from multilora_store.cli.outcome import Outcome
from multilora_store.cli.schema import RepairOptions
from multilora_store.cli.stores import opened_store, other_store
from multilora_store.cli.terminal import Terminal

__all__ = ["run"]


def run(options: RepairOptions, terminal: Terminal) -> Outcome:
    """Verify, mend what can be mended; exit code 3 if something stays damaged."""
    from multilora_store.storage import repair

    store = opened_store(options, terminal)
    other = other_store(options.source, options, options.source_options) if options.source else None
    with terminal.progress("repairing") as progress:
        report = repair(store, from_=other, deep=options.deep, dry_run=options.dry_run, progress=progress)
    found = report.to_json()
    view = [finding_line(finding) for finding in report.findings] or [f"{store.url}: nothing to repair"]
    would = "would be " if report.dry_run else ""
    view += [f"entry {seq} of the journal {would}restored" for seq in found["entries"]]
    view += [f"{would}mended: {name}" for name in (*found["mended"], *found["renewed"])]
    view += [f"{would}set aside: {name}" for name in found["deleted"]]
    if not report.ok:
        view.append("something stays damaged; name a store that holds it whole: repair source=URL")
    return Outcome(document={"store": store.url, "ok": report.ok, **found}, view=view, code=0 if report.ok else 3)
