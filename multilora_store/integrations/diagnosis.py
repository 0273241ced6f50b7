"""What a look finds: findings with cause, evidence and remedy, and the adapters that were seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from multilora_store.integrations.recognising import Recognised

__all__ = ["Diagnosis", "Inspection", "SeenAdapter", "said", "some"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One finding.

    Attributes:
        area: Where it was found: `checkpoint`, `store`, `set`, or an audit check's name.
        subject: The adapter, version or file.
        what: What is wrong.
        cause: What makes that happen.
        evidence: What shows it: a file, tensors, numbers.
        remedy: What would do.
    """

    area: str
    subject: str
    what: str
    cause: str = ""
    evidence: str = ""
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenAdapter:
    """An adapter of a checkpoint: its name ("" where none is written down), where it lies, what it holds.

    Attributes:
        declared: Whether an `adapter_config.json` lies beside it.
        tensors, numel: How many tensors and elements; 0 where they could not be looked at.
    """

    name: str
    where: str
    declared: bool
    tensors: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a checkpoint is, which adapters are in it, and what was found."""

    recognised: Recognised
    adapters: tuple[SeenAdapter, ...]
    findings: tuple[Diagnosis, ...]


def said(subject: str, what: str, evidence: str, cause: str, remedy: str) -> Diagnosis:
    return Diagnosis(area="checkpoint", subject=subject, what=what, cause=cause, evidence=evidence, remedy=remedy)


def some(names: Sequence[str]) -> str:
    """The first of several, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
