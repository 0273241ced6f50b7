"""A weight delta as its two factors, and the algebra on it: no dense matrix is formed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = ["Decomposition", "LowRank", "is_finite", "relative_distance"]

_CONDITION: Final = 1e3  # of what may be squared, which costs six of sixteen digits


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The thin singular value decomposition of a `LowRank`, one per group: `u @ diag(s) @ vh`.

    Attributes:
        u: (groups, m, k), orthonormal columns.
        s: (groups, k), descending.
        vh: (groups, k, n), orthonormal rows.
    """

    u: Tensor
    s: Tensor
    vh: Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """A weight delta `up @ down`, the scale already inside.

    Most deltas are one matrix; grouped experts and grouped convolutions are several of one shape, so that every delta
    carries a first dimension of groups. A sum of norms or an inner product runs over all groups.

    Attributes:
        up: (groups, m, r), float64.
        down: (groups, r, n), float64.
    """

    up: Tensor
    down: Tensor

    def __post_init__(self) -> None:
        assert self.up.ndim == self.down.ndim == 3, "factors are (groups, rows, columns)"
        assert self.up.shape[0] == self.down.shape[0], "both factors have the same groups"
        assert self.up.shape[2] == self.down.shape[1], "the factors share the rank"

    @classmethod
    def of(cls, up: Tensor, down: Tensor, scale: float = 1.0) -> LowRank:
        """`scale * up @ down` in float64, the scale on `down`, where PEFT puts it when it joins adapters.

        Args:
            up: (m, r) or (groups, m, r), any floating dtype.
            down: (r, n) or (groups, r, n).
            scale: The effective scale of the pair.
        """
        up64, down64 = up.to(torch.float64), down.to(torch.float64) * scale
        return cls(up64.reshape(-1, *up64.shape[-2:]), down64.reshape(-1, *down64.shape[-2:]))

    @classmethod
    def total(cls, deltas: Sequence[LowRank], weights: Sequence[float] | None = None) -> LowRank:
        """The exact weighted sum: the factors stand side by side, the rank is the sum of the ranks."""
        scaled = deltas if weights is None else [d.scaled(w) for d, w in zip(deltas, weights, strict=True)]
        return cls(torch.cat([d.up for d in scaled], dim=2), torch.cat([d.down for d in scaled], dim=1))

    @classmethod
    def zero_like(cls, other: LowRank) -> LowRank:
        """The zero delta of that shape, with factors of no columns."""
        return cls(other.up[:, :, :0], other.down[:, :0])

    @property
    def groups(self) -> int:
        """How many matrices it holds."""
        return self.up.shape[0]

    @property
    def rank(self) -> int:
        """The width of the factors, an upper bound of the rank of each group."""
        return self.up.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of one group's delta."""
        return self.up.shape[1], self.down.shape[2]

    @property
    def max_rank(self) -> int:
        """The highest rank that a matrix of this shape and these factors can have."""
        return min(self.rank, *self.shape)

    @property
    def transposed(self) -> LowRank:
        """The delta of every group transposed."""
        return LowRank(self.down.mT, self.up.mT)

    def group(self, index: int) -> LowRank:
        """One group alone."""
        return LowRank(self.up[index : index + 1], self.down[index : index + 1])

    def scaled(self, factor: float) -> LowRank:
        """`factor` times the delta."""
        return self if factor == 1.0 else LowRank(self.up, self.down * factor)

    def dense(self, rows: slice = slice(None)) -> Tensor:
        """The rows of the dense delta, (groups, rows, n), float64."""
        return self.up[:, rows] @ self.down

    def inner(self, other: LowRank) -> float:
        """The Frobenius inner product with a delta of the same shape, in O((m + n) r r')."""
        return float(((self.up.mT @ other.up) * (self.down @ other.down.mT)).sum())

    def norm(self) -> float:
        """The Frobenius norm, by inner products: exact to 1e-8 of the norms of what the delta is a sum of."""
        return math.sqrt(max(0.0, self.inner(self)))

    def precise_norm(self) -> float:
        """The Frobenius norm through QR of the factors: exact to rounding where a sum cancels too, and slower."""
        core_left = torch.linalg.qr(self.up, mode="r").R
        core_right = torch.linalg.qr(self.down.mT, mode="r").R
        return float(torch.linalg.vector_norm(core_left @ core_right.mT))

    def distance(self, other: LowRank, norm_of_other: float | None = None) -> float:
        """The Frobenius norm of the difference, by inner products: exact to 1e-8 of the norms, several times faster.

        Use `relative_distance` where a difference far below that matters.

        Args:
            other: A delta of the same shape.
            norm_of_other: Its norm, where it is known already.
        """
        other_square = (other.norm() if norm_of_other is None else norm_of_other) ** 2
        return math.sqrt(max(0.0, self.inner(self) - 2.0 * self.inner(other) + other_square))

    def cosine(self, other: LowRank) -> float:
        """The cosine between two deltas as vectors; 0 where one of them is zero."""
        product = self.norm() * other.norm()
        return 0.0 if product == 0.0 else max(-1.0, min(1.0, self.inner(other) / product))

    def svd(self) -> Decomposition:
        """The thin decomposition: QR of both factors, SVD of the small core between them."""
        left, core_left = torch.linalg.qr(self.up)
        right, core_right = torch.linalg.qr(self.down.mT)
        u, s, vh = torch.linalg.svd(core_left @ core_right.mT, full_matrices=False)
        return Decomposition(left @ u, s, vh @ right.mT)

    def truncate(self, rank: int) -> LowRank:
        """The best approximation of at most `rank` in every group."""
        return self.truncate_and_norm(rank)[0]

    def truncate_and_norm(self, rank: int) -> tuple[LowRank, float]:
        """The best approximation of at most `rank`, and the norm of the whole, which comes with it.

        With the right singular vectors v the approximation is `(delta v) v.T`: only one side needs an orthonormal
        basis, and only `rank` columns of either are formed. Triangles from Gram matrices cost a quarter of QR, and are
        taken where both factors are well conditioned: every singular value is then right to 1e-9 of itself.
        """
        if self.rank > self.shape[0] < self.shape[1]:
            found, norm = self.transposed.truncate_and_norm(rank)
            return found.transposed, norm
        if self.rank > self.shape[1]:
            dense = self.dense()
            s, v = _leading(dense, rank)
            return LowRank(dense @ v, v.mT)._balanced(s), float(torch.linalg.vector_norm(dense))
        left, right = _gram_triangle(self.up), _gram_triangle(self.down.mT)
        if left is not None and right is not None:
            core = left @ right.mT
            s, v = _leading(core, rank)
            rows = torch.linalg.solve_triangular(right, v, upper=True).mT @ self.down
        else:
            basis, right = torch.linalg.qr(self.down.mT)
            core = torch.linalg.qr(self.up, mode="r").R @ right.mT
            s, v = _leading(core, rank)
            rows = (basis @ v).mT
        found = LowRank(self.up @ (right.mT @ v), rows)._balanced(s)
        return found, float(torch.linalg.vector_norm(core))

    def _balanced(self, s: Tensor) -> LowRank:
        """The root of the singular values moved from `up`, whose columns have their length, to `down`."""
        root = s.sqrt()
        inverse = torch.where(root > 0, 1.0 / root, 0.0)
        return LowRank(self.up * inverse[:, None, :], self.down * root[:, :, None])

    def padded(self, rank: int) -> LowRank:
        """The same delta with factors of exactly `rank` columns, the new ones zero."""
        extra = rank - self.rank
        if extra <= 0:
            return self
        up, down = self.up, self.down
        return LowRank(
            torch.cat([up, up.new_zeros(*up.shape[:2], extra)], dim=2),
            torch.cat([down, down.new_zeros(down.shape[0], extra, down.shape[2])], dim=1),
        )

    def is_finite(self) -> bool:
        """Whether no factor holds an infinity or a NaN."""
        return is_finite(self.up) and is_finite(self.down)


def _gram_triangle(columns: Tensor) -> Tensor | None:
    """R of a QR decomposition of (groups, m, r), by Cholesky from the Gram matrix; None where that is inexact.

    The relative error of R is the rounding of float64 times the square of the condition number of the columns, scaled
    to length 1 (Yamamoto et al., Roundoff error analysis of the CholeskyQR2 algorithm, 2015).
    """
    if columns.shape[2] > columns.shape[1]:
        return None
    gram = columns.mT @ columns
    length = gram.diagonal(dim1=1, dim2=2).sqrt()
    triangle, failed = torch.linalg.cholesky_ex(gram / (length[:, :, None] * length[:, None, :]), upper=True)
    if bool(failed.any()):
        return None
    inverse = torch.linalg.solve_triangular(triangle, torch.eye(triangle.shape[1], dtype=triangle.dtype), upper=True)
    sizes = torch.linalg.matrix_norm(triangle) * torch.linalg.matrix_norm(inverse)
    return triangle * length[:, None, :] if bool((sizes <= _CONDITION).all()) else None


def _leading(core: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The `rank` largest singular values of (groups, a, b), descending, and their right vectors (groups, b, rank).

    By the eigenvectors of `core.T core`, a fifth of an SVD, unless some value is below a thousandth of the largest:
    squares then keep ten digits of every one.
    """
    squares, turn = torch.linalg.eigh(core.mT @ core)
    squares, turn = squares.flip(1)[:, :rank], turn.flip(2)[:, :, :rank]
    if bool((squares[:, -1:] > squares[:, :1] / _CONDITION**2).all()):
        return squares.sqrt(), turn
    _, s, vh = torch.linalg.svd(core, full_matrices=False)
    return s[:, :rank], vh[:, :rank].mT


def is_finite(values: Tensor) -> bool:
    """Whether no element is an infinity or a NaN."""
    # A sum is not finite if an element is not; it costs one sweep, and only an overflow needs the second look.
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def relative_distance(found: LowRank, expected: LowRank) -> float:
    """`|found - expected| / |expected|` in the Frobenius norm; infinite where only `expected` is zero."""
    difference = LowRank.total([found, expected], [1.0, -1.0]).precise_norm()
    size = expected.norm()
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / size
