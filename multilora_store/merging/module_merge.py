"""The merge of one module: read its factors, apply the strategy, bring the result to rank, measure what was lost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from multilora_store.errors import MergeError
from multilora_store.merging.blocks import Matrix, Workspace
from multilora_store.merging.element_merge import ElementMerge
from multilora_store.merging.layout import FactorPair
from multilora_store.merging.lowrank import LowRank, is_finite
from multilora_store.merging.plan import Member, ModulePlan
from multilora_store.merging.report import ModuleReport
from multilora_store.merging.strategy import Strategy

__all__ = ["EXACT_SIDE", "ModuleResult", "Settings", "merge_module"]

EXACT_SIDE: Final = 768
"""Dense results whose smaller side is at most this are decomposed exactly under `truncation: auto`."""

Truncation = Literal["auto", "exact", "randomised"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all modules of one merge have in common.

    Attributes:
        strategy: The strategy.
        params: Its complete parameters.
        seed: Seed of random masks.
        dtype: Dtype of the result.
        truncation: How dense results are brought to rank.
        workspace: Where a module's dense result is kept; what it has no room for is computed anew in each pass.
        bias: Whether every linear or convolution gets a `lora_B.bias`, because some adapter has them.
    """

    strategy: Strategy
    params: Mapping[str, Any]
    seed: int
    dtype: torch.dtype
    truncation: Truncation
    workspace: Workspace
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleResult:
    """Tensors of the merged module under their canonical names, its rank per group, and what was lost."""

    path: str
    tensors: Mapping[str, Tensor]
    rank: int
    report: ModuleReport


class _Target(Protocol):
    """What a strategy defines as the result, and how it comes to rank."""

    def at(self, rank: int) -> LowRank:
        """The result at the rank."""

    def distance(self, found: LowRank) -> tuple[float, float]:
        """`(|target - found|, |target|)`."""


def merge_module(plan: ModulePlan, settings: Settings) -> ModuleResult:
    """Merge one module.

    Raises:
        MergeError: an adapter's values or the result's are not finite.
    """
    deltas = [_read(member, plan.path) for member in plan.members]
    target = _target(plan, settings, deltas)
    merged = target.at(plan.rank)
    if plan.pair.kind == "experts":
        merged = merged.padded(plan.rank)
    tensors = plan.pair.write(merged, settings.dtype)
    if settings.bias and plan.pair.kind != "embedding":
        tensors[plan.pair.up.removesuffix("weight") + "bias"] = _bias(plan, settings)
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise MergeError(
                f"the merged tensor {name} holds values that are not finite; nothing was written",
                why=f"strategy {settings.strategy.name} with {dict(settings.params)} in {settings.dtype}",
                tensor=name,
            )
    stored = _stored(plan.pair, tensors, merged.rank)
    apart, norm = target.distance(stored)
    if _is_sum(settings):
        sum_apart, sum_norm = apart, norm
    else:
        total = LowRank.total(deltas, [member.weight for member in plan.members])
        sum_norm = total.norm()
        sum_apart = stored.distance(total, sum_norm)
    report = ModuleReport(
        path=plan.path,
        kind=plan.pair.kind,
        adapters=len(plan.members),
        rank=merged.rank,
        norm=norm,
        apart=apart,
        sum_norm=sum_norm,
        sum_apart=sum_apart,
    )
    return ModuleResult(path=plan.path, tensors=tensors, rank=merged.rank, report=report)


def _is_sum(settings: Settings) -> bool:
    return settings.strategy.traits.additive and not settings.params


def _read(member: Member, path: str) -> LowRank:
    delta = member.pair.read(member.source.tensors)
    if not delta.is_finite():
        raise MergeError(
            f"adapter {member.source.name!r} holds values that are not finite in module {path}",
            remedy="merge a version from before the training diverged",
            adapter=member.source.name,
            module=path,
        )
    return delta


def _stored(pair: FactorPair, tensors: Mapping[str, Tensor], rank: int) -> LowRank:
    """The delta as PEFT will read it: the tensors after rounding, at scale 1."""
    written = FactorPair(
        path=pair.path,
        kind=pair.kind,
        down=pair.down,
        up=pair.up,
        bias=None,
        down_shape=tuple(tensors[pair.down].shape),
        up_shape=tuple(tensors[pair.up].shape),
        groups=pair.groups,
        rank=rank,
        scale=1.0,
    )
    return written.read(tensors)


def _target(plan: ModulePlan, settings: Settings, deltas: Sequence[LowRank]) -> _Target:
    space = settings.strategy.traits.space
    if space == "elements":
        return _ElementTarget(plan, settings, deltas)
    if space == "factor":
        return _FactorTarget(_merge_factors(plan, settings))
    parts, weights = list(deltas), [member.weight for member in plan.members]
    if settings.strategy.traits.shares:
        parts += [LowRank.zero_like(deltas[0])] * len(plan.absent)
        weights += plan.absent
    merged = settings.strategy.function(parts, weights, **settings.params)
    if not isinstance(merged, LowRank) or (merged.groups, merged.shape) != (deltas[0].groups, deltas[0].shape):
        raise MergeError(
            f"strategy {settings.strategy.name!r} did not return a delta of {deltas[0].groups} x {deltas[0].shape} "
            f"for module {plan.path}"
        )
    if not merged.is_finite():
        raise MergeError(
            f"strategy {settings.strategy.name!r} gave values that are not finite in module {plan.path}; "
            "nothing was written",
            module=plan.path,
        )
    return _FactorTarget(merged)


class _FactorTarget:
    """A result in factors."""

    def __init__(self, merged: LowRank) -> None:
        self._merged = merged
        self._norm: float | None = None

    def at(self, rank: int) -> LowRank:
        if self._merged.rank <= rank:
            return self._merged
        truncated, self._norm = self._merged.truncate_and_norm(rank)
        return truncated

    def distance(self, found: LowRank) -> tuple[float, float]:
        norm = self._merged.norm() if self._norm is None else self._norm
        return found.distance(self._merged, norm), norm


class _ElementTarget:
    """Dense results, one for each group."""

    def __init__(self, plan: ModulePlan, settings: Settings, deltas: Sequence[LowRank]) -> None:
        self._label = (settings.seed, "start", plan.path)
        smaller = min(plan.pair.shape)
        self._exact = settings.truncation == "exact" or (settings.truncation == "auto" and smaller <= EXACT_SIDE)
        function = partial(_call, settings.strategy.function, settings.params)
        space = settings.workspace.of(plan.pair.groups, *plan.pair.shape)
        self._groups = [
            ElementMerge(
                matrices=[
                    Matrix.of_delta(delta.group(index), (settings.seed, member.source.digest, member.pair.down, index))
                    for delta, member in zip(deltas, plan.members, strict=True)
                ],
                weights=[member.weight for member in plan.members],
                function=function,
                space=None if space is None else space[index],
            )
            for index in range(plan.pair.groups)
        ]

    def at(self, rank: int) -> LowRank:
        self._truncated = [
            group.truncate(rank, exact=self._exact, label=(*self._label, index))
            for index, group in enumerate(self._groups)
        ]
        parts = [truncated.delta for truncated in self._truncated]
        return LowRank(torch.cat([part.up for part in parts]), torch.cat([part.down for part in parts]))

    def distance(self, found: LowRank) -> tuple[float, float]:
        pairs = [
            group.distance(found.group(index), truncated.projection)
            for index, (group, truncated) in enumerate(zip(self._groups, self._truncated, strict=True))
        ]
        return math.hypot(*(apart for apart, _ in pairs)), math.hypot(*(size for _, size in pairs))


def _call(function: Any, params: Mapping[str, Any], blocks: Sequence[Any], weights: Sequence[float]) -> Tensor:
    merged = function(blocks, weights, **params)
    if not isinstance(merged, Tensor):
        raise MergeError(f"the merge function returned {type(merged).__name__}, not a tensor")
    return merged


def _merge_factors(plan: ModulePlan, settings: Settings) -> LowRank:
    """PEFT's way: A and B apart, each with the root of weight times scale, the sign on A."""
    function = partial(_call, settings.strategy.function, settings.params)
    merged = []
    for name_of, signed in ((_up_name, False), (_down_name, True)):
        matrices, weights = [], []
        for member in plan.members:
            effective = member.weight * member.pair.scale
            root = math.sqrt(abs(effective))
            weights.append(math.copysign(root, effective) if signed else root)
            name = name_of(member.pair)
            values = member.source.tensors[name].flatten(1)
            matrices.append(Matrix.of_tensor(values, (settings.seed, member.source.digest, name)))
        apart = ElementMerge(matrices=matrices, weights=weights, function=function)
        merged.append(apart.dense())
    return _stored(plan.pair, plan.pair.restore(*merged), plan.rank)


def _up_name(pair: FactorPair) -> str:
    return pair.up


def _down_name(pair: FactorPair) -> str:
    return pair.down


def _bias(plan: ModulePlan, settings: Settings) -> Tensor:
    """The bias of `lora_B` under an additive strategy: a delta of one column that goes the same way."""
    having = [member for member in plan.members if member.pair.bias is not None]
    rows = plan.pair.up_shape[0]
    if not having:
        return torch.zeros(rows, dtype=settings.dtype)
    one = torch.ones(1, 1)
    columns = [
        LowRank.of(member.source.tensors[str(member.pair.bias)].reshape(rows, 1), one, member.pair.scale)
        for member in having
    ]
    merged = settings.strategy.function(columns, [member.weight for member in having], **settings.params)
    bias: Tensor = merged.dense().reshape(rows)
    return bias.to(settings.dtype)
