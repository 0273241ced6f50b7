"""Saving a whole set: every adapter to its owner, exact bytes, the owners upload, one rank commits once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, overload

import torch
from torch import nn

from multilora_store.adapter import content_digest, storage_name
from multilora_store.assembly.bridge import Member, active_adapters, record, trainable_adapters
from multilora_store.distributed import optimizer as optimizers
from multilora_store.distributed.agreement import Ranks
from multilora_store.distributed.exchange import Item, gather_to_owners, group_of
from multilora_store.distributed.handle import SaveHandle
from multilora_store.distributed.kept import kept_versions, local_digest, unchanged
from multilora_store.distributed.layout import AdapterLayout, describe_set, layouts
from multilora_store.distributed.owners import BUDGET, assign_owners, plan_rounds
from multilora_store.distributed.random import RANDOM_FILE, encode_random, random_state
from multilora_store.distributed.sharded import ranks_of, reshard
from multilora_store.errors import RankFailedError, StoreNotFoundError, UsageError
from multilora_store.storage import (
    Snapshot,
    SnapshotDraft,
    SnapshotMember,
    StagedPut,
    Store,
    StoreLike,
    Version,
    as_store,
)
from multilora_store.storage.codec import encode, nonfinite
from multilora_store.storage.progress import Listener, Meter

__all__ = ["Payload", "SaveHandle", "save"]

FORMAT: Final = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Payload:
    """What one owner receives whole, and what it does with it.

    Args:
        key: `adapter/<name>` or `optimizer/<name>`.
        items: The tensors.
        deliver: Uploads them; runs on the owner alone, on the host.
    """

    key: str
    items: Sequence[Item]
    deliver: Callable[[Mapping[str, torch.Tensor]], Any]

    @property
    def nbytes(self) -> int:
        return sum(item.layout.nbytes for item in self.items)


Moved: TypeAlias = Sequence[tuple[Payload, Mapping[str, torch.Tensor]]]


@dataclass
class _Job:
    """One save on this rank: what stays the same through all of its rounds."""

    store: Store
    ranks: Ranks
    snapshot_id: str
    step: int | None
    members: dict[str, SnapshotMember]
    metadata: Mapping[str, Any]
    tags: Sequence[str]
    extra: Mapping[str, bytes]
    state: dict[str, Any]
    random: list[dict[str, bytes]]
    known: dict[str, dict[str, Version]]
    meter: Meter
    delivered: list[Any] = field(default_factory=list)


_in_flight: SaveHandle | None = None


@overload
def save(
    model: nn.Module, store: StoreLike, *, step: int | None = ..., optimizer: torch.optim.Optimizer | None = ...,
    blocking: Literal[True] = ..., tags: Sequence[str] = ..., metadata: Mapping[str, Any] | None = ...,
    extra: Mapping[str, bytes] | None = ..., budget: int = ..., progress: Listener | None = ...,
    profile: str | None = ...,
) -> Snapshot: ...  # fmt: skip
@overload
def save(
    model: nn.Module, store: StoreLike, *, step: int | None = ..., optimizer: torch.optim.Optimizer | None = ...,
    blocking: Literal[False], tags: Sequence[str] = ..., metadata: Mapping[str, Any] | None = ...,
    extra: Mapping[str, bytes] | None = ..., budget: int = ..., progress: Listener | None = ...,
    profile: str | None = ...,
) -> SaveHandle: ...  # fmt: skip
def save(
    model: nn.Module,
    store: StoreLike,
    *,
    step: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    blocking: bool = True,
    tags: Sequence[str] = (),
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, bytes] | None = None,
    budget: int = BUDGET,
    progress: Listener | None = None,
    profile: str | None = None,
) -> Snapshot | SaveHandle:
    """Saves every adapter of the model, whole, with one snapshot, in one commit; the same call on every rank.

    Active or not, frozen or not; adapter bytes only, once, to the owners; unchanged adapters do not even travel.

    Args:
        model: Plain or under any wrapper; it is resharded first.
        store: Where to, or its URL; every rank must be able to reach it.
        step: The training step, recorded with the versions and the snapshot.
        optimizer: Its state per adapter is stored in the snapshot, with each rank's random state.
        blocking: False: everything is copied to the host, and uploaded and committed in the background.
        tags: Tags for every adapter's version, in the same commit.
        metadata: Recorded in the snapshot.
        extra: Files of the trainer's own (scheduler, data position), from the first rank, as `extra/<name>`.
        budget: Bytes of adapters that an owner holds at a time.
        progress: Called after each file of this rank's share that is uploaded.
        profile: A server (`vllm`): what it would refuse is logged as a warning, and stands in the snapshot's metadata
            with the rank setting that the set needs.

    Returns:
        The snapshot, on every rank; with `blocking=False` a handle whose `result()` is that.

    Raises:
        UsageError: a tensor on meta, of zero size, or with NaN or infinity. Nothing was stored.
        DisagreementError, RankFailedError: nothing was committed; the former snapshot stays the latest.
    """
    global _in_flight
    if _in_flight is not None and not _in_flight.told:
        _in_flight.result()
    ranks = ranks_of(model)
    known = ranks.together("save", lambda: as_store(store))
    job, payloads, fresh = _prepare(model, known, ranks, step, optimizer, tags, metadata, extra, progress, profile)
    if blocking:
        for moved in _gathered(job, payloads, budget):
            ranks.together("uploading adapters", lambda moved=moved: _deliver(job, moved))  # type: ignore[misc]
        return _finish(model, job, fresh)
    host = [one for moved in _gathered(job, payloads, budget) for one in moved]
    background = replace(job, ranks=ranks.aside("background save"))

    def publish() -> Snapshot:
        background.ranks.together("uploading adapters", lambda: _deliver(background, host))
        return _finish(model, background, fresh)

    _in_flight = SaveHandle(publish)
    return _in_flight


def _prepare(
    model: nn.Module,
    store: Store,
    ranks: Ranks,
    step: int | None,
    optimizer: torch.optim.Optimizer | None,
    tags: Sequence[str],
    metadata: Mapping[str, Any] | None,
    extra: Mapping[str, bytes] | None,
    progress: Listener | None,
    profile: str | None,
) -> tuple[_Job, list[Payload], dict[str, str]]:
    """Everything that can be refused is looked at before a byte moves."""
    held = ranks.together(
        "save",
        lambda: _checked(model),
        facts=lambda held: {
            "set": describe_set(model, held),
            "step": step,
            "store": store.url,
            "optimizer": type(optimizer).__name__ if optimizer is not None else None,
            "tags": list(tags),
            "profile": profile,
        },
    )
    served = _served(held, profile, told=ranks.first) if profile else {}
    parts = optimizers.collect(optimizer, held, ranks) if optimizer is not None else {}
    snapshot_id, known = ranks.from_first("save", lambda: (store.new_snapshot_id(), _known(store, held)))
    fresh = {name: local_digest(adapter) for name, adapter in held.items()}
    same = unchanged(model, store, ranks, fresh, known)
    active, trainable = active_adapters(model), trainable_adapters(model)
    members = {
        name: SnapshotMember(
            active=name in active,
            trainable=name in trainable,
            weight=active.get(name, 1.0),
            version=same[name].id if name in same else None,
        )
        for name in held
    }
    job = _Job(
        store=store,
        ranks=ranks,
        snapshot_id=snapshot_id,
        step=step,
        members=members,
        metadata={**(metadata or {}), **served},
        tags=tuple(tags),
        extra=dict(extra or {}),
        state={"format": FORMAT, "world": ranks.size, "optimizer": type(optimizer).__name__ if optimizer else None},
        random=ranks.share("random state", random_state()) if optimizer is not None else [],
        known=known,
        meter=Meter(progress),
    )
    payloads = [_adapter_payload(job, model, held[name]) for name in held if name not in same]
    if optimizer is not None:
        payloads += [_optimizer_payload(job, parts[name], held[name], optimizer) for name in held]
    return job, payloads, fresh


def _known(store: Store, names: Iterable[str]) -> dict[str, dict[str, Version]]:
    """The versions of these adapters that the store holds, by name and id; nothing where there is no store yet."""
    try:
        state = store.state()
    except StoreNotFoundError:
        return {}
    return {name: {version.id: version for version in state.versions(name)} for name in names}


def _checked(model: nn.Module) -> dict[str, AdapterLayout]:
    reshard(model)
    held = layouts(model)
    if not held:
        raise UsageError("the model carries no adapter to save")
    for name, adapter in held.items():
        if not adapter.tensors:
            raise UsageError(f"adapter {name} has no tensors", why="its targets match nothing in this model")
        for key, tensor in adapter.tensors.items():
            layout = adapter.layouts[key]
            if tensor.is_meta:
                raise UsageError(
                    f"adapter {name}: {key} is on the meta device: it has no values",
                    remedy="restore() it first, or detach() it",
                )
            if layout.numel == 0:
                raise UsageError(f"adapter {name}: {key} has zero size: {layout.shape}")
            if nonfinite([(key, layout.local(tensor))]):
                raise UsageError(
                    f"adapter {name}: {key} holds NaN or infinity",
                    why="an adapter with such values makes every output NaN",
                    remedy="find the step at which training diverged; the last snapshot is untouched",
                    name=name,
                    tensor=key,
                )
    return held


def _served(held: Mapping[str, AdapterLayout], profile: str, *, told: bool) -> dict[str, Any]:
    """What a server would make of the set, in a few words for the snapshot; in full as warnings, where `told`."""
    from multilora_store.storage.profiles import check_profile

    shapes = {name: {key: layout.shape for key, layout in one.layouts.items()} for name, one in held.items()}
    report = check_profile({name: (one.config, shapes[name]) for name, one in held.items()}, profile=profile)
    for name, findings in report.adapters.items():
        for finding in findings if told else ():
            log.warning("%s, %s: %s (%s); %s", name, profile, finding.what, finding.why, finding.remedy)
    return {"profiles": {profile: report.summary()}}


def _adapter_payload(job: _Job, model: nn.Module, adapter: AdapterLayout) -> Payload:
    items = [Item(key, adapter.layouts[key], tensor) for key, tensor in adapter.tensors.items()]
    member = record(model).member(adapter.name)
    base = record(model).base.to_mapping()

    def deliver(whole: Mapping[str, torch.Tensor]) -> StagedPut:
        staged = job.store.stage(
            adapter.name,
            whole,
            adapter.config,
            base=base,
            step=job.step,
            tags=job.tags,
            **_descent(member, adapter, whole),
        )
        return replace(staged, source=None)

    return Payload(f"adapter/{adapter.name}", items, deliver)


def _descent(member: Member, adapter: AdapterLayout, whole: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What the new version says of where it comes from: a recipe only where its content is still what that gives."""
    if member.version is not None:
        return {"parents": [member.version]}
    origin = member.origin
    if origin is None:
        return {}
    if content_digest(adapter.config, encode(whole).infos.values()) != origin.digest:
        return {"parents": origin.parents}
    return {"parents": origin.parents, "recipe": origin.recipe, "metadata": origin.metadata}


def _optimizer_payload(
    job: _Job, part: optimizers.OptimizerPart, adapter: AdapterLayout, optimizer: torch.optim.Optimizer
) -> Payload:
    path = f"optimizer/{storage_name(adapter.name)}.safetensors"

    def deliver(whole: Mapping[str, torch.Tensor]) -> tuple[str, Any]:
        data = optimizers.encode(part, whole)
        return path, job.store.stage_snapshot_file(job.snapshot_id, path, data)

    return Payload(f"optimizer/{adapter.name}", list(optimizers.slots(part, adapter, optimizer)), deliver)


def _gathered(job: _Job, payloads: Sequence[Payload], budget: int) -> Iterator[Moved]:
    """Round by round: the payloads that this rank owns, whole, on the host."""
    ranks = job.ranks
    by_key = {payload.key: payload for payload in payloads}
    sizes = {key: payload.nbytes for key, payload in by_key.items()}
    owners = assign_owners(sizes, ranks.members)
    me = ranks.members[ranks.rank]
    mine = [sizes[key] for key, owner in owners.items() if owner == me]
    job.meter.expect(len(mine), sum(mine))
    for round_ in plan_rounds(owners, sizes, budget):
        items = {
            owner: [_labelled(item, key) for key in keys for item in by_key[key].items]
            for owner, keys in round_.items()
        }
        group, members = group_of(items, ranks)
        with ranks.watch("gathering adapters"):
            whole = gather_to_owners(items, me, group, members)
        yield [
            (by_key[key], {item.label: whole.pop(f"{key}:{item.label}") for item in by_key[key].items})
            for key in round_.get(me, ())
        ]


def _labelled(item: Item, key: str) -> Item:
    """The item under a label that is unique in its round."""
    return Item(f"{key}:{item.label}", item.layout, item.tensor)


def _deliver(job: _Job, moved: Moved) -> None:
    for payload, whole in moved:
        job.delivered.append(payload.deliver(whole))
        job.meter.add(payload.nbytes)


def _finish(model: nn.Module, job: _Job, fresh: Mapping[str, str]) -> Snapshot:
    """One rank commits what all have uploaded; every rank learns what came of it."""
    delivered = [one for theirs in job.ranks.share("what was uploaded", job.delivered) for one in theirs]
    versions, snapshot = job.ranks.from_first("commit", lambda: _commit(job, delivered))
    kept = kept_versions(model)
    for name, version in versions.items():
        kept[name] = (job.store.url, fresh[name], version)
        record(model).member(name).version = version
    return snapshot


def _commit(job: _Job, delivered: Sequence[Any]) -> tuple[dict[str, Version], Snapshot]:
    puts = {one.name: one for one in delivered if isinstance(one, StagedPut)}
    files = dict(one for one in delivered if not isinstance(one, StagedPut))
    members = dict(job.members)
    missing = [name for name, member in members.items() if member.version is None and name not in puts]
    if missing:
        raise RankFailedError(f"no rank delivered adapter {', '.join(missing)}", adapters=missing)
    for name, staged in list(puts.items()):
        if staged.id in job.known.get(name, {}) and not staged.tags:
            members[name] = replace(members[name], version=staged.id)  # the store holds this very version
            del puts[name]
        elif any(parent.endswith(staged.id) for parent in staged.put.parents):
            puts[name] = replace(staged, put=replace(staged.put, parents=()))
    extra = {f"extra/{name}": data for name, data in job.extra.items()}
    if job.random:
        extra[RANDOM_FILE] = encode_random(job.random)
    extra["state.json"] = json.dumps(job.state, sort_keys=True).encode()
    for path, data in extra.items():
        files[path] = job.store.stage_snapshot_file(job.snapshot_id, path, data)
    draft = SnapshotDraft(id=job.snapshot_id, step=job.step, adapters=members, metadata=job.metadata, files=files)
    commit = job.store.commit(list(puts.values()), snapshot=draft)
    assert commit.snapshot is not None
    versions = {
        name: commit.versions.get(name) or job.known[name][str(member.version)] for name, member in members.items()
    }
    return versions, commit.snapshot
