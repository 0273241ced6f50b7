"""What a merge can take: the kinds of adapter, and for each strategy yes, or no with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import MergeError
from multilora_store.merging.layout import Layout
from multilora_store.merging.source import MergeSource
from multilora_store.merging.strategy import Strategy

__all__ = ["KINDS", "check_configs", "check_layouts", "kinds_of", "mutates_base", "reason_against", "table"]

_NEVER: Final[Mapping[str, str]] = MappingProxyType(
    {
        "dora": "its magnitude depends on the base's weights, so it is no delta of its own",
        "trainable_tokens": "it replaces rows of the embedding instead of adding to them",
        "adalora": "its ranks are masked by singular values that PEFT keeps apart",
        "other_method": "it is not LoRA",
        "mutated_base": "its initialisation changed the base, so its factors are no delta to the base others have",
        "alora": "it acts only after its invocation tokens",
        "qalora": "it acts on pooled inputs",
        "bdlora": "its factors are block-diagonal",
        "kasa": "its delta needs singular values kept apart and a base with components removed",
        "monteclora": "its factors are samples of a distribution",
        "arrow": "it is a router over other adapters",
    }
)
KINDS: Final[tuple[str, ...]] = (
    *("linear", "embedding", "conv", "grouped_conv", "experts", "rslora", "rank_pattern", "lora_bias"),
    *("unequal_ranks", *_NEVER),
)
"""The kinds of adapter that the table speaks of; an adapter may be of several."""

_MUTATING: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
_FLAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "use_dora": "dora",
        "trainable_token_indices": "trainable_tokens",
        "alora_invocation_tokens": "alora",
        "use_qalora": "qalora",
        "use_bdlora": "bdlora",
        "kasa_config": "kasa",
        "monteclora_config": "monteclora",
        "arrow_config": "arrow",
        "use_rslora": "rslora",
        "lora_bias": "lora_bias",
    }
)


def mutates_base(config: AdapterConfig) -> str | None:
    """The initialisation that changed the base's own weights (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA), or None."""
    init = config.raw.get("init_lora_weights")
    return init if isinstance(init, str) and init.lower().startswith(_MUTATING) else None


def kinds_of(config: AdapterConfig, layout: Layout | None = None) -> frozenset[str]:
    """The kinds (of `KINDS`) that an adapter is, from its configuration and, with a layout, its names and shapes."""
    if config.peft_type != "LORA":
        return frozenset({"adalora" if config.peft_type == "ADALORA" else "other_method"})
    found = {kind for flag, kind in _FLAGS.items() if config.raw.get(flag) not in (None, False, [], {})}
    if config.raw.get("rank_pattern") or config.raw.get("alpha_pattern"):
        found.add("rank_pattern")
    if mutates_base(config):
        found.add("mutated_base")
    if layout is not None:
        found |= _kinds_of_tensors(layout)
    return frozenset(found)


def _kinds_of_tensors(layout: Layout) -> set[str]:
    found: set[str] = {pair.kind for pair in layout.pairs.values()}
    if any("lora_magnitude_vector" in name for name in layout.variants):
        found.add("dora")
    if any(name.endswith("trainable_tokens_delta") for name in layout.variants):
        found.add("trainable_tokens")
    if any(pair.bias for pair in layout.pairs.values()):
        found.add("lora_bias")
    return found


def reason_against(strategy: Strategy, kind: str) -> str | None:
    """Why the strategy cannot take adapters of that kind; None when it can."""
    traits = strategy.traits
    if kind in _NEVER:
        return _NEVER[kind]
    if kind == "lora_bias" and not traits.additive:
        return "a bias has no factors, so only a weighted sum of deltas says what becomes of it"
    if kind == "experts" and not traits.experts:
        return "PEFT does not merge target_parameters"
    if kind == "unequal_ranks" and traits.space == "factor":
        return "it combines the factors A and B apart, so they must have one shape"
    return None


def table(strategies: Iterable[Strategy]) -> dict[str, dict[str, str | None]]:
    """Strategy -> kind -> None where it is taken, else the reason why not."""
    return {item.name: {kind: reason_against(item, kind) for kind in KINDS} for item in strategies}


def check_configs(strategy: Strategy, sources: Sequence[MergeSource], others: Iterable[Strategy] = ()) -> None:
    """Refuse what the configurations alone rule out; see `check_layouts`."""
    for source in sources:
        for kind in sorted(kinds_of(source.config)):
            _refuse(strategy, f"adapter {source.name!r}", kind, others)


def check_layouts(
    strategy: Strategy, sources: Sequence[MergeSource], layouts: Sequence[Layout], others: Iterable[Strategy] = ()
) -> None:
    """Refuse what the strategy cannot take, before a value is read.

    Args:
        strategy: The strategy.
        sources, layouts: The adapters and their layouts.
        others: Strategies to offer instead.

    Raises:
        MergeError: naming the adapter, its kind and the reason.
    """
    for source, layout in zip(sources, layouts, strict=True):
        for kind in sorted(kinds_of(source.config, layout)):
            _refuse(strategy, f"adapter {source.name!r}", kind, others)
        if not layout.pairs:
            raise MergeError(
                f"adapter {source.name!r} holds no pair of LoRA factors, so there is nothing to merge",
                why=f"its tensors: {', '.join([*layout.full, *layout.variants][:5]) or 'none'}",
                adapter=source.name,
            )
    for path in sorted({path for layout in layouts for path in layout.pairs}):
        ranks = {layout.pairs[path].rank for layout in layouts if path in layout.pairs}
        if len(ranks) > 1:
            _refuse(strategy, f"the set (module {path} has ranks {sorted(ranks)})", "unequal_ranks", others)


def _refuse(strategy: Strategy, what: str, kind: str, others: Iterable[Strategy]) -> None:
    reason = reason_against(strategy, kind)
    if reason is None:
        return
    takers = sorted(item.name for item in others if reason_against(item, kind) is None)
    taken = [name for name in KINDS if reason_against(strategy, name) is None]
    raise MergeError(
        f"strategy {strategy.name!r} cannot take {what}: it is of the kind {kind}: {reason}",
        why=f"{strategy.name} takes: {', '.join(taken)}",
        remedy=f"strategies that take {kind}: {', '.join(takers)}" if takers else f"no strategy takes {kind}",
        kind=kind,
    )
