"""`doctor`: everything that can be looked at in a store, a set or a checkpoint, each finding with what would do."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from multilora_store.cli.choices import bound
from multilora_store.cli.models import build_model
from multilora_store.cli.outcome import Outcome, Table, count_in_words
from multilora_store.cli.schema import DoctorOptions
from multilora_store.cli.sets import locked
from multilora_store.cli.stores import local_path, store_for_set, store_if_any
from multilora_store.cli.terminal import Terminal
from multilora_store.cli.typed import plain
from multilora_store.errors import MultiLoRAError, UsageError
from multilora_store.integrations.inspection import Diagnosis, Inspection, inspect_checkpoint, some
from multilora_store.plugins import default_registry

if TYPE_CHECKING:
    from multilora_store.distributed.auditing import AuditReport
    from multilora_store.storage import Store

__all__ = ["run"]


def run(options: DoctorOptions, terminal: Terminal) -> Outcome:
    """Verify the store; assemble and audit the set, if one is named; or look into a checkpoint; 3 if anything is found.

    Raises:
        UsageError: there is nothing to look at, or a checkpoint and a set at once.
    """
    named = bool(options.adapters or options.snapshot or options.lock_from)
    if options.checkpoint is not None:
        if named or options.checks:
            raise UsageError("doctor looks at a checkpoint or at a set", remedy="leave one of them out")
        return _of_checkpoint(options.checkpoint, options.allow_pickle, terminal)
    if options.checks and not named:
        raise UsageError("checks= look at a model", remedy="name a set too, e.g. '+adapters=[a,b]', or leave them out")
    store = store_for_set(options, terminal) if named else store_if_any(options, terminal)
    if store is None and not named:
        raise UsageError(
            "doctor needs something to look at",
            remedy="give store.url=..., a set: '+adapters=[a,b]', or a checkpoint: doctor ./checkpoint-100",
        )
    looked, seen, findings = [], [], []
    if store is not None:
        looked.append("store")
        findings += _of_store(store, terminal)
    if named:
        looked.append("set")
        try:
            lines, found = _of_set(options, store, terminal)
        except UsageError:
            raise
        except MultiLoRAError as error:
            lines, found = [], [_refused(error)]
        seen += lines
        findings += found
    return _outcome(looked, store.url if store is not None else None, seen, findings, {"checkpoint": None})


def _of_store(store: Store, terminal: Terminal) -> list[Diagnosis]:
    with terminal.progress("verifying") as progress:
        report = store.verify(progress=progress)
    return [
        Diagnosis(
            area="store",
            subject=one.subject,
            what=one.message,
            cause=f"{one.kind}: the files are not what the journal recorded",
            evidence=one.path,
            remedy=one.remedy,
        )
        for one in report.findings
    ]


def _of_set(options: DoctorOptions, store: Store | None, terminal: Terminal) -> tuple[list[str], list[Diagnosis]]:
    """What exists and what is active; the audit, and every check that a plugin brings."""
    from multilora_store.distributed import audit

    with terminal.progress("assembling") as progress:
        model = build_model(options, locked(options, store), store, progress=progress)
    report = audit(model)
    found = list(_audited(report))
    registry = default_registry()
    for name in options.checks or registry.names("audit_check"):
        check = registry.get("audit_check", name)
        said = [str(one) for one in bound(check, plain(options.checks.get(name)) or {})(model)]
        found += [Diagnosis(area=name, subject="", what=one, cause=check.description) for one in said]
    return _states(report), found


def _audited(report: AuditReport) -> list[Diagnosis]:
    """One diagnosis for each kind of fault and adapter, with some of its tensors."""
    from multilora_store.distributed.auditing import KINDS, REMEDIES

    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in report.findings:
        alike[one.adapter, one.kind].append(f"{one.tensor} ({one.detail})" if one.detail else one.tensor)
    found = []
    for (adapter, kind), tensors in alike.items():
        what, _, cause = KINDS[kind].partition(": ")
        found.append(
            Diagnosis(
                area="audit",
                subject=adapter,
                what=f"{len(tensors)} tensors: {what}",
                cause=cause or what,
                evidence=some(tensors),
                remedy=REMEDIES[kind],
            )
        )
    return found


def _states(report: AuditReport) -> list[str]:
    """Who exists, who takes part, who is trained: the first line of every check."""
    names = list(report.adapters)
    active = [name for name, one in report.adapters.items() if one.active]
    trained = [name for name, one in report.adapters.items() if one.trainable]
    return [
        f"{len(names)} adapters exist: {', '.join(names)}",
        f"active: {', '.join(active) or 'none'}; trainable: {', '.join(trained) or 'none'}",
    ]


def _refused(error: MultiLoRAError) -> Diagnosis:
    return Diagnosis(
        area="assembly",
        subject="",
        what=" ".join(error.what.split()),
        cause=" ".join(error.why.split()),
        evidence=type(error).__name__,
        remedy=error.remedy,
    )


def _of_checkpoint(path: str, allow_pickle: bool, terminal: Terminal) -> Outcome:
    with terminal.progress("looking") as progress:
        found = inspect_checkpoint(local_path(path), allow_pickle=allow_pickle, progress=progress)
    seen = found.recognised
    beside = f", beside it {', '.join(seen.parts)}" if seen.parts else ""
    return _outcome(["checkpoint"], None, [f"{path}: {seen.title}{beside}", *_held(found)], found.findings, {
        "checkpoint": {
            "path": str(seen.path),
            "kind": seen.kind,
            "writer": seen.writer or None,
            "step": seen.step,
            "parts": list(seen.parts),
            "adapters": [
                {"name": one.name, "path": one.where, "configured": one.declared, "tensors": one.tensors,
                 "parameters": one.numel}
                for one in found.adapters
            ],
        }
    })  # fmt: skip


def _held(found: Inspection) -> list[Table | str]:
    if not found.adapters:
        return []
    rows = [
        (one.name, str(one.tensors), count_in_words(one.numel), "yes" if one.declared else "-")
        for one in found.adapters
    ]
    return [Table(columns=("adapter", "tensors#", "params#", "configuration"), rows=rows)]


def _outcome(looked: Any, url: str | None, seen: Any, findings: Any, more: dict[str, Any]) -> Outcome:
    document = {
        "store": url,
        "looked_at": looked,
        "ok": not findings,
        "findings": [one.to_json() for one in findings],
        **more,
    }
    if not findings:
        return Outcome(document=document, view=[*seen, f"looked at the {' and the '.join(looked)}: nothing wrong"])
    view = list(seen)
    for one in findings:
        view.append(f"{one.area}: {f'{one.subject}: ' if one.subject else ''}{one.what}")
        told = {"cause": one.cause, "evidence": one.evidence, "remedy": one.remedy}
        view += [f"  {word}: {' '.join(text.split())}" for word, text in told.items() if text]
    return Outcome(document=document, view=view, code=3)
