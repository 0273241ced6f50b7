"""Strategies whose result is a linear combination of the deltas: exact in the factors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from multilora_store.merging.lowrank import LowRank
from multilora_store.merging.strategy import strategy

__all__ = ["cat", "linear", "model_stock", "slerp", "svd", "task_arithmetic"]

_TASK_ARITHMETIC = "Ilharco et al., Editing Models with Task Arithmetic (arXiv 2212.04089), section 2"


@strategy(citation=_TASK_ARITHMETIC, additive=True)
def linear(deltas: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """The weighted sum of the deltas: exact at the summed rank, the best approximation at a lower one.

    Negative weights subtract. `[1, -1]` gives the difference of two adapters, without cross terms.
    """
    return LowRank.total(deltas, weights)


@strategy(citation="PEFT, add_weighted_adapter(combination_type='cat')", additive=True, fixed_rank=True)
def cat(deltas: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """The weighted sum with the factors side by side: exact, always at the summed rank."""
    return LowRank.total(deltas, weights)


@strategy(
    citation="Eckart, Young, The approximation of one matrix by another of lower rank (1936)",
    additive=True,
    default_rank="max",
)
def svd(deltas: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """The best approximation of the weighted sum at `rank`, by default the largest rank among the adapters."""
    return LowRank.total(deltas, weights)


@strategy(citation=_TASK_ARITHMETIC, additive=True, neutral={"scale": 1.0})
def task_arithmetic(deltas: Sequence[LowRank], weights: Sequence[float], *, scale: float = 1.0) -> LowRank:
    """`scale` (the paper's lambda) times the weighted sum of the deltas; negative weights forget a task."""
    return LowRank.total(deltas, [scale * weight for weight in weights])


@strategy(citation="Shoemake, Animating Rotation with Quaternion Curves (1985)", shares=True, most=2)
def slerp(deltas: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """Spherical interpolation between two deltas as vectors, at the second one's share of the weights.

    Falls back to linear interpolation where they are almost parallel, and where an adapter has no delta. Exact at the
    summed rank.
    """
    if len(deltas) == 1:
        return deltas[0]
    share = weights[1] / (weights[0] + weights[1])
    cosine = deltas[0].cosine(deltas[1])
    if abs(cosine) > 0.9995 or not all(delta.norm() for delta in deltas):
        return LowRank.total(deltas, [1.0 - share, share])
    angle = math.acos(cosine)
    first = math.sin((1.0 - share) * angle) / math.sin(angle)
    return LowRank.total(deltas, [first, math.sin(share * angle) / math.sin(angle)])


@strategy(
    citation="Jang et al., Model Stock: All we need is just a few fine-tuned models (arXiv 2403.19522), section 4",
    shares=True,
)
def model_stock(deltas: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """The mean delta, drawn towards the base by the angle between the adapters: `t = N cos / (1 + (N - 1) cos)`.

    The cosine is the mean over the pairs of adapters of the module, negative ones counted as 0:
    where the adapters point apart the base is the paper's answer.
    """
    total = sum(weights)
    pairs = list(itertools.combinations(deltas, 2))
    cosine = 1.0 if not pairs else max(0.0, sum(a.cosine(b) for a, b in pairs) / len(pairs))
    ratio = len(deltas) * cosine / (1.0 + (len(deltas) - 1) * cosine)
    return LowRank.total(deltas, [ratio * weight / total for weight in weights])
