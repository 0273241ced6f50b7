"""Merging stored adapters into a new stored adapter, without a base model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from multilora_store.adapter import check_name
from multilora_store.errors import ExistsError, MergeError, choices
from multilora_store.merging.adapters import BUDGET, Merged, merge_adapters
from multilora_store.merging.module_merge import Truncation
from multilora_store.merging.plan import check_weights
from multilora_store.merging.readback import check_reads_back
from multilora_store.merging.report import MergeReport
from multilora_store.merging.source import MergeSource, parents_of
from multilora_store.merging.strategy import Strategy
from multilora_store.plugins import Registry
from multilora_store.storage.progress import Listener

if TYPE_CHECKING:
    from multilora_store.storage import Store, StoreLike, Version

__all__ = ["MergeResult", "merge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """A merge of stored adapters.

    Attributes:
        version: The new version, None after a dry run.
        report: What was lost.
        recipe: All that determines the bytes.
    """

    version: Version | None
    report: MergeReport
    recipe: Mapping[str, Any]


def merge(
    store: StoreLike,
    weights: Mapping[str, float],
    *,
    strategy: str = "linear",
    into: str,
    rank: int | None = None,
    seed: int = 0,
    dry_run: bool = False,
    modules_to_save: str | Mapping[str, str] = "refuse",
    dtype: str | torch.dtype | None = None,
    truncation: Truncation = "auto",
    threads: int | None = None,
    memory_budget: int = BUDGET,
    if_exists: Literal["error", "version"] = "error",
    registry: Registry | None = None,
    progress: Listener | None = None,
    **params: Any,
) -> MergeResult:
    """Merge stored adapters into a new stored adapter, module by module, without a base model.

    Args:
        store: Where the adapters lie and the result goes, or its URL.
        weights: Reference (`a`, `a@best`) -> weight.
        strategy: Name of a merge strategy.
        into: Name of the result.
        if_exists: `error` refuses an `into` that the store has; `version` adds a version to it.
        rank, seed, dry_run, modules_to_save, dtype, truncation, threads, memory_budget, registry, progress, params:
            See `merge_adapters`.

    Raises:
        ExistsError: `into` exists.
        MergeError: see `merge_adapters`; or the stored result did not read back as it was computed.
        NotInStoreError: a reference names nothing.
    """
    from multilora_store.storage import as_store

    store = as_store(store)
    _check_into(store, into, if_exists)
    chosen = Strategy.find(strategy, registry)
    chosen.complete(params)
    check_weights(chosen, weights)
    sources = [MergeSource.stored(ref, store.get(ref)) for ref in weights]
    merged = merge_adapters(
        sources,
        list(weights.values()),
        strategy=chosen,
        rank=rank,
        seed=seed,
        dry_run=dry_run,
        modules_to_save=modules_to_save,
        dtype=dtype,
        truncation=truncation,
        threads=threads,
        memory_budget=memory_budget,
        registry=registry,
        progress=progress,
        **params,
    )
    if dry_run:
        return MergeResult(version=None, report=merged.report, recipe=merged.recipe)
    version = _write(store, into, sources, merged)
    return MergeResult(version=version, report=merged.report, recipe=merged.recipe)


def _check_into(store: Store, into: str, if_exists: str) -> None:
    check_name(into)
    if if_exists not in ("error", "version"):
        raise MergeError(f"if_exists = {if_exists!r}", remedy=choices(str(if_exists), ["error", "version"]))
    if if_exists == "error" and into in store.names():
        raise ExistsError(
            f"the store already has an adapter {into!r}: {store.url}",
            remedy="choose another name, or add a version to it with if_exists=version",
            name=into,
        )


def _write(store: Store, into: str, sources: Sequence[MergeSource], merged: Merged) -> Version:
    known = {version.id for version in store.versions(into)} if into in store.names() else set()
    version = store.put(
        into,
        merged.tensors,
        merged.config,
        parents=parents_of(sources),
        recipe=dict(merged.recipe),
        metadata={"merge_report": merged.report.to_dict()},
        base=next((source.base for source in sources if source.base), None),
    )
    ref = f"{into}@{version.id}"
    try:
        stored = MergeSource.stored(ref, store.get(ref))
        check_reads_back(stored, merged.config, merged.tensors)
    except BaseException:
        if version.id not in known:
            store.delete(ref)
        raise
    return version
