"""Merge some adapters of the set before any wrap, and train the others on top of the result.

    multilora-store assemble '+adapters=[a,b,c]' adapters.c.trainable=true plugins=[merge_then_wrap] \
        assembler=merge_then_wrap assembler.params.members=[a,b] assembler.params.strategy=ties assembler.params.rank=16

What was learned before is one frozen adapter, however many it came from: one unit per block under FSDP, no optimizer
state. The others join as their entries say. `merge=ties merge.into=ab` merges the whole set, without a plugin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peft import PeftModel

from multilora_store.assembly.assembler import default_assembler
from multilora_store.assembly.steps import Adapter, Assembly, Step
from multilora_store.errors import ManifestError, choices
from multilora_store.manifest import AdapterSpec
from multilora_store.merging import MergeSource, merge_adapters
from multilora_store.plugins import plugin

__all__ = ["merge_then_wrap"]


@plugin("assembler")
def merge_then_wrap(
    work: Assembly,
    steps: Mapping[str, Step],
    *,
    members: Sequence[str] = (),
    into: str = "merged",
    strategy: str = "linear",
    rank: int | None = None,
    seed: int = 0,
    params: Mapping[str, Any] = {},
) -> PeftModel:
    """Some adapters of the set become one, merged by any strategy and frozen; the others stay beside it.

    Args:
        work: What was asked for.
        steps: The steps of the assembly; those up to `read` run before the merge.
        members: The adapters to merge; empty: all that are active and not trainable.
        into: Name of the merged adapter, which stands first.
        strategy: Name of a merge strategy; the weights are those of the entries.
        rank: Rank of the result; None: the strategy's own choice.
        seed: Seed of strategies that draw.
        params: The strategy's own parameters.

    Raises:
        ManifestError: a member is not in the set, would be created fresh or is trainable; or there is none.
        MergeError: what the strategy cannot take.
    """

    def merge(work: Assembly) -> None:
        chosen = _chosen(work.adapters, members)
        sources = [_source(adapter) for adapter in chosen]
        weights = [adapter.spec.weight for adapter in chosen]
        merged = merge_adapters(
            sources, weights, strategy=strategy, rank=rank, seed=seed, registry=work.registry, **params
        )
        names = ", ".join(f"{source.name} ({weight:g})" for source, weight in zip(sources, weights, strict=True))
        work.notes.append(f"{into} is {names}, merged by {strategy}; reconstruction error {merged.report.error:.2e}")
        one = Adapter(
            spec=AdapterSpec(name=into),
            config=merged.config,
            tensors=merged.tensors,
            shapes={key: tuple(tensor.shape) for key, tensor in merged.tensors.items()},
            base=chosen[0].base,
        )
        work.adapters = [one, *(adapter for adapter in work.adapters if adapter not in chosen)]

    names = list(steps)
    cut = names.index("read") + 1
    before = {name: steps[name] for name in names[:cut]}
    after = {name: steps[name] for name in names[cut:]}
    return default_assembler(work, {**before, "merge": merge, **after})


def _source(adapter: Adapter) -> MergeSource:
    return MergeSource.in_memory(adapter.name, adapter.config, dict(adapter.tensors or {}))


def _chosen(adapters: Sequence[Adapter], members: Sequence[str]) -> list[Adapter]:
    by_name = {adapter.name: adapter for adapter in adapters}
    for name in members:
        if name not in by_name:
            raise ManifestError(
                f"members names {name!r}, which is not in the set", remedy=choices(name, by_name, noun="adapter")
            )
    fixed = [adapter.name for adapter in adapters if adapter.spec.active and not adapter.spec.trainable]
    chosen = [by_name[name] for name in dict.fromkeys(members or fixed)]
    if not chosen:
        raise ManifestError("no adapter of the set is active and frozen, so there is nothing to merge")
    for adapter in chosen:
        if adapter.tensors is None or adapter.spec.trainable:
            why = "created fresh" if adapter.tensors is None else "trainable"
            raise ManifestError(
                f"adapter {adapter.name!r} is {why}, and the merged one is frozen",
                remedy=f"leave it out of members, or set adapters.{adapter.name}.trainable=false",
            )
    return chosen
