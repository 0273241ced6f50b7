"""Restoring a whole set: each file is read once, by its owner, and its pieces go where the model keeps them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from multilora_store.adapter import storage_name
from multilora_store.assembly.bridge import record, set_active, set_trainable
from multilora_store.assembly.fingerprint import BaseIdentity, base_mismatch
from multilora_store.distributed import optimizer as optimizers
from multilora_store.distributed.agreement import Ranks
from multilora_store.distributed.exchange import Item
from multilora_store.distributed.filling import give_memory, readers_of, scatter
from multilora_store.distributed.idle import give_idle_no_gradient
from multilora_store.distributed.kept import kept_versions, local_digest
from multilora_store.distributed.layout import AdapterLayout, layouts
from multilora_store.distributed.owners import BUDGET, assign_owners, plan_rounds
from multilora_store.distributed.random import RANDOM_FILE, decode_random, set_random_state
from multilora_store.distributed.sharded import mesh_of, ranks_of, reshard
from multilora_store.errors import CoverageError, UsageError, choices
from multilora_store.storage import PeftFolder, Snapshot, Store, StoredAdapter, StoreLike, Version, as_store

__all__ = ["check_coverage", "fill", "restore"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Source:
    """A snapshot and its versions, as the first rank found them; the same on every rank."""

    snapshot: Snapshot
    versions: Mapping[str, Version]
    files: Sequence[str]


def restore(
    model: nn.Module,
    store: StoreLike,
    *,
    snapshot: str = "latest",
    optimizer: torch.optim.Optimizer | None = None,
    adapters: Iterable[str] | None = None,
    allow_base_mismatch: bool = False,
    budget: int = BUDGET,
) -> Snapshot:
    """Puts the set of a snapshot back into a model of any world size and wrapper; the inverse of `save`.

    Weights, active adapters with their weights, trainable flags and, if asked for, the optimizer's state and, on as
    many ranks as saved, each rank's random state.

    Args:
        model: Carries the adapters, in any order, possibly on the meta device (fsdp2); it is resharded first.
        store: Where from, or its URL; each file is read by one rank only.
        snapshot: `latest` or an id.
        optimizer: Built over the adapters that were trained; its state is replaced.
        adapters: Only these, and no flags of others; None: the whole set, which must be the model's.
        allow_base_mismatch: Take adapters that were made for another base.
        budget: Bytes of adapters that an owner holds at a time.

    Raises:
        NotInStoreError: there is no such snapshot.
        BaseMismatchError: an adapter was saved from another base; nothing was written.
        UsageError: the snapshot's set is not the model's, or it holds no state for this optimizer.
        CoverageError: tensors of a version are not those of the model; nothing was written.
        DisagreementError, RankFailedError: another rank differs or failed; restore again before going on.
    """
    ranks = ranks_of(model)
    here = ranks.together("restore", lambda: as_store(store))
    wanted = None if adapters is None else sorted(set(adapters))
    source = ranks.from_first("restore", lambda: _find(here, snapshot))
    held = ranks.together(
        "restore",
        lambda: _held(model, source, wanted, optimizer, allow_base_mismatch),
        facts=lambda held: {
            "snapshot": source.snapshot.id,
            "optimizer": type(optimizer).__name__ if optimizer else None,
            "adapters": {n: {k: list(t.shape) for k, t in a.layouts.items()} for n, a in held.items()},
        },
    )
    owners = assign_owners({n: a.nbytes for n, a in held.items()}, readers_of(mesh_of(model), ranks))
    me = ranks.members[ranks.rank]
    opened = ranks.together(
        "opening adapters",
        lambda: {n: _open(here, source.versions[n], held[n]) for n in held if owners[n] == me},
    )
    fill(model, ranks, held, owners, opened, budget)
    _restore_flags(model, ranks, source, held, whole_set=wanted is None)
    if optimizer is not None:
        _restore_optimizer(model, ranks, here, source, held, owners, optimizer, budget)
    kept = kept_versions(model)
    for name, adapter in held.items():
        kept[name] = (here.url, local_digest(adapter), source.versions[name])
        record(model).member(name).version = source.versions[name]
    return source.snapshot


def _find(store: Store, wanted: str) -> _Source:
    snapshot = store.snapshot(wanted)
    versions = {n: store.resolve(f"{n}@{member.version}") for n, member in snapshot.adapters.items()}
    return _Source(snapshot, versions, store.snapshot_files(snapshot))


def _held(
    model: nn.Module,
    source: _Source,
    wanted: list[str] | None,
    optimizer: torch.optim.Optimizer | None,
    any_base: bool,
) -> dict[str, AdapterLayout]:
    reshard(model)
    names = record(model).names
    stored = source.snapshot.adapters
    for name in wanted if wanted is not None else [*names, *stored]:
        if name not in stored:
            raise UsageError(
                f"snapshot {source.snapshot.id} holds no adapter {name!r}",
                remedy=f"{choices(name, stored, noun='adapter')}; restore(adapters=[...]) takes a part of the set",
            )
        if name not in names:
            raise UsageError(
                f"the model carries no adapter {name!r} of snapshot {source.snapshot.id}",
                remedy="assemble it (snapshot=...) or attach() it; restore(adapters=[...]) takes a part of the set",
            )
    chosen = tuple(name for name in names if wanted is None or name in wanted)
    for name in () if any_base else chosen:
        made_for = BaseIdentity.from_mapping(source.versions[name].base)
        error = base_mismatch(name, record(model).member(name).config, made_for, record(model).base)
        if error is not None:
            raise error
    held = layouts(model, chosen)
    if not give_memory(model, [t for a in held.values() for t in a.tensors.values()]):
        return held
    if optimizer is not None:
        raise UsageError(
            "the optimizer was built over adapters on the meta device",
            remedy="restore() without it, build it, then restore(optimizer=...)",
        )
    give_idle_no_gradient(model)
    return layouts(model, chosen)


def check_coverage(where: str, found: Mapping[str, tuple[int, ...]], adapter: AdapterLayout) -> None:
    """Names and shapes are those of the model, all of them and no others.

    Raises:
        CoverageError: naming the tensors that differ.
    """
    expected = {key: layout.shape for key, layout in adapter.layouts.items()}
    wrong = [
        f"{key} is {found.get(key, 'missing')} there, {expected.get(key, 'missing')} in the model"
        for key in sorted(expected.keys() | found.keys())
        if found.get(key) != expected.get(key)
    ]
    if wrong:
        raise CoverageError(
            f"{where} does not fit adapter {adapter.name} of this model: {len(wrong)} tensors differ",
            why="; ".join(wrong[:5]),
            remedy="take the configuration that these tensors were saved with",
            tensors=wrong,
        )


def _open(store: Store, version: Version, adapter: AdapterLayout) -> StoredAdapter:
    stored = store.get(version)
    check_coverage(str(version), {info.name: info.shape for info in stored.infos.values()}, adapter)
    ours, theirs = (
        adapter.config.settled(lambda: [info.name for info in stored.infos.values()]).canonical(),
        stored.config.canonical(),
    )
    if ours != theirs:
        raise CoverageError(
            f"{version} was saved with another configuration than adapter {adapter.name} of this model",
            why=_config_difference(ours, theirs),
            remedy="assemble the model from this snapshot's configs",
        )
    return stored


def _config_difference(ours: Any, theirs: Any) -> str:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
        return "; ".join(f"{key}: stored {theirs.get(key)!r}, here {ours.get(key)!r}" for key in keys[:5])
    return "their canonical forms differ"


def fill(
    model: nn.Module,
    ranks: Ranks,
    held: Mapping[str, AdapterLayout],
    owners: Mapping[str, int],
    opened: Mapping[str, StoredAdapter | PeftFolder],
    budget: int = BUDGET,
) -> None:
    """Streams every adapter from its owner into the shards of all ranks, a budget's worth at a time."""
    items = {
        name: [Item(f"{name}:{key}", a.layouts[key], t) for key, t in a.tensors.items()] for name, a in held.items()
    }

    def read(names: Iterable[str]) -> dict[str, torch.Tensor]:
        whole = {}
        for name in names:
            rounded = []
            for key, tensor in opened[name].tensors.items():
                dtype = held[name].layouts[key].dtype
                if tensor.dtype.itemsize > dtype.itemsize:
                    rounded.append(f"{tensor.dtype} to {dtype}")
                whole[f"{name}:{key}"] = tensor.to(dtype).contiguous()
            if rounded:
                kinds = ", ".join(sorted(set(rounded)))
                logger.warning("adapter %s: %d tensors rounded, %s: the model's dtype", name, len(rounded), kinds)
        return whole

    for round_ in plan_rounds(owners, {n: a.nbytes for n, a in held.items()}, budget):
        mine = round_.get(ranks.members[ranks.rank], ())
        whole = ranks.together("reading adapters", lambda mine=mine: read(mine))  # type: ignore[misc]
        scatter(model, ranks, {owner: [i for n in names for i in items[n]] for owner, names in round_.items()}, whole)


def _restore_flags(
    model: nn.Module, ranks: Ranks, source: _Source, held: Mapping[str, AdapterLayout], *, whole_set: bool
) -> None:
    if not whole_set:
        return
    members = source.snapshot.adapters
    weights = {n: members[n].weight for n in members if members[n].active}

    def apply() -> None:
        set_active(model, weights)
        set_trainable(model, [n for n in held if members[n].trainable])

    ranks.together("restore", apply)


def _restore_optimizer(
    model: nn.Module,
    ranks: Ranks,
    store: Store,
    source: _Source,
    held: Mapping[str, AdapterLayout],
    owners: Mapping[str, int],
    optimizer: torch.optim.Optimizer,
    budget: int,
) -> None:
    paths = {name: f"optimizer/{storage_name(name)}.safetensors" for name in held}
    absent = [name for name, path in paths.items() if path not in source.files]
    if absent:
        raise UsageError(
            f"snapshot {source.snapshot.id} holds no optimizer state for adapter {', '.join(absent)}",
            remedy="restore() without optimizer=, or from a snapshot that was saved with one",
        )
    mine = [name for name in held if owners[name] == ranks.members[ranks.rank]]

    def read(name: str) -> tuple[optimizers.OptimizerPart, dict[str, torch.Tensor]]:
        data = store.read_snapshot_file(source.snapshot, paths[name])
        part, whole = optimizers.decode(data, paths[name])
        _check_part(part, held[name], optimizer)
        return part, {f"{name}:{label}": tensor for label, tensor in whole.items()}

    for round_ in plan_rounds(owners, {n: a.nbytes for n, a in held.items()}, budget):
        own = [n for n in round_.get(ranks.members[ranks.rank], ()) if n in mine]
        loaded = ranks.together("reading optimizer state", lambda own=own: {n: read(n) for n in own})  # type: ignore[misc]
        told = ranks.share("optimizer state", {name: part for name, (part, _) in loaded.items()})
        parts = {name: part for theirs in told for name, part in theirs.items()}
        whole = {label: tensor for _, tensors in loaded.values() for label, tensor in tensors.items()}
        moved = {
            owner: [item for n in names for item in _slots(n, parts[n], held[n], optimizer)]
            for owner, names in round_.items()
        }
        scatter(model, ranks, moved, whole)
        for names in round_.values():
            for name in names:
                optimizers.restore_part(parts[name], held[name], optimizer)
    _restore_random(ranks, store, source)


def _slots(
    name: str, part: optimizers.OptimizerPart, adapter: AdapterLayout, optimizer: torch.optim.Optimizer
) -> Iterator[Item]:
    for item in optimizers.slots(part, adapter, optimizer, create=True):
        yield Item(f"{name}:{item.label}", item.layout, item.tensor)


def _check_part(part: optimizers.OptimizerPart, adapter: AdapterLayout, optimizer: torch.optim.Optimizer) -> None:
    if part.tensors or part.scalars:
        optimizers.check_kind(part, optimizer, adapter.name)
    trained = {key for key, _ in (*part.tensors, *part.scalars)}
    known = optimizers.groups_of(optimizer)
    untold = [key for key in sorted(trained) if key not in adapter.tensors or id(adapter.tensors[key]) not in known]
    if untold:
        raise UsageError(
            f"adapter {adapter.name} was trained, but {untold[0]} is in no group of the optimizer",
            why=f"{len(untold)} of its tensors have state in the snapshot",
            remedy="build the optimizer over every adapter that the snapshot's run trained",
        )


def _restore_random(ranks: Ranks, store: Store, source: _Source) -> None:
    if RANDOM_FILE not in source.files:
        return
    states = ranks.from_first(
        "random state", lambda: decode_random(store.read_snapshot_file(source.snapshot, RANDOM_FILE))
    )
    if len(states) == ranks.size:
        set_random_state(states[ranks.rank])
    else:
        logger.info("saved on %d ranks, restored on %d: random state is left as it is", len(states), ranks.size)
