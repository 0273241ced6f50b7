"""`verify`: what is stored against what was recorded, and against what a server takes."""

from __future__ import annotations

from typing import Any

from multilora_store.cli.documents import finding_line
from multilora_store.cli.outcome import Outcome
from multilora_store.cli.schema import VerifyOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal

__all__ = ["run"]


def run(options: VerifyOptions, terminal: Terminal) -> Outcome:
    """One line per finding; exit code 3 if there is one."""
    store = opened_store(options, terminal)
    with terminal.progress("verifying") as progress:
        report = store.verify(options.ref, deep=options.deep, progress=progress)
    what = options.ref or store.url
    document: dict[str, Any] = {
        "store": store.url,
        "ref": options.ref,
        "deep": options.deep,
        "ok": report.ok,
        "findings": [item.to_json() for item in report.findings],
        "profile": None,
    }
    view = [
        f"{what}: problems found" if report.findings else f"{what}: nothing wrong",
        *map(finding_line, report.findings),
    ]
    fine = report.ok
    if options.profile is not None:
        from multilora_store.storage.profiles import verify_profile

        refs = [options.ref] if options.ref else None
        served = verify_profile(store, refs, profile=options.profile, max_rank=options.max_rank)
        document["profile"] = served.to_json()
        for ref, findings in served.adapters.items():
            view += [f"{ref}: {finding.severity}: {finding.what}" for finding in findings] or [f"{ref}: served"]
        view.append(f"{options.profile} needs a rank setting of {served.needs.setting or served.needs.max_rank}")
        fine = fine and served.ok
        document["ok"] = fine
    return Outcome(document=document, view=view, code=0 if fine else 3)
