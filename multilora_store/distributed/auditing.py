"""What a model looks like on every rank, checked: nothing uncovered, nothing on meta, no flag or gradient astray."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from multilora_store.assembly.bridge import active_adapters, adapter_parameters, innermost, trainable_adapters
from multilora_store.distributed.agreement import Ranks
from multilora_store.distributed.layout import AdapterLayout, layouts
from multilora_store.distributed.optimizer import groups_of
from multilora_store.distributed.sharded import backend_of, ranks_of, reshard, units_of, wrapping_of
from multilora_store.errors import AuditError

__all__ = ["KINDS", "REMEDIES", "AdapterSummary", "AuditReport", "Finding", "audit"]

KINDS: Final = {
    "meta": "on the meta device: it has no values",
    "plain": "a plain tensor on a sharded model: every rank would train its own",
    "mesh": "on another mesh than the rest of the model",
    "optimizer": "trainable, but in no parameter group of the optimizer",
    "stale": "in the optimizer, but no longer a parameter of the model",
    "gradient": "frozen, but it still has a gradient, by which an optimizer would move it",
    "flag": "its requires_grad changed without being asked",
    "drift": "replicas on different ranks are no longer equal",
    "idle": "trainable, but its adapter is not active: it will receive no gradient",
}
REMEDIES: Final = {
    "meta": "give the base and the adapters their values before training: restore(), or a base on a device",
    "plain": "assemble every adapter before shard()",
    "mesh": "shard the model once, on one mesh",
    "optimizer": "build the optimizer after the wrap, from the trainable parameters",
    "stale": "build the optimizer anew after attach() and detach(), or give it to them",
    "gradient": "zero_grad(set_to_none=True) after a switch",
    "flag": "set flags through activate(model, ..., trainable=[...]) alone",
    "drift": "restore() the last snapshot, and switch on every rank alike",
    "idle": "activate it too, or leave it out of trainable: adapters.NAME.active=true or adapters.NAME.trainable=false",
}
NOTES: Final = frozenset({"idle"})


@dataclass(frozen=True, order=True)
class Finding:
    """One fault (or note) about one tensor, and the ranks that found it."""

    kind: str
    adapter: str
    tensor: str
    detail: str = ""
    ranks: tuple[int, ...] = (0,)

    @property
    def fault(self) -> bool:
        """Whether it is more than a note."""
        return self.kind not in NOTES

    @property
    def remedy(self) -> str:
        """What would do."""
        return REMEDIES[self.kind]

    def __str__(self) -> str:
        of = f"adapter {self.adapter}: " if self.adapter else ""
        told = f" ({self.detail})" if self.detail else ""
        return f"{of}{self.tensor}: {KINDS[self.kind]}{told} [rank {', '.join(map(str, self.ranks))}]"


@dataclass(frozen=True)
class AdapterSummary:
    """One adapter as this rank holds it: tensors and elements in all, bytes here, and its two states."""

    tensors: int
    numel: int
    local_nbytes: int
    active: bool
    trainable: bool


@dataclass(frozen=True)
class AuditReport:
    """What an audit found; the findings are the same on every rank.

    Attributes:
        findings: Faults and notes, sorted.
        backend: `fsdp2`, `fsdp1`, `ddp` or `plain`.
        granularity: `adapter`, `layer`, or "" where `shard` did not wrap the model.
        ranks: How many ranks hold it.
        units: FSDP units in all.
        base_numel: Elements of the base, all ranks together: once, however many adapters there are.
        base_local_nbytes: Bytes of the base on this rank.
        adapters: By name.
    """

    findings: tuple[Finding, ...]
    backend: str
    granularity: str
    ranks: int
    units: int
    base_numel: int
    base_local_nbytes: int
    adapters: Mapping[str, AdapterSummary] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there is no fault; notes do not count."""
        return not any(finding.fault for finding in self.findings)

    def raise_if_failed(self) -> AuditReport:
        """The report itself.

        Raises:
            AuditError: there are faults; each is named.
        """
        faults = [finding for finding in self.findings if finding.fault]
        if faults:
            shown = "\n".join(f"  {finding}" for finding in faults[:20])
            more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
            raise AuditError(
                f"the audit found {len(faults)} fault{'s' if len(faults) > 1 else ''} in this {self.backend} model",
                why=shown + more,
                remedy="; ".join(dict.fromkeys(finding.remedy for finding in faults)),
                findings=faults,
            )
        return self


def audit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    replicas: bool = False,
    expected_flags: Mapping[str, bool] | None = None,
    ranks: Ranks | None = None,
) -> AuditReport:
    """Checks every adapter and the base on every rank; all ranks get the same findings.

    Args:
        model: Plain or under any wrapper; it is resharded first.
        optimizer: With it, trainable parameters in no group and stale ones are found.
        replicas: Whether to compare checksums of what several ranks hold alike (plain, DDP, HSDP).
        expected_flags: `name: canonical tensor` -> requires_grad, to find flags that flipped.
        ranks: Who takes part; found from the model if not given.

    Raises:
        RankFailedError: a rank could not be audited.
    """
    ranks = ranks or ranks_of(model)
    found = ranks.together("audit", lambda: _look(model, optimizer, expected_flags or {}))
    findings, held = found
    if replicas:
        findings = findings + _drifted(ranks, held)
    shared = ranks.share("audit", findings)
    return _report(model, held, _joined(shared, ranks.members))


def _look(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, flags: Mapping[str, bool]
) -> tuple[list[Finding], dict[str, AdapterLayout]]:
    reshard(model)
    held = layouts(model)
    findings = [*_misplaced(model, held), *_astray(model, held, flags)]
    if optimizer is not None:
        findings += _untold(held, model, optimizer)
    return findings, held


def _misplaced(model: nn.Module, held: Mapping[str, AdapterLayout]) -> Iterator[Finding]:
    backend = backend_of(model)
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    common = max(meshes, key=meshes.count) if meshes else None
    of_adapters: set[int] = set()
    for name, adapter in held.items():
        for key in adapter.tensors:
            tensor = adapter.tensors[key]
            of_adapters.add(id(tensor))
            if tensor.is_meta:
                yield Finding("meta", name, key)
            if not isinstance(tensor, nn.Parameter):
                continue
            cut = isinstance(tensor, DTensor) or adapter.layouts[key].group is not None
            if backend in ("fsdp1", "fsdp2") and not cut:
                yield Finding("plain", name, key)
            elif isinstance(tensor, DTensor) and tensor.device_mesh != common:
                yield Finding("mesh", name, key, str(tensor.device_mesh))
    if backend == "fsdp2":
        for key, parameter in innermost(model).named_parameters():
            if id(parameter) not in of_adapters and not isinstance(parameter, DTensor):
                yield Finding("plain", "", key)


def _astray(model: nn.Module, held: Mapping[str, AdapterLayout], flags: Mapping[str, bool]) -> Iterator[Finding]:
    active = active_adapters(model)
    for name in held:
        for key, parameter in adapter_parameters(model, name).items():
            if parameter.requires_grad and name not in active:
                yield Finding("idle", name, key)
            if not parameter.requires_grad and parameter.grad is not None:
                yield Finding("gradient", name, key)
            expected = flags.get(f"{name}: {key}", parameter.requires_grad)
            if expected != parameter.requires_grad:
                yield Finding("flag", name, key, f"{expected} became {parameter.requires_grad}")


def _untold(held: Mapping[str, AdapterLayout], model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    known = groups_of(optimizer)
    for name in held:
        for key, parameter in adapter_parameters(model, name).items():
            if parameter.requires_grad and id(parameter) not in known:
                yield Finding("optimizer", name, key)
    alive = {id(p) for p in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in alive:
                yield Finding("stale", "", f"param_groups[{index}][{place}]", str(tuple(parameter.shape)))


def _drifted(ranks: Ranks, held: Mapping[str, AdapterLayout]) -> list[Finding]:
    """Ranks that hold the same piece of a tensor must hold the same bytes."""
    sums: dict[str, dict[str, tuple[int, str]]] = {
        name: {
            key: (layout.place if layout.group is not None else 0, checksum(layout.local(adapter.tensors[key])))
            for key, layout in adapter.layouts.items()
            if not adapter.tensors[key].is_meta
        }
        for name, adapter in held.items()
    }
    every = ranks.share("audit of replicas", sums)
    found: list[Finding] = []
    for name, mine in sums.items():
        for key, (place, digest) in mine.items():
            odd = [
                ranks.members[i]
                for i, theirs in enumerate(every)
                if theirs[name][key][0] == place and theirs[name][key][1] != digest
            ]
            if odd:
                found.append(Finding("drift", name, key, f"differs from rank {', '.join(map(str, odd))}"))
    return found


def checksum(piece: torch.Tensor) -> str:
    """SHA-256 of the bytes of a local tensor; processors have instructions for it, and for none of its kin."""
    data = piece.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def _joined(shared: Iterable[list[Finding]], members: tuple[int, ...]) -> tuple[Finding, ...]:
    by: dict[tuple[str, str, str, str], list[int]] = {}
    for rank, findings in zip(members, shared, strict=True):
        for each in findings:
            by.setdefault((each.kind, each.adapter, each.tensor, each.detail), []).append(rank)
    return tuple(sorted(Finding(*key, ranks=tuple(found)) for key, found in by.items()))


def _report(model: nn.Module, held: Mapping[str, AdapterLayout], findings: tuple[Finding, ...]) -> AuditReport:
    wrapping = wrapping_of(model)
    active, trainable = active_adapters(model), trainable_adapters(model)
    of_adapters = {id(t) for adapter in held.values() for t in adapter.tensors.values()}
    base = [p for p in model.parameters() if id(p) not in of_adapters]
    return AuditReport(
        findings=findings,
        backend=backend_of(model),
        granularity=wrapping.granularity if wrapping else "",
        ranks=ranks_of(model).size,
        units=sum(1 for _ in units_of(model)),
        base_numel=sum(p.numel() for p in base),
        base_local_nbytes=sum(local_nbytes(p) for p in base),
        adapters={
            name: AdapterSummary(
                tensors=len(adapter.tensors),
                numel=sum(layout.numel for layout in adapter.layouts.values()),
                local_nbytes=sum(local_nbytes(t) for t in adapter.tensors.values()),
                active=name in active,
                trainable=name in trainable,
            )
            for name, adapter in held.items()
        },
    )


def local_nbytes(tensor: Any) -> int:
    """Bytes of a tensor on this rank."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.numel() * local.element_size())
