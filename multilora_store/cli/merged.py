"""Adapters of a set as one: merged on their way onto a model, or into the files of a base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from multilora_store.cli.documents import jsonable
from multilora_store.errors import ManifestError, UsageError
from multilora_store.manifest import AdapterSpec, Lock, LockEntry

if TYPE_CHECKING:
    from multilora_store.assembly.bridge import Origin
    from multilora_store.assembly.steps import Adapter, Assembly
    from multilora_store.merging import Merged, MergeSource
    from multilora_store.storage import Store

__all__ = ["MergeStep", "settings_of", "sources_of"]

_ABOUT_THE_STORE = "if_exists"


def settings_of(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a merge that a chosen strategy's config gives: the common ones and its own parameters."""
    common = {key: value for key, value in choice.items() if key not in {"strategy", "into", "params"}}
    return {**common, **dict(choice.get("params") or {})}


@dataclass(kw_only=True)
class MergeStep:
    """A step of the assembly, to be run after `read`: the active adapters of the set become one.

    Attributes:
        choice: What `merge=...` chose.
        weights: The weight of each adapter that was merged, once it has run.
        result: The merged adapter, once it has run.
    """

    choice: Mapping[str, Any]
    weights: dict[str, float] = field(default_factory=dict)
    result: Merged | None = None

    def __call__(self, work: Assembly) -> None:
        """Merge, and leave the result as the only adapter of the work.

        Raises:
            ManifestError: no adapter is active, or one is to be created fresh.
            MergeError: what the strategy cannot take.
        """
        from multilora_store.assembly.steps import Adapter
        from multilora_store.merging import merge_adapters

        active = [adapter for adapter in work.adapters if adapter.spec.active]
        _check(active)
        idle = [adapter.name for adapter in work.adapters if not adapter.spec.active]
        if idle:
            work.notes.append(f"not active, so not merged: {', '.join(idle)}")
        settings = {key: value for key, value in settings_of(self.choice).items() if key != _ABOUT_THE_STORE}
        self.weights = {adapter.name: adapter.spec.weight for adapter in active}
        sources = [_source(adapter) for adapter in active]
        self.result = merge_adapters(
            sources,
            list(self.weights.values()),
            strategy=str(self.choice["strategy"]),
            registry=work.registry,
            **settings,
        )
        dtypes = {adapter.spec.dtype for adapter in active}
        spec = AdapterSpec(
            name=str(self.choice["into"]),
            trainable=all(adapter.spec.trainable for adapter in active),
            dtype=dtypes.pop() if len(dtypes) == 1 else None,
        )
        tensors = self.result.tensors
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        base = active[0].base
        work.adapters = [
            Adapter(
                spec=spec,
                config=self.result.config,
                tensors=tensors,
                shapes=shapes,
                base=base,
                origin=_origin(sources, self.result),
            )
        ]

    def document(self) -> dict[str, Any]:
        """What was merged and what was lost, as JSON."""
        assert self.result is not None, "the step has run"
        return {
            "into": self.choice["into"],
            "weights": self.weights,
            "report": self.result.report.to_dict(),
            "recipe": jsonable(self.result.recipe),
        }

    def lines(self) -> list[str]:
        """The same for people."""
        assert self.result is not None, "the step has run"
        report = self.result.report
        merged = ", ".join(f"{name} ({weight:g})" for name, weight in self.weights.items())
        return [
            f"{self.choice['into']} is {merged}, merged by {report.strategy}: reconstruction error {report.error:.2e}, "
            f"distance to the weighted sum {report.sum_distance:.2e}",
            *(f"note: {note}" for note in report.notes),
        ]


def _check(active: Sequence[Adapter]) -> None:
    fresh = [adapter.name for adapter in active if adapter.tensors is None]
    if not active:
        raise ManifestError("no adapter of the set is active, so there is nothing to merge")
    if fresh:
        raise ManifestError(
            f"{', '.join(fresh)} would be created fresh, and a merge needs trained adapters",
            remedy="store it first, or leave it out with adapters.NAME.active=false",
        )


def _source(adapter: Adapter) -> MergeSource:
    """The digest is that of the content, so that the same merge from a store has the same bytes."""
    from multilora_store.merging import MergeSource

    source = MergeSource.in_memory(adapter.name, adapter.config, dict(adapter.tensors or {}))
    version = adapter.version
    if version is None:
        return source
    return replace(source, name=f"{version.name}@{version.id}", version=version.id, base=version.base)


def _origin(sources: Sequence[MergeSource], merged: Merged) -> Origin:
    from multilora_store.adapter import content_digest
    from multilora_store.assembly.bridge import Origin
    from multilora_store.merging import parents_of
    from multilora_store.storage.codec import encode

    return Origin(
        parents=parents_of(sources),
        recipe=merged.recipe,
        metadata={"merge_report": merged.report.to_dict()},
        digest=content_digest(merged.config, encode(merged.tensors).infos.values()),
    )


def sources_of(lock: Lock, store: Store | None) -> tuple[list[MergeSource], list[float]]:
    """The active adapters of a set and their weights, for a merge into a base.

    Raises:
        UsageError: one would be created fresh.
    """
    from multilora_store.assembly.resolve import Stores

    stores = Stores(store)
    entries = [entry for entry in lock if entry.spec.active]
    return [_locked_source(entry, stores) for entry in entries], [entry.spec.weight for entry in entries]


def _locked_source(entry: LockEntry, stores: Any) -> MergeSource:
    from multilora_store.merging import MergeSource

    if entry.fresh:
        raise UsageError(f"adapter {entry.name!r} would be created fresh: there is nothing of it to merge")
    if entry.version is None:
        folder = stores.unstored(entry.spec)
        return MergeSource.in_memory(entry.name, folder.config, folder.tensors)
    return MergeSource.stored(entry.name, stores.stored(entry.spec, entry.version, entry.store))
