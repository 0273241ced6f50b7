"""Dense matrices of merges that work on elements: formed block of rows by block, never more than the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multilora_store.errors import MergeError
from multilora_store.merging import draws
from multilora_store.merging.lowrank import LowRank

__all__ = ["BLOCK_ELEMENTS", "Block", "ElementMerge", "Matrix", "block_rows"]

BLOCK_ELEMENTS = 2**18
"""Elements of a block: few enough for the cache. A constant, because random masks are drawn block by block."""
CHUNK_BLOCKS = 8
"""Blocks that are gathered before they are multiplied or counted, which pays for large operands only."""


def block_rows(shape: tuple[int, int]) -> list[slice]:
    """The blocks of a matrix: a function of its shape alone."""
    rows = max(1, BLOCK_ELEMENTS // max(1, shape[1]))
    return [slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]


def chunks_of(shape: tuple[int, int]) -> list[list[slice]]:
    """The blocks in runs of `CHUNK_BLOCKS`."""
    rows = block_rows(shape)
    return [rows[start : start + CHUNK_BLOCKS] for start in range(0, len(rows), CHUNK_BLOCKS)]


class Matrix:
    """One dense matrix whose rows are computed when asked for.

    Args:
        shape: Rows and columns.
        rows: Gives the rows of a slice, float32.
        label: What seeds its random numbers: (seed, adapter digest, tensor name).
    """

    __slots__ = ("_kth", "_rows", "label", "shape")

    def __init__(self, shape: tuple[int, int], rows: Callable[[slice], Tensor], label: tuple[object, ...]) -> None:
        self.shape = shape
        self.label = label
        self._rows = rows
        self._kth: dict[int, float] = {}

    @classmethod
    def of_delta(cls, delta: LowRank, label: tuple[object, ...]) -> Matrix:
        """The dense delta of one group, formed in float32."""
        up, down = delta.up[0].float(), delta.down[0].float().contiguous()
        return cls(delta.shape, lambda rows: up[rows] @ down, label)

    @classmethod
    def of_tensor(cls, tensor: Tensor, label: tuple[object, ...] = (0, "", "")) -> Matrix:
        """A matrix that is there already."""
        values = tensor.float()
        return cls((values.shape[0], values.shape[1]), lambda rows: values[rows], label)

    def blocks(self) -> Iterator[Block]:
        """Its blocks from top to bottom."""
        for rows in block_rows(self.shape):
            yield self.block(rows)

    def block(self, rows: slice) -> Block:
        """The block of those rows."""
        return Block(values=self._rows(rows), matrix=self, start=rows.start)

    def kth_magnitude(self, count: int) -> float:
        """The `count`-th largest magnitude (1 is the largest), exact; 0 for more than there are.

        Radix selection on the bits of the float32 magnitudes, whose order is that of the numbers: one pass counts the
        upper sixteen bits, one the lower sixteen within the bucket that holds the answer.
        """
        size = self.shape[0] * self.shape[1]
        if count < 1:
            return math.inf
        if count >= size:
            return 0.0
        if count not in self._kth:
            upper, above = _bucket(self._histogram(None), count)
            lower, _ = _bucket(self._histogram(upper), count - above)
            bits = torch.tensor((upper << 16) | lower, dtype=torch.int32)
            self._kth[count] = float(bits.view(torch.float32))
        return self._kth[count]

    def _histogram(self, upper: int | None) -> Tensor:
        counts = torch.zeros(2**16, dtype=torch.int64)
        for chunk in chunks_of(self.shape):
            bits = torch.cat([self._rows(rows) for rows in chunk]).abs_().reshape(-1).view(torch.int32)
            keys = bits >> 16 if upper is None else bits[(bits >> 16) == upper] & 0xFFFF
            counts += torch.bincount(keys, minlength=2**16)
        return counts


def _bucket(counts: Tensor, count: int) -> tuple[int, int]:
    """The bucket that holds the `count`-th largest, and how many lie in the buckets above it."""
    from_top = counts.flip(0).cumsum(0)
    index = int(torch.searchsorted(from_top, torch.tensor(count)))
    above = int(from_top[index - 1]) if index else 0
    return counts.numel() - 1 - index, above


def _square(values: Tensor) -> float:
    """Sum of squares: each row in float32, the rows in float64."""
    return float(torch.linalg.vector_norm(values, dim=1).double().square().sum())


@dataclass(frozen=True, slots=True)
class Block:
    """Some whole rows of one adapter's dense delta.

    Attributes:
        values: (rows, n), float32.
        matrix: What it is a part of.
        start: Its first row there.
    """

    values: Tensor
    matrix: Matrix
    start: int

    @classmethod
    def of(cls, values: Tensor, seed: int = 0) -> Block:
        """A block that is the whole of a small matrix."""
        return Matrix.of_tensor(values, (seed, "", "")).block(slice(0, values.shape[0]))

    def threshold(self, density: float) -> float:
        """The magnitude that `int(density * size)` elements of the whole matrix reach."""
        rows, columns = self.matrix.shape
        return self.matrix.kth_magnitude(int(density * rows * columns))

    def uniform(self) -> Tensor:
        """Random numbers of [0, 1) for every element, the same each time."""
        return draws.uniform(tuple(self.values.shape), *self.matrix.label, self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementMerge:
    """The dense result of a merge of elements, computed block by block, kept when the budget allows.

    Attributes:
        matrices: The adapters' deltas, one group.
        weights: Their weights.
        function: `function(blocks, weights) -> tensor` of a block's shape.
        budget: Bytes that the kept result may take.
    """

    matrices: Sequence[Matrix]
    weights: Sequence[float]
    function: Callable[[Sequence[Block], Sequence[float]], Tensor]
    budget: int
    _kept: list[Tensor] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.matrices[0].shape

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Runs of rows with their values, float32.

        Raises:
            MergeError: the function gave another shape, or a value that is not finite.
        """
        chunks = chunks_of(self.shape)
        if self._kept:
            for chunk in chunks:
                rows = slice(chunk[0].start, chunk[-1].stop)
                yield rows, self._kept[0][rows]
            return
        keep = torch.empty(self.shape) if 4 * self.shape[0] * self.shape[1] <= self.budget else None
        for chunk in chunks:
            rows = slice(chunk[0].start, chunk[-1].stop)
            values = torch.empty(rows.stop - rows.start, self.shape[1]) if keep is None else keep[rows]
            for part in chunk:
                values[part.start - rows.start : part.stop - rows.start] = self._compute(part)
            yield rows, values
        if keep is not None:
            self._kept.append(keep)

    def dense(self) -> Tensor:
        """The whole result."""
        return torch.cat([values for _, values in self.parts()])

    def times(self, right: Tensor) -> Tensor:
        """`result @ right`, (m, k), float32."""
        return torch.cat([values @ right for _, values in self.parts()])

    def transposed_times(self, left: Tensor) -> Tensor:
        """`result.T @ left`, (n, k), float32."""
        product = left.new_zeros(self.shape[1], left.shape[1])
        for rows, values in self.parts():
            product.addmm_(values.mT, left[rows])
        return product

    def truncate(self, rank: int, *, exact: bool, label: tuple[object, ...]) -> LowRank:
        """The result at `rank`: its best approximation, or a randomised one close to it.

        Args:
            rank: At most the smaller side.
            exact: Whether to decompose the dense matrix. Otherwise Halko, Martinsson, Tropp (arXiv 0909.4061),
                algorithms 4.4 and 5.1, with 16 further columns and two power iterations.
            label: What seeds the random start.
        """
        smaller = min(self.shape)
        width = min(rank + 16, smaller)
        if exact or width == smaller:
            u, s, vh = torch.linalg.svd(self.dense().double(), full_matrices=False)
            root = s[:rank].sqrt()
            return LowRank((u[:, :rank] * root)[None], (root[:, None] * vh[:rank])[None])
        basis = torch.linalg.qr(self.times(draws.normal((self.shape[1], width), *label))).Q
        for _ in range(2):
            right = torch.linalg.qr(self.transposed_times(basis)).Q
            basis = torch.linalg.qr(self.times(right)).Q
        small = LowRank(basis.double()[None], self.transposed_times(basis).double().mT[None])
        return small.truncate(rank)

    def distance(self, found: LowRank) -> tuple[float, float]:
        """`(|result - found|, |result|)` in the Frobenius norm, summed block by block."""
        up, down = found.up[0].float(), found.down[0].float()
        apart = size = 0.0
        for rows, values in self.parts():
            size += _square(values)
            apart += _square(torch.addmm(values, up[rows], down, alpha=-1.0))
        return math.sqrt(apart), math.sqrt(size)

    def _compute(self, rows: slice) -> Tensor:
        values = self.function([matrix.block(rows) for matrix in self.matrices], self.weights)
        expected = (rows.stop - rows.start, self.shape[1])
        if tuple(values.shape) != expected:
            raise MergeError(
                f"the merge function returned the shape {tuple(values.shape)} for a block of shape {expected}"
            )
        if not bool(torch.isfinite(values).all()):
            raise MergeError(
                f"the merge function returned values that are not finite in rows {rows.start} to {rows.stop - 1}"
            )
        return values
