"""How two adapters relate, module by module: what a merge of them will meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from multilora_store.errors import MergeError
from multilora_store.merging.blocks import Matrix, block_rows
from multilora_store.merging.capability import kinds_of
from multilora_store.merging.layout import FactorPair
from multilora_store.merging.lowrank import LowRank
from multilora_store.merging.source import MergeSource
from multilora_store.storage.progress import Listener, Meter

if TYPE_CHECKING:
    from multilora_store.storage import Store

__all__ = ["Comparison", "ModuleComparison", "compare", "diff"]

SIGN_BLOCKS: Final = 8
"""Blocks of rows of a matrix that the rate of sign conflicts is counted on, evenly spaced."""
_TINY: Final = 1e-10
_COMPARABLE: Final = frozenset(
    {"linear", "embedding", "conv", "grouped_conv", "experts", "rslora", "rank_pattern", "lora_bias"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleComparison:
    """Two deltas of one module.

    Attributes:
        path: The module.
        ranks: Rank of the first and of the second.
        norms: Their Frobenius norms.
        inner: Their Frobenius inner product.
        distance: Norm of their difference.
        overlap_out, overlap_in: How much of the smaller column space (row space) lies in the larger one: the mean
            squared cosine of the principal angles, 0 for orthogonal spaces, 1 for nested ones.
        sign_conflict: Fraction of the places, among those where neither is zero, where the signs differ.
    """

    path: str
    ranks: tuple[int, int]
    norms: tuple[float, float]
    inner: float
    distance: float
    overlap_out: float
    overlap_in: float
    sign_conflict: float

    @property
    def cosine(self) -> float:
        """Cosine between the deltas as vectors; 0 where one of them is zero."""
        return _cosine(self.inner, *self.norms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two adapters.

    Attributes:
        names: The first and the second.
        modules: The modules that both adapt, by path.
        only: Modules of the first alone, and of the second alone.
        full: Tensors trained in full, of the first and of the second.
        fields: Configuration field -> the two values, where they differ.
        identical: Whether they are one content.
    """

    names: tuple[str, str]
    modules: tuple[ModuleComparison, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    full: tuple[tuple[str, ...], tuple[str, ...]]
    fields: dict[str, tuple[Any, Any]]
    identical: bool

    @property
    def cosine(self) -> float:
        """Cosine over all common modules as one vector."""
        first, second = (math.sqrt(math.fsum(m.norms[i] ** 2 for m in self.modules)) for i in (0, 1))
        return _cosine(math.fsum(m.inner for m in self.modules), first, second)

    @property
    def sign_conflict(self) -> float:
        """Mean rate of sign conflicts over the common modules; 0 where there are none."""
        return math.fsum(m.sign_conflict for m in self.modules) / len(self.modules) if self.modules else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "names": list(self.names),
            "identical": self.identical,
            "cosine": self.cosine,
            "sign_conflict": self.sign_conflict,
            "modules": [
                {
                    "path": m.path,
                    "ranks": list(m.ranks),
                    "norms": list(m.norms),
                    "distance": m.distance,
                    "cosine": m.cosine,
                    "overlap_out": m.overlap_out,
                    "overlap_in": m.overlap_in,
                    "sign_conflict": m.sign_conflict,
                }
                for m in self.modules
            ],
            "only": [list(paths) for paths in self.only],
            "full": [list(names) for names in self.full],
            "fields": {field: list(values) for field, values in self.fields.items()},
        }


def diff(store: Store, first: str, second: str, *, progress: Listener | None = None) -> Comparison:
    """Compare two stored adapters by their references; see `compare`."""
    sources = [MergeSource.stored(ref, store.get(ref)) for ref in (first, second)]
    return compare(sources[0], sources[1], progress=progress)


def compare(first: MergeSource, second: MergeSource, *, progress: Listener | None = None) -> Comparison:
    """Compare two adapters on their deltas, in the factors; only signs are counted on dense blocks.

    Args:
        first, second: The adapters.
        progress: Called after each module, with the bytes of its deltas' factors in float32.

    Raises:
        MergeError: one of them is of a kind whose deltas do not stand in its file, or they differ in a module's shape.
    """
    for source in (first, second):
        odd = sorted(kinds_of(source.config) - _COMPARABLE)
        if odd:
            raise MergeError(
                f"adapter {source.name!r} cannot be compared: it is of the kind {odd[0]}",
                why="its weight deltas do not follow from its file alone",
                kind=odd[0],
            )
    ours, theirs = first.layout, second.layout
    common = sorted(set(ours.pairs) & set(theirs.pairs))
    sizes = {path: _size(ours.pairs[path]) + _size(theirs.pairs[path]) for path in common}
    meter = Meter(progress, files=len(common), nbytes=sum(sizes.values()))

    def compared(path: str) -> ModuleComparison:
        found = _compare_module(first, second, ours.pairs[path], theirs.pairs[path])
        meter.add(sizes[path])
        return found

    return Comparison(
        names=(first.name, second.name),
        modules=tuple(map(compared, common)),
        only=(
            tuple(sorted(set(ours.pairs) - set(theirs.pairs))),
            tuple(sorted(set(theirs.pairs) - set(ours.pairs))),
        ),
        full=(ours.full, theirs.full),
        fields=_fields(first, second),
        identical=first.digest == second.digest,
    )


def _size(pair: FactorPair) -> int:
    return 4 * pair.groups * pair.rank * sum(pair.shape)


def _compare_module(first: MergeSource, second: MergeSource, ours: FactorPair, theirs: FactorPair) -> ModuleComparison:
    if ours.geometry != theirs.geometry:
        raise MergeError(
            f"module {ours.path} has another shape in {second.name!r} than in {first.name!r}",
            why=f"{ours.kind} {ours.shape} against {theirs.kind} {theirs.shape}",
            remedy="compare adapters of one base",
            module=ours.path,
        )
    a, b = ours.read(first.tensors), theirs.read(second.tensors)
    left, right = a.svd(), b.svd()
    kept = (left.s > _TINY * left.s[:, :1], right.s > _TINY * right.s[:, :1])
    return ModuleComparison(
        path=ours.path,
        ranks=(ours.rank, theirs.rank),
        norms=(a.norm(), b.norm()),
        inner=a.inner(b),
        distance=LowRank.total([a, b], [1.0, -1.0]).norm(),
        overlap_out=_overlap(left.u.mT, right.u.mT, kept),
        overlap_in=_overlap(left.vh, right.vh, kept),
        sign_conflict=_sign_conflict(a, b),
    )


def _overlap(ours: Tensor, theirs: Tensor, kept: Sequence[Tensor]) -> float:
    """Mean squared cosine of the principal angles between two row spaces given by orthonormal rows."""
    squares = (ours @ theirs.mT).square() * kept[0][:, :, None] * kept[1][:, None, :]
    smaller = torch.minimum(kept[0].sum(dim=1), kept[1].sum(dim=1))
    return float(squares.sum()) / max(1, int(smaller.sum()))


def _sign_conflict(a: LowRank, b: LowRank) -> float:
    conflicts = places = 0
    for index in range(a.groups):
        ours, theirs = (Matrix.of_delta(delta.group(index), ("",)) for delta in (a, b))
        blocks = block_rows(a.shape)
        for rows in blocks[:: max(1, -(-len(blocks) // SIGN_BLOCKS))]:
            product = ours.block(rows).values * theirs.block(rows).values
            conflicts += int((product < 0).sum())
            places += int((product != 0).sum())
    return conflicts / places if places else 0.0


def _fields(first: MergeSource, second: MergeSource) -> dict[str, tuple[Any, Any]]:
    ours, theirs = first.config.canonical(), second.config.canonical()
    return {
        field: (ours.get(field), theirs.get(field))
        for field in sorted(set(ours) | set(theirs))
        if ours.get(field) != theirs.get(field)
    }


def _cosine(inner: float, first: float, second: float) -> float:
    size = first * second
    return 0.0 if size == 0.0 else max(-1.0, min(1.0, inner / size))
