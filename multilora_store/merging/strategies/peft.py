"""The eleven combinations of PEFT's `add_weighted_adapter`, for those who want exactly them.

Semantics of peft/tuners/lora/model.py and peft/utils/merge_utils.py, version 0.21.2, with three differences: the scale
of an adapter is counted once with rsLoRA too, random masks have a seed, and elements that tie with the threshold
of a pruning all stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multilora_store.merging.blocks import Block
from multilora_store.merging.lowrank import LowRank
from multilora_store.merging.strategies.elements import (
    Election,
    agreeing,
    dropped,
    over_adapters,
    trimmed,
)
from multilora_store.merging.strategy import BETWEEN_0_AND_1, strategy

__all__ = [
    "peft_cat",
    "peft_dare_linear",
    "peft_dare_linear_svd",
    "peft_dare_ties",
    "peft_dare_ties_svd",
    "peft_linear",
    "peft_magnitude_prune",
    "peft_magnitude_prune_svd",
    "peft_svd",
    "peft_ties",
    "peft_ties_svd",
]


def _citation(name: str) -> str:
    return f"PEFT 0.21.2, add_weighted_adapter(combination_type={name!r})"


_PRUNED = {"neutral": {"density": 1.0}, "limits": {"density": BETWEEN_0_AND_1}, "default_rank": "max", "experts": False}


def _disjoint(stack: Tensor, weights: Sequence[float], election: Election) -> Tensor:
    """PEFT's merge after the election: the sign of the unweighted sum, the weighted sum divided by the count."""
    ones = [1.0] * len(weights)
    margin = over_adapters(stack if election == "total" else stack.sign(), ones)
    return agreeing(stack, margin, weights, ones, 1.0)


def _ties(blocks: Sequence[Block], weights: Sequence[float], density: float, election: Election) -> Tensor:
    return _disjoint(trimmed(blocks, density), weights, election)


def _dare_ties(blocks: Sequence[Block], weights: Sequence[float], density: float, election: Election) -> Tensor:
    return _disjoint(dropped(blocks, density), weights, election).div_(density)


def _dare_linear(blocks: Sequence[Block], weights: Sequence[float], density: float) -> Tensor:
    return over_adapters(dropped(blocks, density), [weight / density for weight in weights])


@strategy(citation=_citation("linear"), space="factor", default_rank="max", experts=False)
def peft_linear(deltas: Sequence[Block], weights: Sequence[float]) -> Tensor:
    """Sum the factors A and B apart, each with the root of the weight: not the sum of the deltas."""
    return over_adapters(torch.stack([block.values for block in deltas]), weights)


@strategy(citation=_citation("cat"), additive=True, fixed_rank=True, experts=False)
def peft_cat(deltas: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """The factors side by side, weight and scale on A."""
    return LowRank.total(deltas, weights)


@strategy(citation=_citation("svd"), default_rank="max", additive=True, experts=False)
def peft_svd(deltas: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """The weighted sum of the deltas at `rank`, the same as `svd`."""
    return LowRank.total(deltas, weights)


@strategy(space="factor", citation=_citation("ties"), **_PRUNED)
def peft_ties(
    deltas: Sequence[Block], weights: Sequence[float], *, density: float, election: Election = "total"
) -> Tensor:
    """TIES on the factors A and B apart."""
    return _ties(deltas, weights, density, election)


@strategy(space="elements", citation=_citation("ties_svd"), **_PRUNED)
def peft_ties_svd(
    deltas: Sequence[Block], weights: Sequence[float], *, density: float, election: Election = "total"
) -> Tensor:
    """TIES on the dense deltas, truncated to `rank`."""
    return _ties(deltas, weights, density, election)


@strategy(space="factor", citation=_citation("dare_linear"), **_PRUNED)
def peft_dare_linear(deltas: Sequence[Block], weights: Sequence[float], *, density: float) -> Tensor:
    """DARE on the factors A and B apart, summed."""
    return _dare_linear(deltas, weights, density)


@strategy(space="elements", citation=_citation("dare_linear_svd"), **_PRUNED)
def peft_dare_linear_svd(deltas: Sequence[Block], weights: Sequence[float], *, density: float) -> Tensor:
    """DARE on the dense deltas, summed, truncated to `rank`."""
    return _dare_linear(deltas, weights, density)


@strategy(space="factor", citation=_citation("dare_ties"), **_PRUNED)
def peft_dare_ties(
    deltas: Sequence[Block], weights: Sequence[float], *, density: float, election: Election = "total"
) -> Tensor:
    """DARE and TIES on the factors A and B apart."""
    return _dare_ties(deltas, weights, density, election)


@strategy(space="elements", citation=_citation("dare_ties_svd"), **_PRUNED)
def peft_dare_ties_svd(
    deltas: Sequence[Block], weights: Sequence[float], *, density: float, election: Election = "total"
) -> Tensor:
    """DARE and TIES on the dense deltas, truncated to `rank`."""
    return _dare_ties(deltas, weights, density, election)


@strategy(space="factor", citation=_citation("magnitude_prune"), **_PRUNED)
def peft_magnitude_prune(deltas: Sequence[Block], weights: Sequence[float], *, density: float) -> Tensor:
    """Magnitude pruning of the factors A and B apart, summed."""
    return over_adapters(trimmed(deltas, density), weights)


@strategy(space="elements", citation=_citation("magnitude_prune_svd"), **_PRUNED)
def peft_magnitude_prune_svd(deltas: Sequence[Block], weights: Sequence[float], *, density: float) -> Tensor:
    """Magnitude pruning of the dense deltas, summed, truncated to `rank`."""
    return over_adapters(trimmed(deltas, density), weights)
