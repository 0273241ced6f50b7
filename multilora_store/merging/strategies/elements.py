"""Strategies on the elements of the dense deltas, streamed by blocks of rows and truncated by the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from multilora_store.merging.blocks import Block
from multilora_store.merging.strategy import BETWEEN_0_AND_1, NOT_NEGATIVE, Interval, strategy

__all__ = ["breadcrumbs", "dare_linear", "dare_ties", "della", "magnitude_prune", "ties"]

Election = Literal["total", "frequency"]
_DENSITY = {"density": BETWEEN_0_AND_1}
_BIN_SHIFT = 17  # of a float32, leaves the exponent and six bits
_BINS = 1024  # sixteen octaves below the largest; what is smaller shares the last bin


def stacked(prune: Callable[[Block, Tensor], object], blocks: Sequence[Block]) -> Tensor:
    """(adapters, rows, n): what `prune(block, out)` writes for each block, in one tensor without a copy."""
    stack = torch.empty(len(blocks), *blocks[0].values.shape)
    for block, out in zip(blocks, stack, strict=True):
        prune(block, out)
    return stack


def trimmed(blocks: Sequence[Block], density: float) -> Tensor:
    """(adapters, rows, n): the elements among the `density` largest of each whole matrix, the others zero."""
    return stacked(lambda block, out: _at_least(block.values, block.threshold(density), out), blocks)


def _at_least(values: Tensor, size: float, out: Tensor | None = None) -> Tensor:
    """The elements of at least that magnitude, the others zero."""
    # hardshrink keeps what is larger than its bound: the next smaller number lets `size` itself pass, in one sweep.
    return torch.hardshrink(values, float(np.nextafter(np.float32(size), np.float32(0.0))), out=out)


def dropped(blocks: Sequence[Block], density: float) -> Tensor:
    """(adapters, rows, n): each element kept with probability `density`, the others zero; none is rescaled yet."""
    return stacked(lambda block, out: block.kept(density, out).mul_(block.values), blocks)


def elected_mean(stack: Tensor, weights: Sequence[float], election: Election) -> Tensor:
    """For each element the weighted mean of those values that have the elected sign.

    The sign is that of the weighted sum (`total`) or of the weighted votes (`frequency`); a tie is positive.

    Args:
        stack: (adapters, rows, n); overwritten.
        weights: One for each adapter; a negative one turns its values round.
        election: What elects the sign.
    """
    for values, weight in zip(stack, weights, strict=True):
        if weight < 0:
            values.neg_()
    shares = [abs(weight) for weight in weights]
    margin = over_adapters(stack if election == "total" else stack.sign(), shares)
    return agreeing(stack, margin, shares, shares, torch.finfo(torch.float32).tiny)


def agreeing(stack: Tensor, margin: Tensor, weights: Sequence[float], shares: Sequence[float], least: float) -> Tensor:
    """The weighted sum of the values with the elected sign, divided by the sum of the shares of those who have it.

    Args:
        stack: (adapters, rows, n); overwritten.
        margin: (rows, n), by how much the positive side won, at least 0 where it is elected; overwritten.
        weights, shares: One for each adapter.
        least: The smallest sum of shares to divide by, for places where nothing has a value.
    """
    # Comparisons that write 0 and 1 as floats, and products with them, are many times as fast as booleans and `where`.
    elected = torch.ge(margin, 0.0, out=margin).mul_(2.0).sub_(1.0)
    total = over_adapters(stack.mul_(elected).relu_(), weights)
    share = over_adapters(torch.gt(stack, 0.0, out=stack), shares)
    return total.mul_(elected).div_(share.clamp_(min=least))


def over_adapters(stack: Tensor, weights: Sequence[float]) -> Tensor:
    """The weighted sum over the first dimension."""
    flat = stack.reshape(len(weights), -1)
    return torch.mv(flat.mT, torch.tensor(weights, dtype=stack.dtype)).reshape(stack.shape[1:])


@strategy(
    citation="Yadav et al., TIES-Merging: Resolving Interference When Merging Models (arXiv 2306.01708), section 4",
    space="elements",
    neutral={"density": 1.0, "scale": 1.0},
    limits=_DENSITY,
)
def ties(
    deltas: Sequence[Block],
    weights: Sequence[float],
    *,
    density: float = 0.2,
    scale: float = 1.0,
    election: Election = "total",
) -> Tensor:
    """Trim each delta to its largest elements, elect a sign for each place, average those that agree with it.

    The weights count in the election and in the mean: they are shares, `scale` is the paper's lambda.
    """
    return elected_mean(trimmed(deltas, density), weights, election).mul_(scale)


@strategy(
    citation="Yu et al., Language Models are Super Mario (DARE, arXiv 2311.03099), section 3.2",
    space="elements",
    neutral={"density": 1.0},
    limits=_DENSITY,
)
def dare_linear(deltas: Sequence[Block], weights: Sequence[float], *, density: float = 0.5) -> Tensor:
    """Drop elements at random, rescale the kept ones by `1 / density`, sum with the weights as coefficients."""
    return over_adapters(dropped(deltas, density), [weight / density for weight in weights])


@strategy(
    citation="Yu et al., Language Models are Super Mario (DARE, arXiv 2311.03099) with TIES (arXiv 2306.01708)",
    space="elements",
    neutral={"density": 1.0, "scale": 1.0},
    limits=_DENSITY,
)
def dare_ties(
    deltas: Sequence[Block],
    weights: Sequence[float],
    *,
    density: float = 0.5,
    scale: float = 1.0,
    election: Election = "total",
) -> Tensor:
    """Drop elements at random and rescale, then elect signs and average as `ties` does."""
    return elected_mean(dropped(deltas, density), weights, election).mul_(scale / density)


@strategy(
    citation="Deep et al., DELLA-Merging: Reducing Interference through Magnitude-Based Sampling (arXiv 2406.11617)",
    space="elements",
    neutral={"density": 1.0, "spread": 0.0, "scale": 1.0},
    limits={**_DENSITY, "spread": Interval(low=0.0, high=1.0)},
)
def della(
    deltas: Sequence[Block],
    weights: Sequence[float],
    *,
    density: float = 0.5,
    spread: float = 0.1,
    scale: float = 1.0,
    election: Election = "total",
) -> Tensor:
    """Drop elements at random, small ones more often; rescale each by its own probability; elect and average.

    Within a row the probability of keeping rises linearly with the rank of the magnitude, from `density - spread / 2`
    to `density + spread / 2` (the paper's epsilon is `spread`), and is held within (0, 1]. Magnitudes of
    a row that agree to one part in 64 share the mean of their ranks.
    """

    def sample(block: Block, out: Tensor) -> None:
        probability = _by_rank(block.values, density - spread / 2, density + spread / 2).clamp_(1e-3, 1.0)
        torch.lt(block.uniform(out), probability, out=out).mul_(block.values).div_(probability)

    return elected_mean(stacked(sample, deltas), weights, election).mul_(scale)


def _by_rank(values: Tensor, low: float, high: float) -> Tensor:
    """For each element a number between `low`, for the smallest magnitude of its row, and `high`, for the largest.

    Ranks are counted in bins, which costs a tenth of sorting.
    """
    rows, columns = values.shape
    bits = values.abs().view(torch.int32).bitwise_right_shift_(_BIN_SHIFT)  # the bits of magnitudes have their order
    bins = bits.sub_(bits.amax(dim=1, keepdim=True) - (_BINS - 1)).clamp_(min=0)
    places = bins.add_(torch.arange(rows, dtype=torch.int32)[:, None] * _BINS).reshape(-1)
    counts = torch.bincount(places, minlength=rows * _BINS).reshape(rows, _BINS).numpy()
    twice = 2 * counts.cumsum(axis=1) - counts  # the mean rank in a bin is half of it, less a half
    step = (high - low) / max(1, columns - 1)
    ladder = twice.astype(np.float32) * np.float32(step / 2) + np.float32(low - step / 2)
    return torch.from_numpy(ladder.reshape(-1)).index_select(0, places).reshape(rows, columns)


@strategy(
    citation="Han et al., Learning both Weights and Connections for Efficient Neural Networks (arXiv 1506.02626)",
    space="elements",
    neutral={"density": 1.0},
    limits=_DENSITY,
)
def magnitude_prune(deltas: Sequence[Block], weights: Sequence[float], *, density: float = 0.5) -> Tensor:
    """Keep the largest elements of each delta, sum with the weights as coefficients."""
    return over_adapters(trimmed(deltas, density), weights)


@strategy(
    citation="Davari, Belilovsky, Model Breadcrumbs: Scaling Multi-Task Model Merging (arXiv 2312.06795), section 3",
    space="elements",
    neutral={"density": 1.0, "outliers": 0.0, "scale": 1.0},
    limits={**_DENSITY, "outliers": Interval(low=0.0, high=0.5), "scale": NOT_NEGATIVE},
)
def breadcrumbs(
    deltas: Sequence[Block],
    weights: Sequence[float],
    *,
    density: float = 0.9,
    outliers: float = 0.01,
    scale: float = 1.0,
) -> Tensor:
    """Drop the smallest elements and the few largest of each delta, sum with the weights as coefficients.

    `outliers` is the fraction dropped at the top (the paper's gamma), `density` the fraction that remains below them.
    """

    def cut(block: Block, out: Tensor) -> None:
        small, large = block.thresholds(min(1.0, density + outliers), outliers)
        out.sub_(_at_least(_at_least(block.values, small, out), large))

    return over_adapters(stacked(cut, deltas), [weight * scale for weight in weights])
