"""Tensors trained in full (`modules_to_save`, biases): no delta, so an explicit rule decides, never silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from multilora_store.errors import MergeError, choices
from multilora_store.merging.layout import PREFIX, Layout
from multilora_store.merging.source import MergeSource

__all__ = ["RULES", "merge_full", "owners_of", "resolve_rule"]

RULES: Final = ("refuse", "first", "mean")
Owner = tuple[MergeSource, float]


def owners_of(given: Sequence[Owner], layouts: Mapping[str, Layout]) -> dict[str, list[Owner]]:
    """Name of a tensor trained in full -> the adapters that hold it, in the order they were given.

    Args:
        given: Adapters with their weights, in the order they were given.
        layouts: Adapter name -> its layout.
    """
    owners: dict[str, list[Owner]] = {}
    for source, weight in given:
        for name in layouts[source.name].full:
            owners.setdefault(name, []).append((source, weight))
    return dict(sorted(owners.items()))


def resolve_rule(rule: str | Mapping[str, str], owners: Mapping[str, Sequence[Owner]]) -> dict[str, str]:
    """For every tensor trained in full: `mean`, or the name of the adapter whose values are taken.

    Args:
        rule: `refuse`, `first` (the first adapter given that has it), `mean` (weighted by the shares of the
            weights), an adapter's name, or a mapping from module (`lm_head`, `classifier.weight`) to one of these.
        owners: See `owners_of`.

    Raises:
        MergeError: the rule is `refuse` and there are such tensors (all are listed); an unknown rule; shapes that
            differ under `mean`.
    """
    decided = {}
    refused = []
    for name, those in owners.items():
        chosen = _rule_for(rule, name)
        by_name = {source.name: source for source, _ in those}
        by_name = {**{name.partition("@")[0]: source for name, source in by_name.items()}, **by_name}
        if chosen == "refuse":
            refused.append(f"{name.removeprefix(PREFIX)} (in {', '.join(source.name for source, _ in those)})")
        elif chosen == "first":
            decided[name] = those[0][0].name
        elif chosen == "mean":
            _check_mean(name, those)
            decided[name] = "mean"
        elif chosen in by_name:
            decided[name] = by_name[chosen].name
        else:
            raise MergeError(
                f"modules_to_save: {chosen!r} is no rule for {name.removeprefix(PREFIX)}",
                remedy=choices(chosen, [*RULES, *by_name], noun="rule"),
            )
    if refused:
        raise MergeError(
            f"{len(refused)} tensors are trained in full and need a rule: {'; '.join(refused)}",
            why="a full tensor is no delta that could be added to another, and none is dropped silently",
            remedy="modules_to_save=first, mean, an adapter's name, or a mapping {module: rule}",
            tensors=sorted(owners),
        )
    return decided


def merge_full(decided: Mapping[str, str], owners: Mapping[str, Sequence[Owner]]) -> dict[str, Tensor]:
    """The full tensors of the result, a mean computed in float32 or better and returned in its own dtype."""
    merged = {}
    for name, choice in decided.items():
        those = owners[name]
        if choice != "mean":
            merged[name] = next(source for source, _ in those if source.name == choice).tensors[name].clone()
            continue
        total = sum(weight for _, weight in those)
        first = those[0][0].tensors[name]
        wide = torch.promote_types(first.dtype, torch.float32)
        mean = torch.zeros(first.shape, dtype=wide)
        for source, weight in sorted(those, key=lambda owner: (owner[0].digest, owner[1])):
            mean.add_(source.tensors[name].to(wide), alpha=weight / total)
        merged[name] = mean.to(first.dtype)
    return merged


def _rule_for(rule: str | Mapping[str, str], name: str) -> str:
    if isinstance(rule, str):
        return rule
    path = name.removeprefix(PREFIX)
    for module, chosen in rule.items():
        if path == module or path.startswith(f"{module}.") or f".{module}." in f".{path}":
            return chosen
    return "refuse"


def _check_mean(name: str, those: Sequence[Owner]) -> None:
    found = {(source.infos[name].shape, source.infos[name].dtype) for source, _ in those}
    if len(found) > 1:
        raise MergeError(
            f"{name.removeprefix(PREFIX)} has no mean: {', '.join(f'{dtype}{list(shape)}' for shape, dtype in found)}",
            remedy="take it from one adapter by name",
        )
    if not next(iter(found))[1].startswith(("F", "BF")):
        raise MergeError(f"{name.removeprefix(PREFIX)} holds no floating-point numbers, so it has no mean")
    if any(weight < 0 for _, weight in those) or sum(weight for _, weight in those) <= 0:
        raise MergeError(
            f"{name.removeprefix(PREFIX)} has no mean with the weights {[weight for _, weight in those]}",
            remedy="a mean takes weights that are not negative; or take it from one adapter by name",
        )
