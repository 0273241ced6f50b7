"""Dense matrices of merges that work on elements: formed block of rows by block of rows, never kept."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multilora_store.merging import draws
from multilora_store.merging.lowrank import LowRank
from multilora_store.merging.selection import SAMPLE, kth_largest

__all__ = ["BLOCK_ELEMENTS", "Block", "Matrix", "Workspace", "block_rows", "settle_heap"]

BLOCK_ELEMENTS = 2**18
"""Elements of a block: few enough for the cache. A constant, because random masks are drawn block by block."""


def block_rows(shape: tuple[int, int]) -> list[slice]:
    """The blocks of a matrix: a function of its shape alone."""
    rows = max(1, BLOCK_ELEMENTS // max(1, shape[1]))
    return [slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]


def settle_heap() -> None:
    """Let the allocator keep the memory of blocks, instead of mapping each block anew.

    glibc takes what is larger than a threshold from the system, page fault by page fault, which costs more than the
    arithmetic on it; the first region of up to 32 MiB that is freed raises the threshold to its size.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


class Workspace(threading.local):
    """Memory for dense results, one in each thread, that is used again for each module: fresh pages cost a pass.

    Args:
        budget: The most bytes in one thread.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._memory = torch.empty(0)

    def of(self, *shape: int) -> Tensor | None:
        """Float32 of that shape with any content, the same memory each time; None where it is above the budget."""
        size = math.prod(shape)
        if 4 * size > self._budget:
            return None
        if size > self._memory.numel():
            self._memory = torch.empty(0)  # the old goes before the new comes
            self._memory = torch.empty(size)
        return self._memory[:size].view(shape)


class Matrix:
    """One dense matrix whose rows are computed when asked for.

    Args:
        left: (m, n), the matrix, float32; or (m, r), its left factor.
        right: (r, n), float32, the right factor; None where `left` is the whole.
        label: What seeds its random numbers: (seed, adapter digest, tensor name).
    """

    __slots__ = ("_kth", "_left", "_right", "label", "shape")

    def __init__(self, left: Tensor, right: Tensor | None, label: tuple[object, ...]) -> None:
        self.shape = (left.shape[0], (left if right is None else right).shape[1])
        self.label = label
        self._left, self._right = left, right
        self._kth: dict[int, float] = {}

    @classmethod
    def of_delta(cls, delta: LowRank, label: tuple[object, ...]) -> Matrix:
        """The dense delta of one group, formed in float32."""
        return cls(delta.up[0].float(), delta.down[0].float().contiguous(), label)

    @classmethod
    def of_tensor(cls, tensor: Tensor, label: tuple[object, ...] = (0, "", "")) -> Matrix:
        """A matrix that is there already."""
        return cls(tensor.float(), None, label)

    def block(self, rows: slice) -> Block:
        """The block of those rows."""
        return Block(values=self._rows(rows), matrix=self, start=rows.start)

    def row_space(self) -> Tensor:
        """(n, k): columns that span its rows, where it is known by factors; else (n, 0)."""
        return self._left.new_zeros(self.shape[1], 0) if self._right is None else self._right.mT

    def kth_magnitudes(self, *counts: int) -> list[float]:
        """The `count`-th largest magnitude for each count, exact, in one pass for all.

        1 is the largest; the magnitude is infinite for less, and 0 for as many as there are or more.
        """
        size = self.shape[0] * self.shape[1]
        new = [count for count in counts if 1 <= count < size and count not in self._kth]
        if new:
            self._kth.update(zip(new, kth_largest(new, size, self._sample, self._magnitudes), strict=True))
        return [math.inf if count < 1 else self._kth.get(count, 0.0) for count in counts]

    def _rows(self, rows: slice) -> Tensor:
        return self._left[rows] if self._right is None else self._left[rows] @ self._right

    def _magnitudes(self) -> Iterator[NDArray[np.float32]]:
        for rows in block_rows(self.shape):
            values = self._rows(rows)
            yield (values.abs() if self._right is None else values.abs_()).reshape(-1).numpy()

    def _sample(self) -> NDArray[np.float32]:
        rows, columns = (draws.integers(side, SAMPLE, "sample", axis) for axis, side in enumerate(self.shape))
        if self._right is None:
            drawn = self._left[rows, columns]
        else:
            drawn = torch.linalg.vecdot(self._left[rows], self._right.mT.contiguous()[columns])
        return drawn.abs().numpy()


@dataclass(frozen=True, slots=True)
class Block:
    """Some whole rows of one adapter's dense delta.

    Attributes:
        values: (rows, n), float32; not to be changed.
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
        return self.thresholds(density)[0]

    def thresholds(self, *densities: float) -> list[float]:
        """`threshold` of each density, in one pass over the matrix for all."""
        rows, columns = self.matrix.shape
        return self.matrix.kth_magnitudes(*(int(density * rows * columns) for density in densities))

    def uniform(self, out: Tensor | None = None) -> Tensor:
        """Random numbers of (0, 1) for every element, the same each time; written to `out` where one is given."""
        return draws.uniform(torch.empty_like(self.values) if out is None else out, *self.matrix.label, self.start)

    def kept(self, probability: float, out: Tensor | None = None) -> Tensor:
        """1 where `uniform` is below the probability, else 0: the same each time; written to `out` if given."""
        out = torch.empty_like(self.values) if out is None else out
        return draws.kept(out, probability, *self.matrix.label, self.start)
