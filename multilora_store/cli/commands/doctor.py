"""`doctor`: everything that can be looked at in a store and a set, each finding with what would do."""

from __future__ import annotations

from typing import Any

from multilora_store.cli.models import build_base
from multilora_store.cli.outcome import Outcome, Table
from multilora_store.cli.schema import DoctorOptions
from multilora_store.cli.sets import locked
from multilora_store.cli.stores import store_if_any
from multilora_store.cli.terminal import Terminal
from multilora_store.cli.typed import plain
from multilora_store.errors import MultiLoRAError, UsageError
from multilora_store.plugins import default_registry

__all__ = ["run"]


def run(options: DoctorOptions, terminal: Terminal) -> Outcome:
    """Verify the store; assemble and audit the set, if one is named; exit code 3 if anything is found."""
    store = store_if_any(options, terminal)
    named = bool(options.adapters or options.snapshot or options.lock_from)
    if store is None and not named:
        raise UsageError("doctor needs something to look at", remedy="give store.url=..., or a set: '+adapters=[a,b]'")
    looked, findings = [], []
    if store is not None:
        looked.append("store")
        with terminal.progress("verifying") as progress:
            report = store.verify(progress=progress)
        findings += [_finding("store", one.subject, one.message, one.remedy) for one in report.findings]
    if named:
        looked.append("set")
        try:
            findings += _of_set(options, store)
        except MultiLoRAError as error:
            if isinstance(error, UsageError):
                raise
            findings.append(_finding("assembly", "", f"{error.what} {error.why}".strip(), error.remedy))
    rows = [(one["area"], one["subject"], one["what"], one["remedy"]) for one in findings]
    document = {"store": store.url if store else None, "looked_at": looked, "ok": not findings, "findings": findings}
    if not findings:
        return Outcome(document=document, view=[f"looked at the {' and the '.join(looked)}: nothing wrong"])
    table = Table(columns=("area", "what", "finding", "remedy"), rows=rows)
    return Outcome(document=document, view=[table], code=3)


def _of_set(options: DoctorOptions, store: Any) -> list[dict[str, str]]:
    from multilora_store.assembly import assemble
    from multilora_store.distributed import audit

    model = assemble(build_base(plain(options.base)), locked(options, store), store=store)
    found = [_finding("audit", one.adapter, str(one), "") for one in audit(model).findings]
    registry = default_registry()
    for name in registry.names("audit_check"):
        check = registry.get("audit_check", name).load()
        found += [_finding(name, "", str(one), "") for one in check(model)]
    return found


def _finding(area: str, subject: str, what: str, remedy: str) -> dict[str, str]:
    return {"area": area, "subject": subject, "what": " ".join(what.split()), "remedy": remedy}
