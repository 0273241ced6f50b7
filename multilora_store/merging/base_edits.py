"""What a merge changes in a base's tensors: which delta goes to which tensor, in which orientation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from multilora_store.errors import CoverageError, MergeError, UnsupportedError, choices
from multilora_store.merging.base_folder import BaseFolder
from multilora_store.merging.blocks import block_rows
from multilora_store.merging.layout import PREFIX, FactorPair
from multilora_store.merging.lowrank import LowRank
from multilora_store.merging.source import DTYPES, MergeSource

__all__ = ["Edit", "add_bias", "add_pair", "replace_tensor"]

_FLOATS: Final = frozenset(DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Addend:
    """One adapter's delta for one tensor, read when it is added.

    Attributes:
        source, pair, weight: The delta and what it is multiplied with.
        transposed: Whether it lies transposed in the base.
    """

    source: MergeSource
    pair: FactorPair
    weight: float
    transposed: bool

    def read(self) -> LowRank:
        """The weighted delta in the base's orientation.

        Raises:
            MergeError: it holds values that are not finite.
        """
        delta = self.pair.read(self.source.tensors).scaled(self.weight)
        if not delta.is_finite():
            raise MergeError(
                f"adapter {self.source.name!r} holds values that are not finite in module {self.pair.path}",
                remedy="merge a version from before the training diverged",
                module=self.pair.path,
            )
        return delta.transposed if self.transposed else delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Magnitude:
    """DoRA's lengths (arXiv 2402.09353, section 4): `W' = m (W + delta) / |W + delta|`, one for each output feature.

    Attributes:
        source, tensor: The adapter and the name of its vector.
        by_column: Whether the output features are the columns in the base.
    """

    source: MergeSource
    tensor: str
    by_column: bool

    def over(self, merged: Callable[[slice], Tensor], blocks: Sequence[slice]) -> Callable[[Tensor, slice], Tensor]:
        """What scales each block of rows of the sum; lengths of columns take a pass over all of them first."""
        length = self.source.tensors[self.tensor].reshape(-1)
        if not self.by_column:
            return lambda block, part: block * (length[part].to(block.dtype) / _norm(block, 1))[:, None]
        squares = torch.stack([_norm(merged(part), 0).double().square() for part in blocks]).sum(dim=0)
        factor = length.double() / squares.sqrt()
        return lambda block, part: block * factor.to(block.dtype)


def _norm(block: Tensor, dim: int) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(block, dim=dim)
    return norm


@dataclass(slots=True, kw_only=True)
class Edit:
    """The change of one tensor of the base.

    Attributes:
        name: The tensor.
        deltas: Deltas to add; each has the tensor's shape, seen as one matrix for each group.
        offsets: Vectors to add to a bias.
        replacement: Values to take instead of the base's, before anything is added.
        magnitude: What the rows or columns of the sum are brought to.
    """

    name: str
    deltas: list[Addend] = field(default_factory=list)
    offsets: list[Tensor] = field(default_factory=list)
    replacement: Tensor | None = None
    magnitude: Magnitude | None = None

    def parts(self, base: Tensor) -> Iterator[Tensor]:
        """The merged tensor by blocks of rows: float32 arithmetic (float64 for a float64 base), the base's dtype."""
        values = base if self.replacement is None else self.replacement
        wide = torch.promote_types(base.dtype, torch.float32)
        if not self.deltas:
            total = values.to(wide)
            for offset in self.offsets:
                total = total + offset.to(wide)
            yield total.to(base.dtype)
            return
        delta = LowRank.total([addend.read() for addend in self.deltas])
        up, down = delta.up.to(wide), delta.down.to(wide)
        rows, columns = delta.shape
        matrices = values.reshape(delta.groups, rows, columns)

        def merged(group: int, part: slice) -> Tensor:
            return torch.addmm(matrices[group, part].to(wide), up[group, part], down[group])

        for group in range(delta.groups):
            blocks = block_rows((rows, columns))
            scale = None if self.magnitude is None else self.magnitude.over(partial(merged, group), blocks)
            for part in blocks:
                block = merged(group, part)
                yield (block if scale is None else scale(block, part)).to(base.dtype)


def add_pair(
    edits: dict[str, Edit],
    base: BaseFolder,
    source: MergeSource,
    pair: FactorPair,
    weight: float,
    tied_to: Mapping[str, str],
    magnitude: str | None = None,
) -> None:
    """Plan the addition of `weight` times one pair's delta.

    Args:
        edits: The edits so far; the new one is added.
        base: The base.
        source, pair, weight: The delta.
        tied_to: Name of a tensor that the folder lacks because it is tied -> the tensor that stands for it.
        magnitude: Name of the pair's DoRA magnitude, if it has one.

    Raises:
        CoverageError: the base has no such tensor, or one of another shape.
        UnsupportedError: a quantised tensor, a grouped convolution, experts whose orientation is ambiguous.
    """
    if pair.kind == "grouped_conv":
        raise UnsupportedError(
            f"adapter {source.name!r} adapts the grouped convolution {pair.path}, which cannot be merged into a base",
            why="its delta mixes channels that the base's weight keeps apart",
            remedy="serve it as an adapter",
        )
    name, transposed = _target(base, source, pair, tied_to)
    edit = edits.setdefault(name, Edit(name=name))
    edit.deltas.append(Addend(source=source, pair=pair, weight=weight, transposed=transposed))
    if magnitude is not None:
        edit.magnitude = Magnitude(source=source, tensor=magnitude, by_column=transposed)


def add_bias(edits: dict[str, Edit], base: BaseFolder, source: MergeSource, pair: FactorPair, weight: float) -> None:
    """Plan the addition of a `lora_B.bias` to the base's bias.

    Raises:
        CoverageError: the base has no bias there.
    """
    if pair.bias is None:
        return
    name = f"{pair.path}.bias"
    _found(base, source, name, {})
    offset = source.tensors[pair.bias].double() * (weight * pair.scale)
    edits.setdefault(name, Edit(name=name)).offsets.append(offset)


def replace_tensor(
    edits: dict[str, Edit],
    base: BaseFolder,
    source: MergeSource,
    stored: str,
    value: Tensor,
    tied_to: Mapping[str, str],
) -> None:
    """Plan the replacement of a base's tensor by one that was trained in full.

    Raises:
        CoverageError: the base has no such tensor, or one of another shape.
    """
    name = stored.removeprefix(PREFIX).replace(".base_layer.", ".")
    shape = _found(base, source, name, tied_to)
    if tuple(value.shape) != shape:
        raise CoverageError(
            f"adapter {source.name!r}: {name} has the shape {tuple(value.shape)}, the base's is {shape}",
            remedy="resize the base's vocabulary first, or merge into the base that the adapter was trained on",
            tensor=name,
        )
    edits.setdefault(name, Edit(name=name)).replacement = value


def _target(base: BaseFolder, source: MergeSource, pair: FactorPair, tied_to: Mapping[str, str]) -> tuple[str, bool]:
    """The tensor that a pair's delta belongs to, and whether it lies there transposed."""
    rows, columns = pair.shape
    if pair.parameters:
        return _expert_target(base, source, pair)
    name = f"{pair.path}.weight"
    shape = _found(base, source, name, tied_to)
    transposed = pair.kind == "embedding" or (pair.kind == "linear" and bool(source.config.raw.get("fan_in_fan_out")))
    matrix = (shape[0], math.prod(shape[1:])) if shape else ()
    expected = (columns, rows) if transposed else (rows, columns)
    if matrix != expected or (pair.kind == "conv" and shape[1:] != pair.down_shape[1:]):
        raise CoverageError(
            f"adapter {source.name!r}: the delta of {pair.path} has the shape {expected}, the base's {name} is {shape}",
            remedy="merge into the base that the adapter was trained on",
            tensor=name,
        )
    return name, transposed


def _expert_target(base: BaseFolder, source: MergeSource, pair: FactorPair) -> tuple[str, bool]:
    rows, columns = pair.shape
    fits = []
    for name in pair.parameters:
        shape = _found(base, source, name, {})
        single = pair.kind != "experts" and len(shape) == 2
        sides = shape if single else shape[1:]
        if (single or (len(shape) == 3 and shape[0] == pair.groups)) and sides in ((rows, columns), (columns, rows)):
            fits += [(name, False)] if sides == (rows, columns) else []
            fits += [(name, True)] if sides == (columns, rows) and not single else []
    if len(fits) != 1:
        raise UnsupportedError(
            f"adapter {source.name!r}: the delta of {pair.path} ({pair.groups} x {rows} x {columns}) fits {len(fits)} "
            f"of the parameters {', '.join(pair.parameters)} in some orientation; exactly one is needed",
            why="which parameter a pair belongs to and which way it lies does not stand in the file",
            remedy="merge it with PEFT's merge_and_unload on the loaded model",
            module=pair.path,
        )
    return fits[0]


def _found(base: BaseFolder, source: MergeSource, name: str, tied_to: Mapping[str, str]) -> tuple[int, ...]:
    """Shape of the base's tensor of that name, or of the one that it is tied to."""
    real = tied_to.get(name, name)
    if real not in base.home:
        raise CoverageError(
            f"adapter {source.name!r} changes {name}, which the base {base.path} does not have",
            remedy=choices(name, base.home, noun="tensor"),
            tensor=name,
        )
    entry = base.entry(real)
    if entry.dtype not in _FLOATS:
        raise UnsupportedError(
            f"the base's {real} is stored as {entry.dtype}: merging into quantised weights is refused",
            why="rounding the sum to the quantised grid loses much of the delta",
            remedy="merge into the unquantised base, then quantise; or serve the adapter beside the quantised base",
            tensor=real,
        )
    return entry.shape
