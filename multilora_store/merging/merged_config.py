"""The configuration of a merged adapter: true ranks, alphas that give scale 1, targets that PEFT resolves again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import MergeError
from multilora_store.merging.plan import ModulePlan
from multilora_store.merging.source import MergeSource

__all__ = ["merged_config", "rank_fields"]

_SELECTORS: Final = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
# What described how one adapter came to be says nothing about the merged one.
_RESET: Final[Mapping[str, Any]] = {
    "init_lora_weights": True,
    "use_rslora": False,
    "eva_config": None,
    "corda_config": None,
    "lora_ga_config": None,
    "loftq_config": {},
    "velora_config": None,
    "inference_mode": True,
    "peft_type": "LORA",
}


def merged_config(
    sources: Sequence[MergeSource], plans: Sequence[ModulePlan], ranks: Mapping[str, int], *, bias: bool
) -> AdapterConfig:
    """The configuration under which PEFT reads the merged tensors with scale 1 everywhere.

    Args:
        sources: The adapters in canonical order.
        plans: The modules.
        ranks: Module path -> rank per group of the result.
        bias: Whether the result has `lora_B.bias`.

    Raises:
        MergeError: adapters with different `target_parameters` or `layer_replication`.
    """
    raws = [source.config.raw for source in sources]
    for field, why in (
        ("target_parameters", "PEFT nests their wrappers, and the file does not say which pair is whose"),
        ("layer_replication", "the layers of the two models are not the same ones"),
    ):
        _require_equal(sources, field, why)
    fields: dict[str, Any] = {**raws[0], **_RESET}
    fields.update(rank_fields(plans, ranks))
    fields.update(_selectors(raws, plans))
    fields["lora_bias"] = bias
    fields["lora_dropout"] = _common(raws, "lora_dropout", 0.0)
    fields["ensure_weight_tying"] = _common(raws, "ensure_weight_tying", False)
    fields["fan_in_fan_out"] = any(raw.get("fan_in_fan_out") for raw in raws)
    fields["bias"] = next((raw["bias"] for raw in raws if raw.get("bias", "none") != "none"), "none")
    saved = {name for raw in raws for name in raw.get("modules_to_save") or ()}
    fields["modules_to_save"] = sorted(saved) or None
    return AdapterConfig.parse(fields, where="the merged adapter")


def rank_fields(plans: Sequence[ModulePlan], ranks: Mapping[str, int]) -> dict[str, Any]:
    """`r`, `lora_alpha` and the patterns, with alpha equal to the rank, so that every scale is 1."""
    stored: dict[str, int] = {}
    for plan in plans:
        rank = ranks[plan.path] * plan.pair.stored_rank_factor
        stored.update(dict.fromkeys(plan.pair.parameters if plan.pair.kind == "experts" else (plan.path,), rank))
    usual = Counter(stored.values())
    default = max(usual, key=lambda rank: (usual[rank], rank))
    pattern = _pattern(stored, default)
    return {
        "r": default,
        "lora_alpha": default,
        "rank_pattern": pattern,
        "alpha_pattern": dict(pattern),
    }


def _pattern(stored: Mapping[str, int], default: int) -> dict[str, int]:
    """Regular expressions for the modules of another rank: by last name where that is enough, else by whole path."""
    by_leaf: dict[str, set[int]] = {}
    for path, rank in stored.items():
        by_leaf.setdefault(path.rpartition(".")[2], set()).add(rank)
    pattern = {}
    for path, rank in stored.items():
        leaf = path.rpartition(".")[2]
        if by_leaf[leaf] == {default}:
            continue
        if len(by_leaf[leaf]) == 1:
            pattern[re.escape(leaf)] = rank
        elif rank != default:
            pattern["^" + re.escape(path)] = rank
    return dict(sorted(pattern.items()))


def _selectors(raws: Sequence[Mapping[str, Any]], plans: Sequence[ModulePlan]) -> dict[str, Any]:
    """Fields that select the modules: kept where all agree, joined where they are plain lists, else every path."""
    chosen = [{field: _plain(raw.get(field)) for field in _SELECTORS} for raw in raws]
    if all(item == chosen[0] for item in chosen):
        return {field: raws[0].get(field) for field in _SELECTORS}
    cleared = dict.fromkeys(_SELECTORS)
    plain = all(not any(item[field] for field in _SELECTORS[1:]) for item in chosen)
    if plain and all(isinstance(item["target_modules"], list) for item in chosen):
        names = {name for item in chosen for name in item["target_modules"]}
    else:
        names = {plan.path for plan in plans if not plan.pair.parameters}
    return {**cleared, "target_modules": sorted(names)}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (list, tuple)) else value


def _common(raws: Sequence[Mapping[str, Any]], field: str, otherwise: Any) -> Any:
    values = [raw.get(field, otherwise) for raw in raws]
    return values[0] if all(value == values[0] for value in values) else otherwise


def _require_equal(sources: Sequence[MergeSource], field: str, why: str) -> None:
    first = sources[0]
    for other in sources[1:]:
        if _plain(other.config.raw.get(field) or []) != _plain(first.config.raw.get(field) or []):
            raise MergeError(
                f"{field} differs between {first.name!r} and {other.name!r}: "
                f"{first.config.raw.get(field)!r} against {other.config.raw.get(field)!r}",
                why=why,
                remedy="merge adapters with the same",
                field=field,
            )
