"""`verify`: what is stored against what was recorded."""

from __future__ import annotations

from multilora_store.cli.documents import jsonable
from multilora_store.cli.outcome import Outcome
from multilora_store.cli.schema import VerifyOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal

__all__ = ["run"]


def run(options: VerifyOptions, terminal: Terminal) -> Outcome:
    """One line per finding; exit code 3 if there is one."""
    store = opened_store(options, terminal)
    with terminal.waiting(f"verifying {store.url}"):
        report = store.verify(options.ref, deep=options.deep)
    what = options.ref or store.url
    findings = [jsonable(item) for item in report.findings]
    document = {"store": store.url, "ref": options.ref, "deep": options.deep, "ok": report.ok, "findings": findings}
    if report.ok:
        return Outcome(document=document, view=[f"{what}: nothing wrong", *map(str, report.findings)])
    return Outcome(document=document, view=[f"{what}: problems found", *map(str, report.findings)], code=3)
