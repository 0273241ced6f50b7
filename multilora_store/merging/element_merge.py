"""The dense result of a merge of elements: computed block by block, brought to a rank, its error told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from multilora_store.errors import MergeError
from multilora_store.merging import draws
from multilora_store.merging.blocks import Block, Matrix, block_rows
from multilora_store.merging.lowrank import LowRank, is_finite

__all__ = ["CHUNK_BLOCKS", "ElementMerge", "Truncation"]

CHUNK_BLOCKS: Final = 8
"""Blocks that are gathered before they are multiplied, which pays for large operands only."""
_OVERSAMPLING: Final = 16
_PASSES: Final = 7  # the most that one truncation makes over the result
_GAIN: Final = 0.01  # a pass that lowers the error by less is the last
_CANCELLATION: Final = 1e-3  # a smaller part of the square is lost in float32 when it is a difference of squares


@dataclass(frozen=True, slots=True)
class Truncation:
    """A dense result at a rank.

    Attributes:
        delta: The result at the rank.
        projection: The projection of the result that it was taken from; None where it was decomposed whole.
    """

    delta: LowRank
    projection: LowRank | None = None


@dataclass(slots=True, kw_only=True)
class ElementMerge:
    """A merge of one group's elements; the result is kept where there is space for it, else computed anew in each pass.

    Attributes:
        matrices: The adapters' deltas.
        weights: Their weights.
        function: `function(blocks, weights) -> tensor` of a block's shape.
        space: (m, n), float32: where the result is kept after the first pass over it; None to compute it in each pass.
    """

    matrices: Sequence[Matrix]
    weights: Sequence[float]
    function: Callable[[Sequence[Block], Sequence[float]], Tensor]
    space: Tensor | None = None
    _square: float | None = field(default=None, init=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.matrices[0].shape

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Runs of rows with their values, float32.

        Raises:
            MergeError: the function gave another shape, or a value that is not finite.
        """
        square, known = 0.0, self._square is not None
        blocks = block_rows(self.shape)
        for chunk in (blocks[start : start + CHUNK_BLOCKS] for start in range(0, len(blocks), CHUNK_BLOCKS)):
            rows = slice(chunk[0].start, chunk[-1].stop)
            values = torch.empty(rows.stop - rows.start, self.shape[1]) if self.space is None else self.space[rows]
            if self.space is None or not known:
                for part in chunk:
                    values[part.start - rows.start : part.stop - rows.start] = self._compute(part)
                square += _square(values)
            yield rows, values
        self._square = self._square if known else square

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

    def norm(self) -> float:
        """The Frobenius norm."""
        if self._square is None:
            for _ in self.parts():
                pass
        assert self._square is not None, "a whole pass has counted it"
        return math.sqrt(self._square)

    def truncate(self, rank: int, *, exact: bool, label: tuple[object, ...]) -> Truncation:
        """The result at `rank`: its best approximation, or a randomised one close to it.

        Args:
            rank: At most the smaller side.
            exact: Whether to decompose the dense matrix; see `_project` for the other way.
            label: What seeds the random start.
        """
        smaller = min(self.shape)
        width = min(rank + _OVERSAMPLING, smaller)
        if exact or width == smaller:
            u, s, vh = torch.linalg.svd(self.dense().double(), full_matrices=False)
            root = s[:rank].sqrt()
            return Truncation(LowRank((u[:, :rank] * root)[None], (root[:, None] * vh[:rank])[None]))
        return self._project(rank, width, label)

    def _project(self, rank: int, width: int, label: tuple[object, ...]) -> Truncation:
        """The result projected on a subspace of `width` that holds most of it, and that at `rank`.

        The range finder of Halko, Martinsson, Tropp (arXiv 0909.4061, algorithms 4.4 and 5.1), which multiplies with
        the result and its transpose by turns. It starts on the rows of the adapters' own factors, where most of a merge
        lies, with random columns beside them, and stops when a pass lowers the error by less than a hundredth, or the
        next one is expected to by less than half of that.
        """
        product, error, squares = self._start(width, label), math.inf, torch.zeros(width, dtype=torch.float64)
        for step in range(_PASSES):
            basis = torch.linalg.qr(product).Q
            product = self.transposed_times(basis) if step % 2 else self.times(basis)
            last, (squares, turn) = squares, torch.linalg.eigh(product.double().mT @ product.double())
            before, error = error, math.sqrt(max(0.0, self.norm() ** 2 - float(squares[-rank:].sum())))
            if error >= before * (1.0 - _GAIN) or (step and _next_gain(last, squares, rank) < _GAIN * error**2):
                break
        projection = LowRank(product.double()[None], basis.double().mT[None])
        turn, root = turn[:, -rank:].flip(1), squares[-rank:].flip(0).clamp(min=0.0).pow(0.25)
        inverse = torch.where(root > 0, 1.0 / root, 0.0)
        delta = LowRank(projection.up @ (turn * inverse), (turn * root).mT @ projection.down)
        return Truncation(delta.transposed, projection.transposed) if step % 2 else Truncation(delta, projection)

    def _start(self, width: int, label: tuple[object, ...]) -> Tensor:
        """(n, width): what spans the rows of the adapters, mixed where that is too much, and random columns."""
        known = torch.cat([matrix.row_space() for matrix in self.matrices], dim=1)
        room = width - _OVERSAMPLING // 2
        if known.shape[1] > room:
            known = known @ draws.normal((known.shape[1], room), *label, "mix")
        return torch.cat([known, draws.normal((self.shape[1], width - known.shape[1]), *label)], dim=1)

    def distance(self, found: LowRank, projection: LowRank | None = None) -> tuple[float, float]:
        """`(|result - found|, |result|)` in the Frobenius norm.

        Args:
            found: Something near the result.
            projection: The projection of the result that `found` was made from. What it leaves out is orthogonal to it,
                so that the square of the distance is a difference of known squares; where too little is left out for
                that, and without a projection, the distance is summed block by block.
        """
        square = self.norm() ** 2
        if projection is not None and square - projection.norm() ** 2 >= _CANCELLATION * square:
            apart = square - 2.0 * projection.inner(found) + found.norm() ** 2
            return math.sqrt(max(0.0, apart)), math.sqrt(square)
        up, down = found.up[0].float(), found.down[0].float()
        apart = sum(_square(torch.addmm(values, up[rows], down, alpha=-1.0)) for rows, values in self.parts())
        return math.sqrt(apart), math.sqrt(square)

    def _compute(self, rows: slice) -> Tensor:
        values = self.function([matrix.block(rows) for matrix in self.matrices], self.weights)
        expected = (rows.stop - rows.start, self.shape[1])
        if tuple(values.shape) != expected:
            raise MergeError(
                f"the merge function returned the shape {tuple(values.shape)} for a block of shape {expected}"
            )
        if not is_finite(values):
            raise MergeError(
                f"the merge function returned values that are not finite in rows {rows.start} to {rows.stop - 1}"
            )
        return values


def _next_gain(last: Tensor, squares: Tensor, rank: int) -> float:
    """By how much the next pass of a range finder may lower the square of the error, from what this one gained.

    In a pass of subspace iteration what is missing of a squared singular value shrinks by the ratio to it of the first
    one that is left out (Halko et al., section 4.5, without the help of the columns beyond).

    Args:
        last, squares: The squared singular values of the last two projections, ascending.
        rank: How many of them are kept.
    """
    kept = squares[-rank:]
    return float(((kept - last[-rank:]).clamp(min=0.0) * squares[-rank - 1] / kept.clamp(min=1e-300)).sum())


def _square(values: Tensor) -> float:
    """Sum of squares: each row in float32, the rows in float64."""
    return float(torch.linalg.vector_norm(values, dim=1).double().square().sum())
