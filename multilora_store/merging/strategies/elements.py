"""Strategies on the elements of the dense deltas, streamed by blocks of rows and truncated by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from multilora_store.merging.blocks import Block
from multilora_store.merging.strategy import BETWEEN_0_AND_1, NOT_NEGATIVE, Interval, strategy

__all__ = ["breadcrumbs", "dare_linear", "dare_ties", "della", "magnitude_prune", "ties"]

Election = Literal["total", "frequency"]
_DENSITY = {"density": BETWEEN_0_AND_1}


def trimmed(block: Block, density: float) -> Tensor:
    """The elements among the `density` largest of the whole matrix by magnitude, the others zero."""
    if density >= 1.0:
        return block.values
    return _at_least(block.values, block.threshold(density))


def _at_least(values: Tensor, size: float) -> Tensor:
    """The elements of at least that magnitude, the others zero."""
    # hardshrink keeps what is larger than its bound: the next smaller number lets `size` itself pass, in one sweep.
    below = torch.nextafter(torch.tensor(size, dtype=torch.float32), torch.tensor(0.0))
    return torch.nn.functional.hardshrink(values, float(below))


def dropped(block: Block, density: float) -> Tensor:
    """Each element kept with probability `density` and divided by it, the others zero."""
    if density >= 1.0:
        return block.values
    return torch.where(block.uniform() < density, block.values, 0.0).div_(density)


def weighted_sum(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The sum of `weight * value`."""
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total.add_(value, alpha=weight)
    return total


def elected_mean(values: Sequence[Tensor], weights: Sequence[float], election: Election) -> Tensor:
    """For each element the weighted mean of those values that have the elected sign.

    The sign is that of the weighted sum (`total`) or of the weighted votes (`frequency`); a tie is positive.
    """
    votes = values if election == "total" else [value.sign() for value in values]
    elected = torch.where(weighted_sum(votes, weights) >= 0, 1.0, -1.0)
    total, share = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        along = value * elected if weight >= 0 else value * -elected
        share.add_(along > 0, alpha=abs(weight))
        total.add_(along.relu_(), alpha=abs(weight))
    # Where nothing agrees the total is zero, and so is the mean.
    return total.mul_(elected).div_(share.clamp_(min=torch.finfo(torch.float32).tiny))


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
    return elected_mean([trimmed(block, density) for block in deltas], weights, election) * scale


@strategy(
    citation="Yu et al., Language Models are Super Mario (DARE, arXiv 2311.03099), section 3.2",
    space="elements",
    neutral={"density": 1.0},
    limits=_DENSITY,
)
def dare_linear(deltas: Sequence[Block], weights: Sequence[float], *, density: float = 0.5) -> Tensor:
    """Drop elements at random, rescale the kept ones by `1 / density`, sum with the weights as coefficients."""
    return weighted_sum([dropped(block, density) for block in deltas], weights)


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
    return elected_mean([dropped(block, density) for block in deltas], weights, election) * scale


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
    to `density + spread / 2` (the paper's epsilon is `spread`), and is held within (0, 1].
    """
    kept = [_sampled_by_magnitude(block, density, spread) for block in deltas]
    return elected_mean(kept, weights, election) * scale


def _sampled_by_magnitude(block: Block, density: float, spread: float) -> Tensor:
    values = block.values
    columns = values.shape[1]
    order = values.abs().argsort(dim=1, stable=True)
    ladder = torch.linspace(density - spread / 2, density + spread / 2, columns).clamp(1e-3, 1.0)
    probability = torch.empty_like(values).scatter_(1, order, ladder.expand_as(values))
    return torch.where(block.uniform() < probability, values, 0.0).div_(probability)


@strategy(
    citation="Han et al., Learning both Weights and Connections for Efficient Neural Networks (arXiv 1506.02626)",
    space="elements",
    neutral={"density": 1.0},
    limits=_DENSITY,
)
def magnitude_prune(deltas: Sequence[Block], weights: Sequence[float], *, density: float = 0.5) -> Tensor:
    """Keep the largest elements of each delta, sum with the weights as coefficients."""
    return weighted_sum([trimmed(block, density) for block in deltas], weights)


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
    kept = []
    for block in deltas:
        size = block.values.abs()
        lowest = block.threshold(min(1.0, density + outliers))
        keep = size >= lowest
        if outliers > 0.0:
            keep &= size < block.threshold(outliers)
        kept.append(torch.where(keep, block.values, 0.0))
    return weighted_sum(kept, weights) * scale
