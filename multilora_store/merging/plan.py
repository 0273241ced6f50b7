"""What a merge will do, decided from names, shapes and configurations before a value is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multilora_store.errors import MergeError
from multilora_store.merging.layout import FactorPair, Layout
from multilora_store.merging.source import MergeSource
from multilora_store.merging.strategy import Strategy
from multilora_store.storage.arguments import as_mapping

__all__ = ["Member", "ModulePlan", "check_weights", "plan_modules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One adapter's part in a module: the adapter, its weight, its pair of factors."""

    source: MergeSource
    weight: float
    pair: FactorPair


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """The merge of one module.

    Attributes:
        path: The module.
        members: The adapters that adapt it, in canonical order.
        absent: Weights of the adapters that have no delta there.
        rank: Rank of each group of the result.
    """

    path: str
    members: tuple[Member, ...]
    absent: tuple[float, ...]
    rank: int

    @property
    def pair(self) -> FactorPair:
        """The pair whose names and shapes the result takes."""
        return self.members[0].pair

    @property
    def elements(self) -> int:
        """Elements of the dense delta."""
        return self.pair.groups * math.prod(self.pair.shape)


def check_weights(strategy: Strategy, weights: Mapping[str, float]) -> None:
    """Refuse weights that mean nothing.

    Raises:
        MergeError: none, too few or too many, not finite numbers, all zero, or negative where they are shares.
    """
    traits = strategy.traits
    if not as_mapping(weights, "the weights"):
        raise MergeError(
            "no adapter to merge was named", remedy="give one weight for each adapter: {'a': 0.7, 'b': 0.3}"
        )
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise MergeError(f"the weight of {name!r} is {weight!r}, not a finite number", adapter=name, weight=weight)
        if traits.shares and weight < 0:
            raise MergeError(
                f"the weight of {name!r} is {weight:g}, but {strategy.name} takes weights as shares",
                remedy="shares are not negative; task_arithmetic subtracts",
                adapter=name,
                weight=weight,
            )
    if not any(weights.values()):
        raise MergeError("all weights are zero, so the result would be the base", remedy="give at least one a weight")
    if len(weights) < traits.fewest or (traits.most is not None and len(weights) > traits.most):
        most = "" if traits.most is None else f" and at most {traits.most}"
        raise MergeError(
            f"strategy {strategy.name!r} was given {len(weights)} adapters: {', '.join(weights)}",
            remedy=f"it takes at least {traits.fewest}{most}",
        )


def plan_modules(
    strategy: Strategy,
    ordered: Sequence[tuple[MergeSource, float]],
    layouts: Sequence[Layout],
    rank: int | None,
) -> list[ModulePlan]:
    """One plan for each module of any adapter, by path.

    Args:
        strategy: The strategy.
        ordered: Adapters and weights in canonical order.
        layouts: Their layouts.
        rank: The rank that was asked for, or None for the strategy's own.

    Raises:
        MergeError: adapters that disagree on a module's shape, or a rank that cannot be.
    """
    members: dict[str, list[Member]] = {}
    for (source, weight), layout in zip(ordered, layouts, strict=True):
        for path, pair in layout.pairs.items():
            members.setdefault(path, []).append(Member(source=source, weight=weight, pair=pair))
    for path, those in members.items():
        _check_geometry(path, those)
    highest = {path: _highest_rank(strategy, those) for path, those in members.items()}
    _check_rank(strategy, rank, highest)
    ranks = {path: _rank(strategy, those, rank, highest[path]) for path, those in members.items()}
    experts = max((ranks[path] for path, those in members.items() if those[0].pair.kind == "experts"), default=0)
    return [
        ModulePlan(
            path=path,
            members=tuple(members[path]),
            absent=tuple(
                weight for (_, weight), layout in zip(ordered, layouts, strict=True) if path not in layout.pairs
            ),
            # PEFT knows one rank for the parameters of one module, so that all grouped experts share theirs.
            rank=experts if members[path][0].pair.kind == "experts" else ranks[path],
        )
        for path in sorted(members)
    ]


def _check_geometry(path: str, members: Sequence[Member]) -> None:
    first = members[0]
    for other in members[1:]:
        if other.pair.geometry != first.pair.geometry:
            raise MergeError(
                f"module {path} differs between {first.source.name!r} and {other.source.name!r}",
                why=f"{first.pair.kind} {first.pair.up_shape} x {first.pair.down_shape} "
                f"against {other.pair.kind} {other.pair.up_shape} x {other.pair.down_shape}",
                remedy="merge adapters of one base",
                module=path,
            )


def _highest_rank(strategy: Strategy, members: Sequence[Member]) -> int:
    limit = min(members[0].pair.shape)
    if strategy.traits.space == "elements":
        return limit
    total = sum(member.pair.rank for member in members)
    return total if strategy.traits.fixed_rank else min(total, limit)


def _check_rank(strategy: Strategy, rank: int | None, highest: Mapping[str, int]) -> None:
    if rank is None:
        return
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise MergeError(f"rank = {rank!r}: a rank is a whole number of at least 1", rank=rank)
    if strategy.traits.fixed_rank or strategy.traits.space == "factor":
        raise MergeError(
            f"strategy {strategy.name!r} takes no rank: its result has the rank that follows from the adapters",
            remedy="leave rank out, or choose svd or linear",
            rank=rank,
        )
    if rank > max(highest.values()):
        path = max(highest, key=lambda name: highest[name])
        raise MergeError(
            f"rank {rank} is more than any module can have: the most is {highest[path]}, at {path}",
            why="a sum of deltas has at most the sum of their ranks, and at most the smaller side of the matrix",
            remedy=f"ask for {highest[path]} or less",
            rank=rank,
        )


def _rank(strategy: Strategy, members: Sequence[Member], rank: int | None, highest: int) -> int:
    ranks = [member.pair.rank for member in members]
    if strategy.traits.space == "factor":
        return ranks[0]
    if rank is not None:
        return min(rank, highest)
    return min(highest, max(ranks) if strategy.traits.default_rank == "max" else sum(ranks))
