"""What a merge lost, module by module and in all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MergeReport", "ModuleReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReport:
    """The merge of one module in numbers.

    Attributes:
        path: The module.
        kind: The layer: `linear`, `embedding`, `conv`, `grouped_conv`, `experts`.
        adapters: How many adapters adapt it.
        rank: Rank of the result (of each group).
        norm: Frobenius norm of what the strategy defines as the result.
        apart: Frobenius norm of the difference between what is stored and that.
        sum_norm: Norm of the weighted sum of the deltas.
        sum_apart: Norm of the difference between what is stored and the weighted sum.
    """

    path: str
    kind: str
    adapters: int
    rank: int
    norm: float
    apart: float
    sum_norm: float
    sum_apart: float

    @property
    def error(self) -> float:
        """Reconstruction error: what truncation to the rank and rounding to the dtype lost, relative."""
        return _ratio(self.apart, self.norm)

    @property
    def sum_distance(self) -> float:
        """How far the stored result is from the weighted sum of the deltas, relative to it."""
        return _ratio(self.sum_apart, self.sum_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """The whole merge in numbers.

    Attributes:
        strategy: Its name.
        modules: One report for each module, by path.
        notes: What a reader should know: another base name, tensors that a rule decided.
        seconds: Wall-clock time; not stored.
        bytes: Bytes of the result's tensors.
        sampled: For a dry run that measured some modules only: how many modules there are in all; else None.
    """

    strategy: str
    modules: tuple[ModuleReport, ...]
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    bytes: int = 0
    sampled: int | None = None

    @property
    def error(self) -> float:
        """Reconstruction error over all modules: `|stored - defined| / |defined|`."""
        return _ratio(_root([m.apart for m in self.modules]), _root([m.norm for m in self.modules]))

    @property
    def sum_distance(self) -> float:
        """Distance to the weighted sum over all modules, relative."""
        return _ratio(_root([m.sum_apart for m in self.modules]), _root([m.sum_norm for m in self.modules]))

    @property
    def worst(self) -> ModuleReport:
        """The module with the largest reconstruction error."""
        return max(self.modules, key=lambda module: module.error)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values, for the store and for tables; without the time."""
        return {
            "strategy": self.strategy,
            "error": _plain(self.error),
            "sum_distance": _plain(self.sum_distance),
            "bytes": self.bytes,
            "notes": list(self.notes),
            "modules": [
                {
                    "path": m.path,
                    "kind": m.kind,
                    "adapters": m.adapters,
                    "rank": m.rank,
                    "norm": _plain(m.norm),
                    "error": _plain(m.error),
                    "sum_distance": _plain(m.sum_distance),
                }
                for m in self.modules
            ],
        }


def _root(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values))


def _ratio(apart: float, size: float) -> float:
    if size == 0.0:
        return 0.0 if apart == 0.0 else math.inf
    return apart / size


def _plain(value: float) -> float | None:
    """Six digits; None for infinity, which JSON does not have."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
